"""The matrix products of a stock chain, and who computes them. Imports torch.

A chain multiplies bf16 tokens by K-major bf16 weights. `Cublas` is what torch calls; a kernel library takes its place
by overriding what it has (`libraries.py`), so that a chain of a library is cuBLAS's chain with other GEMMs.
"""

from __future__ import annotations

import torch


class Cublas:
    """Products as torch computes them: one cuBLAS call each.

    Every function reads `x [T, K]` and `weight [N, K]`, bf16 with the last dimension dense, and writes `out [T, N]`. It
    enqueues on the current stream.
    """

    name = "cublas"

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """`x @ weight.T`, summed in fp32 and rounded to bf16."""
        torch.mm(x, weight.T, out=out)

    def multiply_fp32(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """`x @ weight.T` with fp32 output; CUDA only."""
        torch.mm(x, weight.T, out_dtype=torch.float32, out=out)

    def add(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """`out + x @ weight.T` into bf16 `out`."""
        out.addmm_(x, weight.T)

    def route(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """The router's product, with fp32 output."""
        self.multiply_fp32(x, weight, out)


CUBLAS = Cublas()
