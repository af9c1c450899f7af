"""What a device computed, kept small: hashes and samples of every output of a list of cases on inputs made of a seed.

`gpu/record_values.py` writes it on a device; `emulator/test_device_values.py` compares the emulator with it.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.models import kimi_k3_model

from cakegen.emulator.launches.cases import ARCH, Case, find_cases, make_operands
from cakegen.plan.records import Plan
from cakegen.registry import Registry, load_registry
from cakegen.rules import HopperTile

FOLDER = Path(__file__).parents[3] / "benchmarks" / "h200"
JSON_NAME, SAMPLES_NAME, FELL_BACK_NAME = "values.json", "values.npz", "values_fell_back.tsv"
RECORD_COMMAND = "python tests/gpu/record_values.py benchmarks/h200"
SMALL, FULL = "tiny_latent_moe", "kimi_k3_latent_moe"
SEED = 7
SAMPLE = 512
OUTPUTS = {"front": ("logits", "latent", "shared_act"), "tail": ("y_workspace", "out")}
ACT_SHARE = 0.01
"""Of the elements of `shared_act`, how many may be one bf16 step off, since `ex2.approx` and `rcp.approx` are modelled
within their error but not to the bit. On an H200, 2026-11-29: 3 of 512 at most, 1 in 1000 over all cases."""
_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}

FULL_CASES = (
    Case("front", 8, 8),
    Case("tail", 8, 8, partials=3, rank=7),
    Case("front", 1, 16),
    Case("tail", 1, 4, partials=2),
    Case("front", 16, 200),
    Case("tail", 16, 385, partials=2, rank=15),
)
"""Of the full size: decode of both stages at TP 8 and TP 1, and the smallest prefill."""


@dataclasses.dataclass(frozen=True)
class Named:
    """A case of an export."""

    export: str
    case: Case

    @property
    def name(self) -> str:
        """Unique, and made of nothing but the request."""
        c = self.case
        rank = f" rank {c.rank}" if c.stage == "tail" else ""
        tile = f" tile {c.tile.block_n} by {c.tile.tile_groups}" if c.tile else ""
        return f"{self.export} {c.stage} TP {c.tp} T {c.tokens} P {c.partials} on {c.sm_count} SMs{rank}{tile}"

    @property
    def plan(self) -> Plan:
        """As the emulator runs it."""
        return self.case.plan(registry_of(self.export).model)

    def operands(self) -> dict[str, torch.Tensor]:
        """The same bits on every machine."""
        return make_operands(registry_of(self.export).model, self.case, SEED)


@functools.cache
def registry_of(export: str) -> Registry:
    """The committed tree."""
    return load_registry(export)


def named_cases() -> Iterator[Named]:
    """One case for every program of the small model, and a few of the full size."""
    registry = registry_of(SMALL)
    keys = [key for key in registry.kernels if ARCH in registry.program(key).arches]
    for case in dict.fromkeys(find_cases(registry, keys).values()):
        yield Named(SMALL, case)
    for case in FULL_CASES:
        yield Named(FULL, case)


def digest(*parts: bytes) -> str:
    """Short enough to read, long enough to tell."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def bits_of(value: torch.Tensor) -> np.ndarray:
    """An output or input as contiguous signed whole numbers."""
    return value.detach().cpu().contiguous().view(_BITS[value.dtype]).numpy()


def inputs_digest(stage: str, operands: dict[str, torch.Tensor]) -> str:
    """Of every operand that is no output."""
    return digest(*(bits_of(value).tobytes() for name, value in operands.items() if name not in OUTPUTS[stage]))


def sampled(name: str, output: str, bits: np.ndarray) -> np.ndarray:
    """Some elements of an output, at places that follow from the names; all of them where there are few."""
    flat = bits.reshape(-1)
    if flat.size <= SAMPLE:
        return flat
    seed = int.from_bytes(hashlib.sha256(f"{name} {output}".encode()).digest()[:8], "little")
    raw = np.asarray(np.random.PCG64(seed).random_raw(SAMPLE), np.uint64)
    return flat[(raw % np.uint64(flat.size)).astype(np.int64)]


