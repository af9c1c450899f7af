"""TMA: copies, stores and reductions, and the tensors that they see."""
