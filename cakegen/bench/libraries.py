"""Installed kernel libraries whose GEMMs take cuBLAS's place in the stock chains. Imports torch and this package.

To add one, write a class of products with the chains that it has a place in, and enter it in `LIBRARIES`. What a
library has no product for, cuBLAS computes. It may raise whatever it likes: one that does not open is named in the
header of the results, one that fails in a row is named in the row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

from cakegen.bench.products import Cublas

Chains = Mapping[str, tuple[str, ...]]
JOINED: Chains = {"front": ("joined",), "tail": ("joined",)}
"""For a library with bf16 output only, or whose search takes long."""
ALL: Chains = {"front": ("joined", "joined_fp32"), "tail": ("joined", "separate")}
ROUTER_TOKENS = 16
"""Most tokens of FlashInfer's router GEMMs."""


class Library(Cublas):
    """A library's products.

    Attributes
    ----------
    name
        As results and `--library` name it.
    module
        What is imported; its distribution gives the version.
    builds_on
        Other distributions whose versions shape what it does.
    only_searches
        Whether it has no configuration to take without a search.
    chains
        By stage, the chains of `rivals.RIVALS` whose products it computes; `joined` among them, of which chains of
        layers are made.
    """

    module: str
    builds_on: tuple[str, ...] = ()
    only_searches: bool = False
    chains: Chains

    def __init__(self, search: bool) -> None:
        """Import the library.

        Parameters
        ----------
        search
            Whether it may try its configurations for each shape, where it can.

        Raises
        ------
        Exception
            It is not installed, or does not work here.
        """
        self._module: Any = import_module(self.module)
        self._search = search


class CublasLt(Library):
    """torch's own products through cuBLASLt, whose heuristics differ from cuBLAS's."""

    name, module = "cublaslt", "torch"
    chains = ALL

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """As `Cublas.multiply`."""
        self._through_lt(super().multiply, x, weight, out)

    def multiply_fp32(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """As `Cublas.multiply_fp32`."""
        self._through_lt(super().multiply_fp32, x, weight, out)

    def add(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """As `Cublas.add`."""
        self._through_lt(super().add, x, weight, out)

    def _through_lt(self, product: Callable[..., None], *operands: torch.Tensor) -> None:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        try:
            product(*operands)
        finally:
            torch.backends.cuda.preferred_blas_library(before)


class DeepGemm(Library):
    """DeepGEMM's `bf16_gemm_nt`; compiled for each N, K and tile when it is first called."""

    name, module = "deepgemm", "deep_gemm"
    chains = ALL

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """As `Cublas.multiply`."""
        self._module.bf16_gemm_nt(x, weight, out)

    def multiply_fp32(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """As `Cublas.multiply_fp32`."""
        self._module.bf16_gemm_nt(x, weight, out)

    def add(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """As `Cublas.add`; the sum is added onto `out` where it lies."""
        self._module.bf16_gemm_nt(x, weight, out, c=out)


class Quack(Library):
    """QuACK's `gemm`, CuTe DSL kernels. A search tries its tiles, clusters, orders and splits of K for each shape."""

    name, module = "quack", "quack.gemm_interface"
    builds_on = ("nvidia-cutlass-dsl",)
    chains = ALL

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """As `Cublas.multiply`."""
        self._module.gemm(x, weight.T, out=out, **self._how)

    def multiply_fp32(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """As `Cublas.multiply_fp32`."""
        self._module.gemm(x, weight.T, out=out, **self._how)

    def add(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """As `Cublas.add`."""
        self._module.gemm_add_inplace(x, weight.T, out, **self._how)

    def route(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """cuBLAS's: a search of its own for the small product would cost more than it can give."""
        Cublas.multiply_fp32(self, x, weight, out)

    @property
    def _how(self) -> dict[str, Any]:
        return {"tuned": True, "split_k": None} if self._search else {"tuned": False}


class FlashInfer(Library):
    """FlashInfer's `mm_bf16` over the backends that this device has, and its router GEMM where it has this shape.

    A search measures its backends and their algorithms when a shape is first seen.
    """

    name, module = "flashinfer", "flashinfer"
    chains = JOINED

    def __init__(self, search: bool) -> None:
        super().__init__(search)
        self._tuned: set[tuple[int, ...]] = set()

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """As `Cublas.multiply`."""
        shape = (*x.shape, weight.shape[0])
        tune = self._search and shape not in self._tuned
        self._tuned.add(shape)
        if tune:
            with self._module.autotune(True):
                self._module.mm_bf16(x, weight.T, out=out, backend="auto")
        self._module.mm_bf16(x, weight.T, out=out, backend="auto")

    def route(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Its router GEMM for up to 16 tokens, where it has one of these experts and this width; else cuBLAS's."""
        experts, hidden = weight.shape
        router = getattr(self._module.gemm, f"mm_M1_16_K{hidden}_N{experts}", None)
        if router is None or x.shape[0] > ROUTER_TOKENS:
            super().route(x, weight, out)
        else:
            router(x, weight.T, out, launch_with_pdl=False)


class TritonTemplates(Library):
    """torch.compile's Triton GEMMs, also persistent ones with TMA; the fastest of its search for each shape."""

    name, module = "triton", "triton"
    only_searches = True
    chains = JOINED

    def __init__(self, search: bool) -> None:
        super().__init__(search)
        config: Any = torch._dynamo.config
        # each T is a kernel of its own; beyond the limit torch would silently run cuBLAS
        config.recompile_limit = config.accumulated_recompile_limit = 1024
        config.fail_on_recompile_limit_hit = True
        options: dict[str, Any] = {
            "max_autotune_gemm": True,
            "max_autotune_gemm_backends": "TRITON",
            "triton.enable_persistent_tma_matmul": True,
            "compile_threads": min(16, os.cpu_count() or 1),
        }
        self._multiply: Any = torch.compile(_multiply_into, fullgraph=True, dynamic=False, options=options)

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """As `Cublas.multiply`."""
        # as new views: what the elementwise kernels marked as dynamic is fixed here
        self._multiply(x[:], weight, out[:])


def _multiply_into(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x @ weight.T)


LIBRARIES: Mapping[str, type[Library]] = {
    library.name: library for library in (CublasLt, DeepGemm, Quack, FlashInfer, TritonTemplates)
}
