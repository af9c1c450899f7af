"""tcgen05: issue, operands, tensor memory."""
