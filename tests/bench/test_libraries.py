"""Kernel libraries in the stock chains: what each is asked for, and that none can stop a row."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.bench.fakes import FakeClock, FakeProbe

from cakegen.bench import layer_chain
from cakegen.bench.libraries import ALL, JOINED, LIBRARIES, Library
from cakegen.bench.measure import Bench, Settings, measure_rows
from cakegen.bench.products import Cublas
from cakegen.bench.rivals import RIVALS
from cakegen.bench.rows import STAGES, Row
from cakegen.registry import load_registry
from cakegen.runtime import LatentMoe

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def cpu_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one cuBLAS call that the CPU lacks."""

    def multiply(products: Cublas, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x.float() @ weight.float().T)

    monkeypatch.setattr(Cublas, "multiply_fp32", multiply)


@pytest.fixture
def bench() -> Bench:
    settings = Settings(repeats=3, rotation=False, backend="reference", compile_rivals=False)
    moe = LatentMoe(load_registry("tiny_latent_moe"))
    return Bench(moe, CPU, FakeClock(l2_bytes=2**20), FakeProbe(), settings)  # type: ignore[arg-type]


class Counting(Library):
    """Computes as cuBLAS does, and counts."""

    name, module, chains = "counting", "torch", ALL

    def __init__(self) -> None:
        super().__init__(search=False)
        self.products: list[str] = []

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self.products.append("multiply")
        super().multiply(x, weight, out)

    def add(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self.products.append("add")
        super().add(x, weight, out)


class Transposing(Counting):
    """Wrong, and only in its last row."""

    name, chains = "transposing", JOINED

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        super().multiply(x, weight, out)
        out[-1].neg_()


class Refusing(Counting):
    """Serves nothing."""

    name, chains = "refusing", JOINED

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        raise RuntimeError("no kernel for M = 5")


@pytest.mark.parametrize(("stage", "chains"), [("front", ("joined", "joined_fp32")), ("tail", ("joined", "separate"))])
def test_library_takes_cublas_place_in_its_chains(bench: Bench, stage: str, chains: tuple[str, ...]) -> None:
    library = Counting()
    bench.libraries = (library,)
    (record,) = measure_rows(bench, [Row(stage, 8, 5)])
    assert {name for name in record.arms if "counting" in name} == {f"rival {name} counting eager" for name in chains}
    assert "multiply" in library.products
    assert ("add" in library.products) == (stage == "tail")
    assert record.unavailable == {}


def test_library_that_is_fastest_is_the_rows_rival_and_rotates(bench: Bench) -> None:
    library = Counting()
    bench.libraries, bench.settings = (library,), dataclasses.replace(bench.settings, rotation=True)
    # an arm's call leaves its trace in the library: those calls take 1 us, all others 100
    seen = [0]

    def script(call: Any, number: int) -> float:
        before, seen[0] = seen[0], len(library.products)
        return 1.0 if seen[0] > before else 100.0

    bench.clock = FakeClock(script, l2_bytes=2**20)
    (record,) = measure_rows(bench, [Row("tail", 8, 5)])
    assert str(record.rival) in {"joined counting eager", "separate counting eager"}
    assert (record.rival_us, record.rival_rotation_us) == (1.0, 1.0)


def test_wrong_or_failing_library_is_recorded_and_the_row_is_timed(bench: Bench) -> None:
    bench.libraries = (Transposing(), Refusing(), Counting())
    (record,) = measure_rows(bench, [Row("tail", 1, 5)])
    assert record.status == "timed"
    assert record.unavailable["rival joined refusing eager"] == "RuntimeError: no kernel for M = 5"
    assert record.unavailable["rival joined transposing eager"].startswith("WrongResult: out: ")
    assert "rival joined counting eager" in record.arms


def test_chain_of_layers_is_joined_with_each_library(bench: Bench) -> None:
    bench.libraries = (Counting(), Refusing())
    (chain,) = layer_chain.measure_chains(bench, [8], [1])
    assert chain["layer_us"]["rival joined counting"] > 0
    assert chain["unavailable"] == {"rival joined refusing": "RuntimeError: no kernel for M = 5"}


def test_each_library_names_chains_that_exist() -> None:
    assert list(LIBRARIES) == [library.name for library in LIBRARIES.values()]
    for library in LIBRARIES.values():
        assert set(library.chains) == set(STAGES)
        for stage, names in library.chains.items():
            assert {"joined"} <= set(names) <= set(RIVALS[stage])


def operands(tokens: int = 3, rows: int = 8, width: int = 16, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(tokens, width).to(BF16),
        torch.randn(rows, width).to(BF16),
        torch.zeros(tokens, rows, dtype=dtype),
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Modules in the place of the libraries, with the signatures that they have; what they were called with."""
    calls: dict[str, list[Any]] = {}

    def noted(name: str, product: Any) -> Any:
        def call(*tensors: torch.Tensor, **options: Any) -> None:
            calls.setdefault(name, []).append(options)
            product(*tensors, **options)

        return call

    def module(name: str, **functions: Any) -> None:
        made = ModuleType(name)
        for function, product in functions.items():
            setattr(made, function, noted(function, product) if callable(product) else product)
        monkeypatch.setitem(sys.modules, name, made)

    def nt(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None) -> None:
        d.copy_(a.float() @ b.float().T + (0 if c is None else c.float()))

    def nn(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
        out.copy_(a.float() @ b.float())

    def add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
        out.copy_(out.float() + a.float() @ b.float())

    def router(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, launch_with_pdl: bool) -> None:
        nn(a, b, out)

    module("deep_gemm", bf16_gemm_nt=nt)
    module("quack")
    module("quack.gemm_interface", gemm=nn, gemm_add_inplace=add)
    gemm = SimpleNamespace(mm_M1_16_K16_N8=noted("router", router))
    module("flashinfer", mm_bf16=nn, gemm=gemm, autotune=None)
    # a CPU build of torch has no such choice
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda name=None: "cublas")
    flashinfer: Any = sys.modules["flashinfer"]
    flashinfer.autotune = lambda on: contextlib.nullcontext(calls.setdefault("autotune", []).append(on))
    return calls


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["cublaslt", "deepgemm", "quack", "flashinfer"])
def test_products_are_those_of_the_weights_rows(name: str) -> None:
    library = LIBRARIES[name](search=False)
    x, weight, out = operands()
    exact = x.float() @ weight.float().T
    library.multiply(x, weight, out)
    torch.testing.assert_close(out, exact.to(BF16), rtol=0.01, atol=0.01)
    library.add(x, weight, out)
    torch.testing.assert_close(out, (2 * exact).to(BF16), rtol=0.02, atol=0.02)
    wide = operands(dtype=torch.float32)[2]
    for product in (library.multiply_fp32, library.route):
        product(x, weight, wide.fill_(float("nan")))
        torch.testing.assert_close(wide, exact)


def test_quack_searches_only_when_asked(installed: dict[str, list[Any]]) -> None:
    for search in (False, True):
        LIBRARIES["quack"](search).multiply(*operands())
    assert [{k: v for k, v in call.items() if k != "out"} for call in installed["gemm"]] == [
        {"tuned": False},
        {"tuned": True, "split_k": None},
    ]


def test_flashinfer_tunes_each_shape_once_and_routes_few_tokens(installed: dict[str, list[Any]]) -> None:
    library = LIBRARIES["flashinfer"](search=True)
    for tokens in (3, 3, 4):
        library.multiply(*operands(tokens))
    assert installed["autotune"] == [True, True]
    for tokens, rows in ((16, 8), (17, 8), (3, 24)):
        library.route(*operands(tokens, rows, dtype=torch.float32))
    assert installed["router"] == [{"launch_with_pdl": False}]


def test_cublaslt_is_preferred_only_while_it_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = ["cublas"]
    during: list[str] = []

    def prefer(name: str | None = None) -> str:
        if name is not None:
            chosen.append(name)
        return chosen[-1]

    def refuse(products: Cublas, *operands: torch.Tensor) -> None:
        during.append(chosen[-1])
        raise RuntimeError("no algorithm")

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    monkeypatch.setattr(Cublas, "multiply", refuse)
    with pytest.raises(RuntimeError, match="no algorithm"):
        LIBRARIES["cublaslt"](search=False).multiply(*operands())
    assert (during, chosen[-1]) == (["cublaslt"], "cublas")
