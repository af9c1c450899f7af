"""Record what a device computes: `python tests/gpu/record_values.py FOLDER`.

Runs every sm_90a program of the small model, and decode and a small prefill of the full size, on inputs that follow
from a seed, through the runtime. Each case runs twice on outputs full of NaN and must give the same bits. Writes
`values.json` and `values.npz` (hashes and samples; well below 1 MiB) into FOLDER, and says how many cases there are.
Programs come from the cache or are compiled side by side first. About a minute.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 170

if TYPE_CHECKING:
    import torch
    from support.emulator.device_values import Named, Values

    from cakegen.rules import HopperTile


def main(arguments: list[str]) -> int:
    """Run all cases and write what came of them; 1 when one differed between its runs or could not be run."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    from ask_device import describe_device
    from support.emulator.device_values import Recording, named_cases

    from cakegen.errors import CakeError

    start = time.monotonic()
    cases = list(named_cases())
    compile_programs(cases)
    print(f"{len(cases)} cases; programs compiled after {time.monotonic() - start:.0f} s", flush=True)
    recording, problems = Recording(describe_device(), {}), []
    for named in cases:
        try:
            recording.values[named] = record(named)
        except (CakeError, AssertionError) as error:
            problems.append(f"{named.name}: {type(error).__name__}: {error}")
    recording.write(Path(arguments[0]))
    print(f"recorded {len(recording.values)} of {len(cases)} cases in {time.monotonic() - start:.0f} s")
    print("\n".join(problems))
    faulthandler.cancel_dump_traceback_later()
    return 1 if problems else 0


def compile_programs(cases: list[Named]) -> None:
    """Every program of the cases into the cache, side by side."""
    from support.emulator.device_values import registry_of

    from cakegen.compile import compile_many, request_for
    from cakegen.emulator.launches.cases import ARCH

    wanted = dict.fromkeys((named.export, launch.key) for named in cases for launch in named.plan.launches)
    for outcome in compile_many([request_for(registry_of(export), key, ARCH) for export, key in wanted]):
        if isinstance(outcome, Exception):
            raise outcome


@functools.cache
def runtime_for(export: str, sm_count: int, tile: HopperTile | None) -> Any:
    """The runtime of an export on a device that counts as one of so many multiprocessors.

    With a tile, its Hopper prefill takes that one whatever it costs.
    """
    from support.emulator.device_values import registry_of

    from cakegen.emulator.launches.cases import ARCH
    from cakegen.model import DeviceFacts
    from cakegen.runtime import LatentMoe

    registry = registry_of(export)
    if tile is not None:
        registry = dataclasses.replace(registry, model=registry.model.preferring(tile))
    return LatentMoe(registry, device_facts=DeviceFacts.nominal(ARCH, sm_count))


def record(named: Named) -> Values:
    """Run a case twice and keep what it gave."""
    import torch
    from support.emulator.device_values import OUTPUTS, describe

    case, host = named.case, named.operands()
    there = {name: pitched_copy(value) for name, value in host.items()}
    moe = runtime_for(named.export, case.sm_count, case.tile)
    if case.stage == "front":
        runner = moe.prepare_front(**there)
    else:
        runner = moe.prepare_tail(**there, tp=case.tp, rank=case.rank)
    assert runner.plan == named.plan, f"the runtime plans {runner.plan}, not {named.plan}"
    runs = []
    for _ in range(2):
        for name in OUTPUTS[case.stage]:
            there[name].fill_(float("nan"))
        runner()
        torch.cuda.synchronize()
        runs.append(describe(named, host | {name: there[name] for name in OUTPUTS[case.stage]}))
    assert runs[0].hashes == runs[1].hashes, f"two runs differ: {runs[0].hashes} {runs[1].hashes}"
    for name in OUTPUTS[case.stage]:
        assert not there[name].isnan().any(), f"{name} has elements that are NaN or were not written"
    return runs[0]


def pitched_copy(value: torch.Tensor) -> torch.Tensor:
    """A copy on the device with the same strides; what lies between its rows is NaN."""
    import torch

    assert value.storage_offset() == 0, "an operand starts where its memory does"
    count = value.untyped_storage().nbytes() // value.element_size()
    memory = torch.full((count,), float("nan"), dtype=value.dtype, device="cuda")
    return memory.as_strided(value.shape, value.stride()).copy_(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
