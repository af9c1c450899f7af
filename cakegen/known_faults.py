"""Faults of drivers and compilers that programs of cakegen can meet: what is seen, where, and what is done.

A row says what is known, not what was guessed: its source, and whether it was seen here. `cakegen doctor` names those
that apply to a machine. Imports arch only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cakegen.arch import ARCHITECTURES

Version = tuple[int, int]
ANY: Version = (0, 0)
OPEN: Version = (10**6, 0)


@dataclass(frozen=True)
class KnownFault:
    """One fault.

    Parameters
    ----------
    component
        `driver` or `nvrtc`: whose version decides.
    first, last
        Versions that have it, both included, as (major, minor) of CUDA.
    arches
        Targets that can meet it.
    symptom, remedy
        What is seen; what cakegen does, or what its user must do.
    handled
        Whether cakegen does it.
    source
        Who says so.
    test
        The test of what is done, below `tests/`.
    """

    name: str
    component: str
    first: Version
    last: Version
    arches: tuple[str, ...]
    symptom: str
    remedy: str
    handled: bool
    source: str
    test: str

    def applies(self, component: str, version: Version, arches: Collection[str]) -> bool:
        """Whether a component of this version has it, for one of some targets."""
        return component == self.component and self.first <= version <= self.last and bool({*arches} & {*self.arches})


# those with tensor memory
_BLACKWELL = tuple(arch.name for arch in ARCHITECTURES.values() if arch.tensor_memory_cols)
SMALL_MAP = KnownFault(
    name="small-tensor-map",
    component="driver",
    first=ANY,
    last=(13, 3),
    arches=_BLACKWELL,
    symptom="sporadic illegal memory accesses or MMU faults (XID 13) of copies through a tensor map whose allocation "
    "is smaller than 128 KiB and not dense",
    remedy="the runtime and the C++ binding clear bit 21 of the descriptor's second 64-bit word in such maps",
    handled=True,
    source="known issues of the data center driver 595.71.05; drivers up to CUDA 13.1 report their version so, "
    "forward-compatible ones of 13.2 and 13.3 have it too (Triton 11011)",
    test="test_known_faults.py::test_bit_of_a_small_map_is_cleared_where_the_driver_has_the_fault",
)
KNOWN_FAULTS = (
    SMALL_MAP,
    KnownFault(
        name="log-of-a-repeat",
        component="nvrtc",
        first=(12, 9),
        last=OPEN,
        arches=tuple(ARCHITECTURES),
        symptom="with a driver on the machine a program that was compiled before comes from the driver's cache, "
        "without a log: what the log alone tells is lost",
        remedy="programs are compiled with --no-cache; a compilation without a report is refused",
        handled=True,
        source="seen on an H200 with driver 580 and NVRTC 13.0.88",
        test="compile/test_program.py::test_compiler_is_told_to_compile_again_where_it_knows_how",
    ),
    KnownFault(
        name="spills-of-12.9",
        component="nvrtc",
        first=ANY,
        last=(12, 9),
        arches=("sm_90a",),
        symptom="prefill programs of the front spill 24 bytes, and are refused",
        remedy="install nvidia-cuda-nvrtc >= 13.0, or take a bundle",
        handled=False,
        source="NVRTC 12.9.86 here, 2026-12-01; decode programs compile, and all do with 13.0.88 and 13.5.37",
        test="compile/test_program.py::test_spills_are_an_error_without_a_log",
    ),
)

SMALL_MAP_BYTES = 128 * 1024
_FAULTY_BIT = 21


@dataclass(frozen=True)
class SmallMapFacts:
    """The fault of small tensor maps, as the host half's text takes it.

    Parameters
    ----------
    last_major, last_minor
        The last CUDA release whose driver has it.
    fixed_version
        The first number of `cuDriverGetVersion` (1000 * major + 10 * minor) that has it no more.
    compute_major
        Of the devices that can meet it.
    kib
        Allocations below so many KiB can.
    bit
        Of the descriptor's second 64-bit word.
    """

    last_major: int
    last_minor: int
    fixed_version: int
    compute_major: int
    kib: int
    bit: int


def small_map_facts() -> SmallMapFacts:
    """The row of the table, and what `cleared` does."""
    major, minor = SMALL_MAP.last
    (compute_major,) = {ARCHITECTURES[name].compute_capability[0] for name in SMALL_MAP.arches}
    return SmallMapFacts(
        major, minor, 1000 * major + 10 * (minor + 1), compute_major, SMALL_MAP_BYTES >> 10, _FAULTY_BIT
    )


def clears_small_maps(driver_version: Version, arches: Collection[str]) -> bool:
    """Whether tensor maps of programs for these targets need the bit cleared that this driver may set wrongly."""
    return SMALL_MAP.applies("driver", driver_version, arches)


def cleared(word: int) -> int:
    """The second 64-bit word of a descriptor without that bit."""
    return word & ~(1 << _FAULTY_BIT)
