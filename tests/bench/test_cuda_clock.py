"""The clock on a device, with torch's CUDA objects replaced by ones that record their order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cakegen.bench import cuda_clock
from cakegen.bench.cuda_clock import FLUSH_L2_MULTIPLE, CudaClock
from cakegen.errors import BenchError

L2_BYTES = 4096


class FakeCuda:
    """Streams, events and graphs that write into `events`."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._clock_ms = 0.0

    def is_available(self) -> bool:
        return True

    def get_device_properties(self, device: object) -> Any:
        return SimpleNamespace(L2_cache_size=L2_BYTES)

    @contextlib.contextmanager
    def device(self, device: object) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.events.append("enter stream")
        yield
        self.events.append("leave stream")

    def Stream(self, device: object) -> Any:
        return SimpleNamespace(synchronize=lambda: self.events.append("wait"))

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(
            capture_begin=lambda: self.events.append("begin"),
            capture_end=lambda: self.events.append("end"),
            replay=lambda: self.events.append("replay"),
        )

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace()

        def record(stream: object) -> None:
            self.events.append("event")
            self._clock_ms += 0.25
            event.at = self._clock_ms

        event.record = record
        event.elapsed_time = lambda later: later.at - event.at
        return event

    def _sleep(self, cycles: int) -> None:
        self.events.append(f"sleep {cycles}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    made: list[int] = []

    def rand(elems: int, device: object) -> torch.Tensor:
        made.append(elems)
        return torch.ones(elems)

    names = SimpleNamespace(
        cuda=fake, rand=rand, zeros=lambda shape, device: torch.zeros(shape), sum=torch.sum, float32=torch.float32
    )
    monkeypatch.setattr(cuda_clock, "torch", names)
    monkeypatch.setattr(cuda_clock, "_cuda", fake)
    fake.made = made  # type: ignore[attr-defined]
    return fake


DEVICE = torch.device("cuda", 0)


def test_flush_buffer_is_a_multiple_of_the_l2(cuda: FakeCuda) -> None:
    CudaClock(DEVICE)
    assert cuda.made == [FLUSH_L2_MULTIPLE * L2_BYTES // 4]  # type: ignore[attr-defined]
    assert FLUSH_L2_MULTIPLE > 2


def test_call_is_warm_before_it_is_captured_and_replayed_after(cuda: FakeCuda) -> None:
    clock = CudaClock(DEVICE)
    cuda.events.clear()
    captured = clock.capture(lambda: cuda.events.append("call"))
    captured()
    assert cuda.events == ["call", "call", "wait", "begin", "call", "end", "replay"]


def test_failed_call_ends_its_capture_and_is_raised(cuda: FakeCuda) -> None:
    clock = CudaClock(DEVICE)
    cuda.events.clear()

    def call() -> None:
        if "begin" in cuda.events:
            raise ValueError("only in a capture")

    with pytest.raises(ValueError, match="only in a capture"):
        clock.capture(call)
    assert cuda.events == ["wait", "begin", "end"]


def test_timed_call_stands_between_two_events_and_nothing_waits(cuda: FakeCuda) -> None:
    clock = CudaClock(DEVICE)
    cuda.events.clear()
    clock.hold(10.0)
    for _ in range(2):
        clock.flush()
        clock.timed(lambda: cuda.events.append("call"))
    assert cuda.events == ["sleep 20000", *["replay", "event", "call", "event"] * 2]
    assert clock.settle() == [250.0, 250.0]
    assert cuda.events[-1] == "wait"
    assert clock.settle() == []


def test_clock_without_a_gpu_is_refused() -> None:
    with pytest.raises(BenchError, match="needs a CUDA device"):
        CudaClock(torch.device("cpu"))