@dataclasses.dataclass(frozen=True, eq=False)
class Values:
    """What a case gave.

    Parameters
    ----------
    inputs
        `inputs_digest` of what it ran on.
    hashes
        Output -> hash of all of its bits.
    samples
        Output -> bits of the sample.
    """

    inputs: str
    hashes: dict[str, str]
    samples: dict[str, np.ndarray]


def describe(named: Named, operands: dict[str, torch.Tensor]) -> Values:
    """What to keep of a case that has run on its operands."""
    outputs = {output: bits_of(operands[output]) for output in OUTPUTS[named.case.stage]}
    return Values(
        inputs_digest(named.case.stage, operands),
        {output: digest(bits.tobytes()) for output, bits in outputs.items()},
        {output: sampled(named.name, output, bits) for output, bits in outputs.items()},
    )


@dataclasses.dataclass(frozen=True)
class Recording:
    """Cases as a device computed them.

    Parameters
    ----------
    device
        Which one, its software, and the date.
    values
        By case.
    """

    device: dict[str, str]
    values: dict[Named, Values]

    def write(self, folder: Path) -> None:
        """Both files."""
        folder.mkdir(parents=True, exist_ok=True)
        cases = {
            named.name: dataclasses.asdict(named) | {"inputs": each.inputs, "hashes": each.hashes}
            for named, each in self.values.items()
        }
        text = json.dumps({"device": self.device, "seed": SEED, "cases": cases}, indent=1)
        (folder / JSON_NAME).write_text(text + "\n", encoding="utf-8")
        samples = {f"{named.name}/{o}": b for named, each in self.values.items() for o, b in each.samples.items()}
        # keywords of this function are file names in an archive: no name of a case may be one of its parameters
        np.savez_compressed(folder / SAMPLES_NAME, **samples)


def read_recording(folder: Path = FOLDER) -> Recording:
    """Both files."""
    content: dict[str, Any] = json.loads((folder / JSON_NAME).read_text(encoding="utf-8"))
    with np.load(folder / SAMPLES_NAME) as kept:
        samples = dict(kept)
    values = {}
    for name, each in content["cases"].items():
        tile = each["case"]["tile"]
        case = Case(**each["case"] | {"tile": tile and HopperTile(**tile)})
        named = Named(each["export"], case)
        parts = {output: samples[f"{name}/{output}"] for output in each["hashes"]}
        values[named] = Values(each["inputs"], each["hashes"], parts)
    return Recording(content["device"], values)


def read_fell_back(folder: Path = FOLDER) -> dict[str, str]:
    """Names of cases that are compared within tolerances alone, each with the reason."""
    with (folder / FELL_BACK_NAME).open(encoding="utf-8", newline="") as stream:
        return {row["case"]: row["reason"] for row in csv.DictReader(stream, delimiter="\t")}


def differing_outputs(got: Values, recorded: Values) -> list[str]:
    """The outputs whose bits are not all the same."""
    return [output for output, each in recorded.hashes.items() if got.hashes[output] != each]


def problems_of(got: Values, recorded: Values, *, fell_back: bool = False) -> list[str]:
    """What must not be, in words.

    Every output has the bits of the recording, but for a few steps of `shared_act`. A case that fell back adds up in
    another order, within the contract's tolerances; `y` has its bits even then, since they are part of the contract.
    """
    problems, tolerances = [], kimi_k3_model().dims.tolerances
    for output in differing_outputs(got, recorded):
        ours, theirs = got.samples[output], recorded.samples[output]
        steps = np.abs(ours.astype(np.int64) - theirs)
        if output == "shared_act" and steps.max() <= 1 and (steps != 0).mean() <= ACT_SHARE:
            continue
        if output == "y_workspace" or not fell_back:
            found = f"{int((steps != 0).sum())} of {steps.size} sampled elements, by up to {steps.max()} ulp"
            problems.append(f"{output} has other bits: {found}")
        elif not np.allclose(floats_of(ours), floats_of(theirs), rtol=tolerances[output], atol=tolerances[output]):
            problems.append(f"{output} differs by up to {np.abs(floats_of(ours) - floats_of(theirs)).max():.3g}")
    return problems


def floats_of(bits: np.ndarray) -> np.ndarray:
    """fp64 of a sample's bits."""
    wide = bits.astype(np.int32) << (16 if bits.dtype == np.int16 else 0)
    return wide.view(np.float32).astype(np.float64)
