"""Matrices that a warp holds in its registers: `ldmatrix`, `stmatrix`, `movmatrix`, `mma.sync`."""
