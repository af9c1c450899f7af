"""What a server does for weeks, in a minute: `python tests/gpu/long_service.py PART`, a part a process.

`replays`: 100,000 graph replays over 8 threads and 4 streams, while streams of another library come and go.
`loads`: programs that do not load. `release`: everything given back. `fork ours|torch|other`: a child of a process in
which that library initialised the driver. Prints what it found, and ends with an error where memory is not flat.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest  # noqa: E402
import torch  # noqa: E402
from support.runtime.operator_cases import front_case, tail_case, tiny_latent_moe  # noqa: E402

from cakegen import compile as compilation  # noqa: E402
from cakegen.errors import LaunchError  # noqa: E402
from cakegen.plan import plan_route  # noqa: E402
from cakegen.runtime import Workspace, driver, release_device_memory  # noqa: E402
from cakegen.runtime.device import open_device  # noqa: E402
from cakegen.runtime.runner import plan_partials  # noqa: E402
from cakegen.runtime.workspace import MOST_FOREIGN  # noqa: E402

THREADS, STREAMS, REPLAYS, WARM_REPLAYS = 8, 4, 100_000, 16_000
FOREIGN_EVERY = 250
FLAT_BYTES = 32 << 20
TP = 2


@contextmanager
def foreign_stream() -> Iterator[None]:
    """A stream of another library, current; destroyed at once, with its work in flight."""
    handle = int(driver.call("cuStreamCreate", driver.bindings().CUstream_flags.CU_STREAM_NON_BLOCKING))
    try:
        with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
            yield
    finally:
        driver.call("cuStreamDestroy", handle)


def device_bytes() -> tuple[int, int]:
    """(bytes of the device in use by anyone, bytes that torch has lent), with nothing in flight."""
    torch.cuda.synchronize()
    gc.collect()
    free, total = torch.cuda.mem_get_info()
    return total - free, torch.cuda.memory_allocated()


def require_flat(what: str, before: tuple[int, int], after: tuple[int, int]) -> None:
    """Print and check both figures."""
    grown = [now - then for then, now in zip(before, after, strict=True)]
    print(f"{what}: the device's bytes in use grew by {grown[0]}, torch's by {grown[1]}", flush=True)
    assert max(grown) <= FLAT_BYTES, f"{what}: memory is not flat"


def cut_tokens() -> int:
    """Tokens whose front is cut into partials."""
    moe, facts = tiny_latent_moe(), open_device(0).facts

    def partials(tokens: int) -> int:
        return plan_partials(plan_route(moe.model, stage="front", tp=TP, tokens=tokens, partials=1, device=facts))

    return next(tokens for tokens in range(200, moe.model.max_tokens, 256) if partials(tokens))


class Worker:
    """One thread's graphs: a decode tail and a prefill with partials, and a prefill on streams that end."""

    def __init__(self, number: int, stream: Any, cut: int) -> None:
        moe = tiny_latent_moe()
        self.stream, self.number = stream, number
        self._moe, self._foreign = moe, front_case(TP, cut, "cuda")
        decode, prefill = tail_case(TP, 24, 2, "cuda"), front_case(TP, cut, "cuda")
        workspace = Workspace("cuda:0")
        self.runners = [
            moe.prepare_tail(*decode[0], **decode[1], tp=TP, rank=number % TP),
            moe.prepare_front(*prefill[0], **prefill[1], workspace=workspace),
        ]
        self.expected = [[value.clone() for value in runner()] for runner in self.runners]
        self.graphs = []
        torch.cuda.synchronize()
        for runner in self.runners:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                runner()
            self.graphs.append(graph)
        self.failure: BaseException | None = None

    def run(self, replays: int) -> None:
        """Replays on the stream, with calls in between, and a foreign stream now and then."""
        try:
            with torch.cuda.stream(self.stream):
                for count in range(replays):
                    self.graphs[count % 16 == 0].replay()
                    if count % FOREIGN_EVERY == self.number:
                        self._use_foreign_stream()
        except BaseException as error:
            self.failure = error

    def _use_foreign_stream(self) -> None:
        inputs, outputs = self._foreign
        with foreign_stream():
            self._moe.prepare_front(*inputs, **outputs)()

    def check(self) -> None:
        """The last values have the bits of the first."""
        if self.failure is not None:
            raise self.failure
        for runner, expected in zip(self.runners, self.expected, strict=True):
            assert all(map(torch.equal, runner.outputs, expected)), f"thread {self.number}: other bits"
        assert all(map(torch.equal, self._foreign[1].values(), self.expected[1])), "other bits on a foreign stream"


