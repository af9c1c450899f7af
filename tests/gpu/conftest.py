"""Fixtures of the GPU tests, their hard time limits, and the summary that they leave.

Environment
-----------
CAKEGEN_SUMMARY
    Where to write the summary: `<path>.json` and `<path>.md` (a suffix of the path is dropped).
CAKEGEN_COMMIT
    What was tested; goes into the summary.
CAKEGEN_GPU_SECONDS
    After so many seconds the process ends with all threads' stacks, whatever hangs (default 580).
"""

from __future__ import annotations

import faulthandler
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.gpu.cases import REGISTRIES, GuardedPartials, Weights, make_weights, remembered, rendered_tree
from support.gpu.prefill import DEGREES, ROWS, TOKENS, guarded_partials
from support.gpu.summary import Summary
from support.models import hopper, kimi_k3_model, tiny_model

from cakegen.errors import RegistryError
from cakegen.model import Model
from cakegen.registry import Registry, load_registry
from cakegen.runtime import LatentMoe
from cakegen.runtime.control import describe_wait_record, opened_control

HERE = Path(__file__).parent
MODELS = {"kimi": kimi_k3_model, "tiny": tiny_model}
PER_TEST_SECONDS = 180


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and bound it by a thread: a hung synchronise answers no signal."""
    skip = None if torch.cuda.is_available() else pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if config.pluginmanager.hasplugin("timeout"):
            item.add_marker(pytest.mark.timeout(PER_TEST_SECONDS, method="thread"))
        if skip:
            item.add_marker(skip)


def pytest_configure(config: pytest.Config) -> None:
    """Start the session's clock and its summary."""
    path = os.environ.get("CAKEGEN_SUMMARY")
    if path and not config.pluginmanager.hasplugin("cakegen-summary"):
        config.pluginmanager.register(Summary(Path(path)), "cakegen-summary")


@pytest.fixture(scope="session", autouse=True)
def bounded_session() -> Iterator[None]:
    """End the process when the whole run takes too long."""
    faulthandler.dump_traceback_later(float(os.environ.get("CAKEGEN_GPU_SECONDS", "580")), exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first CUDA device."""
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Registry]:
    """Registries by model: the committed trees, or fresh ones where a checkout lacks them."""
    return {name: _tree(make(), tmp_path_factory) for name, make in MODELS.items()}


def _tree(model: Model, factory: pytest.TempPathFactory) -> Registry:
    try:
        return remembered(load_registry(model.name))
    except RegistryError:
        return rendered_tree(model, factory.mktemp(model.name))


@pytest.fixture(scope="session")
def warm(trees: dict[str, Registry], device: torch.device) -> dict[str, LatentMoe]:
    """Both models, every decode program compiled side by side and loaded."""
    moes = {name: LatentMoe(tree) for name, tree in trees.items()}
    for moe in moes.values():
        target = moe.model.target("sm_90a")
        assert target is not None
        for tp in target.tp_degrees:
            moe.warm_up(device, tp, partials=(1, 2, 3))
    return moes


@pytest.fixture(params=list(MODELS))
def moe(request: pytest.FixtureRequest, warm: dict[str, LatentMoe]) -> LatentMoe:
    """One model after the other."""
    return warm[request.param]


@functools.cache
def _weights(name: str, device: torch.device, tokens: int) -> Weights:
    return make_weights(MODELS[name](), device, tokens=tokens)


def _weights_of(moe: LatentMoe, device: torch.device, tokens: int) -> Weights:
    return _weights(next(name for name, make in MODELS.items() if make().name == moe.model.name), device, tokens)


@pytest.fixture
def weights(moe: LatentMoe, device: torch.device) -> Weights:
    """Weights of the model with inputs of a decode call, made once."""
    return _weights_of(moe, device, hopper(moe.model).decode.max_tokens)


@pytest.fixture(scope="session")
def warm_prefill(trees: dict[str, Registry], device: torch.device) -> dict[str, LatentMoe]:
    """Both models, every prefill program compiled side by side and loaded."""
    moes = {name: LatentMoe(tree) for name, tree in trees.items()}
    for moe in moes.values():
        for tp in DEGREES:
            moe.warm_up(device, tp, tokens=TOKENS, partials=(1, 2))
    return moes


@pytest.fixture(params=list(MODELS))
def prefill_moe(request: pytest.FixtureRequest, warm_prefill: dict[str, LatentMoe]) -> LatentMoe:
    """One model after the other."""
    return warm_prefill[request.param]


@pytest.fixture
def prefill_weights(prefill_moe: LatentMoe, device: torch.device) -> Weights:
    """Weights of the model with inputs of the largest call, made once."""
    return _weights_of(prefill_moe, device, ROWS)


@pytest.fixture(scope="session")
def partials(trees: dict[str, Registry], device: torch.device) -> GuardedPartials:
    """Memory for the partials of every plan on this device; poisoned with each call's outputs."""
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    return guarded_partials(next(iter(trees.values())).model, device, sm_count)


@pytest.fixture(autouse=True)
def context_is_alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the run when a program trapped: every later test would only repeat the error."""
    yield
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        control = opened_control(0)
        report = describe_wait_record(control.wait_record.words, REGISTRIES) if control else None
        pytest.exit(f"{request.node.nodeid} lost the context: {error}\n{report or 'no wait gave up'}", returncode=3)


@pytest.fixture(autouse=True)
def timed(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Leave each test's seconds in its report."""
    start = time.perf_counter()
    yield
    record_property("seconds", round(time.perf_counter() - start, 3))
