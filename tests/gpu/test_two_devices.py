"""Several devices, processes and threads at once: each has its own, and none disturbs the others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from support.examples.torchrun import run_example
from support.gpu.cases import BF16_TOLERANCE, Checks, TailCase, make_weights
from support.runtime.operator_cases import front_case, tail_case, tiny_latent_moe, tiny_operators

from cakegen.runtime import LatentMoe

TP, RANK = 2, 1
JOIN_SECONDS = 90
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
Record = Callable[[str, object], None]


@needs_two
def test_runner_on_the_second_device_leaves_the_first_current(
    warm: dict[str, LatentMoe], record_property: Record
) -> None:
    tiny, second = warm["tiny"], torch.device("cuda", 1)
    weights = make_weights(tiny.model, second, 5)
    tiny.warm_up(second, 4, tokens=(24,), partials=(2,))
    torch.cuda.synchronize(second)
    case = TailCase(tiny, weights, 4, 3, 2)
    with torch.cuda.device(1):
        y, out = case.expected()
    assert torch.cuda.current_device() == 0
    values = case.prepare(24)()
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(second)
    first = torch.ones(8, device="cuda:0") + 1
    assert first.sum().item() == 16
    checks = Checks()
    checks.equal("y", values[0], y[:24])
    checks.close("out", values[1], out[:24], BF16_TOLERANCE)
    for output in case.outputs:
        checks.zero("guards", output.faults(24))
    record_property("cases", checks.settle())


@needs_two
@pytest.mark.parametrize("tokens", [16, 600])
def test_layer_on_two_ranks_over_nccl_equals_the_layer_on_one(tokens: int, record_property: Record) -> None:
    # NVLink multicast needs more of the machine than these tests may ask for
    options = ("--device", "cuda", "--tokens", str(tokens))
    status, text = run_example("tensor_parallel_layer.py", 2, *options, NCCL_NVLS_ENABLE="0")
    assert status == 0, text
    assert f"TP 2, T = {tokens}, cuda: equals TP 1" in text
    record_property("said", text.strip().splitlines()[-1])


class Calls:
    """A front and a tail of some tokens on a device, their results once, and how often they differed since."""

    def __init__(self, device: str, tokens: int, partials: int) -> None:
        self.device, self.ops = torch.device(device), tiny_operators()
        tiny_latent_moe().warm_up(self.device, TP, tokens=(tokens,), partials=(partials,))
        self.front, _ = front_case(TP, tokens, device)
        self.tail, _ = tail_case(TP, tokens, partials, device)
        self.expected = [value.clone() for value in self.run()]
        self.wrong = [torch.zeros((), dtype=torch.int64, device=self.device) for _ in self.expected]
        torch.cuda.synchronize(self.device)

    def run(self) -> tuple[torch.Tensor, ...]:
        """Both, on the current stream of the device."""
        return (*self.ops.front(*self.front), *self.ops.tail(*self.tail, tp=TP, rank=RANK))

    def repeat(self, wrong: list[torch.Tensor]) -> None:
        """Once more; counts elements that differ, without waiting."""
        for value, expected, count in zip(self.run(), self.expected, wrong, strict=True):
            count += (value != expected).sum()


@needs_two
def test_one_thread_alternates_between_two_devices() -> None:
    calls = [Calls(f"cuda:{index}", 24, 2) for index in (0, 1)]
    for _ in range(50):
        for each in calls:
            each.repeat(each.wrong)
    assert torch.cuda.current_device() == 0
    assert [[int(count) for count in each.wrong] for each in calls] == [[0] * 5] * 2


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=needs_two, id="2 devices")])
def test_eight_threads_on_streams_of_their_own_agree(devices: int, record_property: Record) -> None:
    """Threads that share operands and programs, but neither streams nor outputs, over decode and prefill sizes."""
    sizes = ((5, 1), (64, 2), (200, 1), (600, 2))
    calls = [Calls(f"cuda:{index % devices}", *sizes[index % len(sizes)]) for index in range(8)]
    failures: list[BaseException] = []
    counts: list[torch.Tensor] = []

    def work(each: Calls) -> None:
        try:
            with torch.cuda.device(each.device):
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    wrong = [torch.zeros((), dtype=torch.int64, device=each.device) for _ in each.expected]
                    for _ in range(50):
                        each.repeat(wrong)
                stream.synchronize()
            counts.extend(wrong)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures
    assert [int(count) for count in counts] == [0] * (5 * len(calls))
    record_property("cases", len(counts))
