"""Runners whose stream is destroyed behind them go on on another: `python tests/gpu/lost_stream.py`.

In a process of its own, since a driver may do anything with a handle that is gone: on an H200 (driver 580.159.04)
cuStreamIsCapturing on one ends the process. Prints a line for each part, and what a call costs the host.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest  # noqa: E402
import torch  # noqa: E402
from support.runtime.operator_cases import front_case, tail_case, tiny_latent_moe  # noqa: E402

from cakegen.errors import LaunchError  # noqa: E402
from cakegen.plan import plan_route  # noqa: E402
from cakegen.runtime import Workspace, driver  # noqa: E402
from cakegen.runtime.control import SLOT_SIZES  # noqa: E402
from cakegen.runtime.device import open_device  # noqa: E402
from cakegen.runtime.runner import ProgramRunner, plan_partials  # noqa: E402

CYCLES = 200_000_000
"""Of a kernel that keeps a stream busy: 0.1 s and more, far longer than the host needs for a few calls."""


def create_stream() -> int:
    """A stream of another library, to torch: it does not wait for the default stream."""
    return int(driver.call("cuStreamCreate", driver.bindings().CUstream_flags.CU_STREAM_NON_BLOCKING))


@contextmanager
def current(handle: int) -> Iterator[None]:
    """Make such a stream torch's current one."""
    with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
        yield


def call_and_destroy(runner: Any) -> None:
    """A call behind a long kernel, on a stream that is destroyed with both before it."""
    handle = create_stream()
    with current(handle):
        torch.cuda._sleep(CYCLES)
        runner()
    driver.call("cuStreamDestroy", handle)


def check_values(values: Any, expected: list[torch.Tensor]) -> None:
    """Bits of a call, once all is done."""
    torch.cuda.synchronize()
    assert all(map(torch.equal, values, expected))


def check_order(runner: Any, expected: list[torch.Tensor]) -> None:
    """The next call elsewhere waits on the device, and the host for nothing."""
    for _ in range(3):
        call_and_destroy(runner)
        values, end = runner(), torch.cuda.Event()
        end.record()
        assert not end.query(), "the call did not wait for the last one, or the host did"
        check_values(values, expected)


def check_equal_handle(runner: Any, expected: list[torch.Tensor]) -> None:
    """A later stream may have the handle of one whose work is not complete: a call there waits on the device too."""
    for _ in range(3):
        call_and_destroy(runner)
        handle = create_stream()
        with current(handle):
            values, end = runner(), torch.cuda.Event()
            end.record()
            assert not end.query(), "the call did not wait for the last one, or the host did"
        check_values(values, expected)
        driver.call("cuStreamDestroy", handle)


def check_workspace(runner: Any, expected: list[torch.Tensor]) -> None:
    """A workspace knows when the work of a stream that is gone is complete."""
    for _ in range(3):
        call_and_destroy(runner)
        with pytest.raises(LaunchError, match="still uses its fp32 partials"):
            runner()
        torch.cuda.synchronize()
        check_values(runner(), expected)


def check_capture(runner: Any, expected: list[torch.Tensor]) -> None:
    """What is captured on such a stream leaves the event as it was: the next call elsewhere can wait for it."""
    handle, graph = create_stream(), torch.cuda.CUDAGraph()
    with current(handle):
        runner()
    with torch.cuda.graph(graph, stream=torch.cuda.ExternalStream(handle)):
        runner()
    check_values(runner(), expected)
    for value in runner.outputs:
        value.zero_()
    graph.replay()
    check_values(runner.outputs, expected)
    driver.call("cuStreamDestroy", handle)


def check_words(prepare: Callable[[], Any]) -> None:
    """Control words of runners that died with their streams are lent again: one slab serves twice its slots."""
    slots, streams, addresses = SLOT_SIZES[0][1], 16, set()
    expected = [value.clone() for value in prepare()()]
    torch.cuda.synchronize()
    for _ in range(streams):
        handle = create_stream()
        with current(handle):
            torch.cuda._sleep(CYCLES // 10)
            for _ in range(2 * slots // streams):
                runner = prepare()
                values = runner()
                assert runner._words is not None
                addresses.add(runner._words.address)
                del runner
        driver.call("cuStreamDestroy", handle)
        gc.collect()
    assert len(addresses) <= slots, f"{2 * slots} runners, one after the other, had {len(addresses)} addresses"
    check_values(values, expected)


def host_us(runner: Any, calls: int = 200) -> float:
    """What a call costs the host on the current stream: the best of 10 rounds."""
    rounds = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            runner()
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    return min(rounds)


def cost_text(runner: Any) -> str:
    """Of a call on a stream of torch's, and on another."""
    own, handle = host_us(runner), create_stream()
    with current(handle):
        foreign = host_us(runner)
    torch.cuda.synchronize()
    driver.call("cuStreamDestroy", handle)
    return f"host, us a call: {own:.2f} on torch's stream, {foreign:.2f} on another library's"


def main() -> None:
    """A decode runner, a prefill runner with partials in a workspace, and many runners that die."""
    moe, facts, tp = tiny_latent_moe(), open_device(0).facts, 2

    def partials(tokens: int) -> int:
        return plan_partials(plan_route(moe.model, stage="front", tp=tp, tokens=tokens, partials=1, device=facts))

    def prepared(tokens: int, **options: Any) -> tuple[ProgramRunner, list[torch.Tensor]]:
        inputs, outputs = front_case(tp, tokens, "cuda")
        runner = moe.prepare_front(*inputs, **outputs, **options)
        assert isinstance(runner, ProgramRunner)
        expected = [value.clone() for value in runner()]
        torch.cuda.synchronize()
        return runner, expected

    decode = prepared(24)
    check_order(*decode)
    print("decode: went on", flush=True)
    check_equal_handle(*decode)
    print("equal handle: went on", flush=True)
    check_capture(*decode)
    print("capture: went on", flush=True)
    cut = next(tokens for tokens in range(200, moe.model.max_tokens, 256) if partials(tokens))
    check_workspace(*prepared(cut, workspace=Workspace("cuda:0")))
    print(f"prefill of T = {cut}: went on", flush=True)
    inputs, outputs = tail_case(1, 128, 2, "cuda")
    check_words(lambda: moe.prepare_tail(*inputs, **outputs, tp=1, rank=0))
    print("control words: went on", flush=True)
    print(cost_text(decode[0]), flush=True)


if __name__ == "__main__":
    main()
