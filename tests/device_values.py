"""What a device computed, kept small: hashes and samples of every output of a list of cases on inputs made of a seed.

`gpu/record_values.py` writes it on a device; `emulator/test_device_values.py` compares the emulator with it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cakegen.compile import request_for
from cakegen.emulator.cases import ARCH, Case, find_cases, make_operands
from cakegen.plan.records import Plan
from cakegen.registry import Registry, load_registry

FOLDER = Path(__file__).parents[1] / "benchmarks" / "h200"
JSON_NAME, SAMPLES_NAME = "values.json", "values.npz"
RECORD_COMMAND = "python tests/gpu/record_values.py benchmarks/h200"
SMALL, FULL = "tiny_latent_moe", "kimi_k3_latent_moe"
SEED = 7
SAMPLE = 512
OUTPUTS = {"front": ("logits", "latent", "shared_act"), "tail": ("y_workspace", "out")}
_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}

FULL_CASES = (
    Case("front", 8, 8),
    Case("tail", 8, 8, partials=3, rank=7),
    Case("front", 1, 16),
    Case("tail", 1, 4, partials=2),
    Case("front", 16, 129),
    Case("tail", 16, 129, partials=2, rank=15),
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
        return f"{self.export} {c.stage} TP {c.tp} T {c.tokens} P {c.partials} on {c.sm_count} SMs{rank}"

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


def program_digest(registry: Registry, plan: Plan) -> str:
    """What is launched, and how: the texts of its programs, and the plan."""
    requests = [request_for(registry, launch.key, ARCH) for launch in plan.launches]
    return digest(repr(plan).encode(), *(repr(dataclasses.astuple(request)).encode() for request in requests))


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


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One case as a device computed it.

    Parameters
    ----------
    program
        `program_digest` of what ran.
    inputs
        `inputs_digest` of what it ran on.
    hashes
        Output -> hash of all of its bits.
    samples
        Output -> bits of the sample.
    """

    program: str
    inputs: str
    hashes: dict[str, str]
    samples: dict[str, np.ndarray]


def describe(named: Named, operands: dict[str, torch.Tensor]) -> Recorded:
    """What to keep of a case that has run on its operands."""
    outputs = {output: bits_of(operands[output]) for output in OUTPUTS[named.case.stage]}
    return Recorded(
        program_digest(registry_of(named.export), named.plan),
        inputs_digest(named.case.stage, operands),
        {output: digest(bits.tobytes()) for output, bits in outputs.items()},
        {output: sampled(named.name, output, bits) for output, bits in outputs.items()},
    )


def write_recording(folder: Path, device: dict[str, str], recorded: dict[str, Recorded]) -> None:
    """Both files."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = {
        name: {"program": each.program, "inputs": each.inputs, "hashes": each.hashes} for name, each in recorded.items()
    }
    text = json.dumps({"device": device, "seed": SEED, "cases": cases}, indent=1)
    (folder / JSON_NAME).write_text(text + "\n", encoding="utf-8")
    samples = {f"{name}/{output}": bits for name, each in recorded.items() for output, bits in each.samples.items()}
    # keywords of this function are file names in an archive: no name of a case may be one of its parameters
    np.savez_compressed(folder / SAMPLES_NAME, **samples)


def read_recording(folder: Path = FOLDER) -> tuple[dict[str, str], dict[str, Recorded]]:
    """(the device, cases by name)."""
    content: dict[str, Any] = json.loads((folder / JSON_NAME).read_text(encoding="utf-8"))
    with np.load(folder / SAMPLES_NAME) as kept:
        samples = dict(kept)
    recorded = {
        name: Recorded(
            case["program"],
            case["inputs"],
            case["hashes"],
            {output: samples[f"{name}/{output}"] for output in case["hashes"]},
        )
        for name, case in content["cases"].items()
    }
    return content["device"], recorded
