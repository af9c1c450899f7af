"""wgmma of one warp, and its operands."""