def run_workers(workers: list[Worker], replays: int) -> tuple[int, int]:
    """All threads at once."""
    threads = [threading.Thread(target=worker.run, args=(replays // len(workers),)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = device_bytes()
    for worker in workers:
        worker.check()
    return used


def replays() -> None:
    """The long run is compared with a short one before it."""
    cut, streams = cut_tokens(), [torch.cuda.Stream() for _ in range(STREAMS)]
    workers = [Worker(number, streams[number % STREAMS], cut) for number in range(THREADS)]
    before = run_workers(workers, WARM_REPLAYS)
    after = run_workers(workers, REPLAYS)
    ended = REPLAYS // FOREIGN_EVERY
    require_flat(f"{REPLAYS} replays, {ended} foreign streams of T = {cut}, {MOST_FOREIGN} kept", before, after)


def loads() -> None:
    """A program whose kernel is not there, and one that wants more shared memory than there is."""
    moe, device = tiny_latent_moe(), open_device(0)
    key = min(key for key in moe.registry.kernels if device.arch.name in moe.registry.program(key).arches)
    program = moe.registry.program(key)
    cubin = compilation.cached_cubin(compilation.request_for(moe.registry, key, device.arch.name)).cubin

    def fail(times: int) -> tuple[int, int]:
        with driver.using_context(device.context):
            for number in range(times):
                wanted = ("no_such_kernel", 0) if number % 2 else (program.kernel_symbol, 1 << 30)
                with pytest.raises(LaunchError):
                    driver.load_kernel(cubin, *wanted)
        return device_bytes()

    require_flat("2000 failed loads", fail(100), fail(2000))


def release() -> None:
    """Many times over: prepare, call, give everything back."""
    decode, prefill = tail_case(TP, 24, 2, "cuda"), front_case(TP, cut_tokens(), "cuda")
    expected: list[torch.Tensor] = []

    def turn() -> None:
        moe = tiny_latent_moe()
        tail = moe.prepare_tail(*decode[0], **decode[1], tp=TP, rank=1)
        front = moe.prepare_front(*prefill[0], **prefill[1])
        values = [*tail(), *front()]
        torch.cuda.synchronize()
        expected.extend([value.clone() for value in values] if not expected else [])
        assert all(map(torch.equal, values, expected))
        release_device_memory()
        with pytest.raises(LaunchError, match="release_device_memory was called after this runner was prepared"):
            front()

    for _ in range(3):
        turn()
    before = device_bytes()
    for _ in range(50):
        turn()
    require_flat("50 releases", before, device_bytes())


def fork(first: str) -> None:
    """What a child is told that prepares."""
    if first == "ours":
        open_device(0)
    elif first == "torch":
        torch.zeros(1, device="cuda")
    else:
        from cuda.bindings import driver as other

        assert other.cuInit(0)[0] == other.CUresult.CUDA_SUCCESS
    print(_answer_of_child(lambda: open_device(0)), flush=True)


def _answer_of_child(ask: Callable[[], object]) -> str:
    reader, writer = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        try:
            writer.send(f"no refusal: {ask()}")
        except LaunchError as error:
            writer.send(f"refused: {error}")

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    try:
        return str(reader.recv()) if reader.poll(30) else "the child hangs"
    finally:
        child.kill()
        child.join(30)


if __name__ == "__main__":
    {"replays": replays, "loads": loads, "release": release, "fork": fork}[sys.argv[1]](*sys.argv[2:])
