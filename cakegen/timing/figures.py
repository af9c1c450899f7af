"""A device as data: what each of its parts takes, with unit, source and how sure. Imports errors and toml_file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

from cakegen.errors import SpecError
from cakegen.toml_file import read_toml

DEVICES = Path(__file__).parent / "devices"
GRADES = ("measured", "derived", "published", "assumed")
"""`measured`: by this project on that device. `derived`: computed from measured ones. `published`: by others."""


@dataclass(frozen=True)
class Figure:
    """One number of a device.

    Parameters
    ----------
    value, low, high
        In `unit`; what it may be where sources disagree or it was only assumed.
    grade
        One of `GRADES`.
    source
        Where it comes from, for a reader who wants to look it up.
    """

    value: float
    unit: str
    grade: str
    source: str
    low: float
    high: float

    @property
    def is_rate(self) -> bool:
        """Whether more of it is better: something in a time. A time is better when it is less."""
        return "/" in self.unit

    def scaled(self, factor: float) -> Figure:
        """The same figure with other numbers."""
        return Figure(self.value * factor, self.unit, self.grade, self.source, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class DeviceFigures:
    """All that a prediction takes of a device; each field that is a `Figure` names its unit.

    Parameters
    ----------
    clock
        Of the SMs while a short kernel runs.
    launch
        Between the events around a captured launch of a kernel that does nothing.
    launch_gap
        From the end of a launch to the first instruction of the next one behind it in a graph.
    memory_rate, memory_latency
        What bulk copies of all SMs together take in from HBM; from a copy's start to its first bytes.
    l2_rate, l2_latency
        The same of lines that the L2 holds.
    sm_ingress
        What one SM takes in.
    load_latency, load_l2_latency
        Of an `ld.global` that HBM serves, and the L2.
    peer_latency, peer_rate
        Of `st.async` and arrivals at another CTA of the cluster; bytes of one SM.
    copy_issue, wait_wake, barrier_wake, cluster_wake
        What a thread takes to issue a bulk copy; from the completion of an mbarrier, of a named barrier and of a
        cluster's barrier to the next instruction of who waits.
    atomic, fence_gpu
        Of an atomic whose result is wanted; of a fence at the scope of the GPU.
    store_drain
        From the last store of a kernel until the launch counts as complete.
    product_rate, product_latency
        Multiply-adds of one SM's tensor cores in a cycle; from the last product to who waits for it.
    shared_rate
        Bytes of shared memory that one SM reads in a cycle.
    issue_rate
        Instructions of one scheduler in a cycle; an SM has four.
    alu_latency, special_latency, shared_latency, shuffle_latency, branch_latency
        From issue to a dependent instruction; of a taken branch.
    """

    name: str
    arch: str
    sm_count: int
    clock: Annotated[Figure, "cycles/ns"]
    launch: Annotated[Figure, "ns"]
    launch_gap: Annotated[Figure, "ns"]
    memory_rate: Annotated[Figure, "bytes/ns"]
    memory_latency: Annotated[Figure, "ns"]
    l2_rate: Annotated[Figure, "bytes/ns"]
    l2_latency: Annotated[Figure, "ns"]
    sm_ingress: Annotated[Figure, "bytes/ns"]
    load_latency: Annotated[Figure, "ns"]
    load_l2_latency: Annotated[Figure, "ns"]
    peer_latency: Annotated[Figure, "ns"]
    peer_rate: Annotated[Figure, "bytes/ns"]
    copy_issue: Annotated[Figure, "ns"]
    wait_wake: Annotated[Figure, "ns"]
    barrier_wake: Annotated[Figure, "ns"]
    cluster_wake: Annotated[Figure, "ns"]
    atomic: Annotated[Figure, "ns"]
    fence_gpu: Annotated[Figure, "ns"]
    store_drain: Annotated[Figure, "ns"]
    product_rate: Annotated[Figure, "multiply-adds/cycle"]
    product_latency: Annotated[Figure, "ns"]
    shared_rate: Annotated[Figure, "bytes/cycle"]
    issue_rate: Annotated[Figure, "instructions/cycle"]
    alu_latency: Annotated[Figure, "cycles"]
    special_latency: Annotated[Figure, "cycles"]
    shared_latency: Annotated[Figure, "cycles"]
    shuffle_latency: Annotated[Figure, "cycles"]
    branch_latency: Annotated[Figure, "cycles"]

    def figures(self) -> dict[str, Figure]:
        """Name -> figure."""
        return {name: getattr(self, name) for name in UNITS}

    def cycles(self, number: float) -> float:
        """ns of so many cycles of an SM's clock."""
        return number / self.clock.value


UNITS: dict[str, str] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(DeviceFigures, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""Figure -> its unit."""


def device_names() -> list[str]:
    """Devices that come with the package."""
    return sorted(path.stem for path in DEVICES.glob("*.toml"))


def load_device(name: str) -> DeviceFigures:
    """A device by its name, or by the path of a TOML file: a word with a `/` or that ends in `.toml`.

    Raises
    ------
    SpecError
        There is none of that name, or its file says too little, too much, or something in another unit.
    """
    path = Path(name) if "/" in name or name.endswith(".toml") else DEVICES / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(device_names())
        raise SpecError(f"{name}: no such device file ({path}); there are {known}, or name a TOML file by its path")
    return _device_of(path, read_toml(path, "a device is a file of figures (`cakegen docs predict`)"))


def _device_of(path: Path, found: Mapping[str, Any]) -> DeviceFigures:
    plain = {"name": str, "arch": str, "sm_count": int}
    wanted = [each.name for each in fields(DeviceFigures)]
    missing, unknown = [name for name in wanted if name not in found], sorted(set(found) - set(wanted))
    if missing or unknown:
        raise SpecError(
            f"{path}: a device file has exactly the figures of docs/predict.md; missing: {', '.join(missing) or 'none'}"
            f"; unknown: {', '.join(unknown) or 'none'}"
        )
    values: dict[str, Any] = {}
    for name, kind in plain.items():
        if not isinstance(found[name], kind) or isinstance(found[name], bool):
            raise SpecError(f"{path}: {name} must be of type {kind.__name__}; got {found[name]!r}")
        values[name] = found[name]
    for name, unit in UNITS.items():
        values[name] = _figure_of(f"{path}, {name}", unit, found[name])
    return DeviceFigures(**values)


def _figure_of(where: str, unit: str, found: Any) -> Figure:
    keys = {"value", "unit", "grade", "source", "low", "high"}
    if not isinstance(found, dict) or not {"value", "unit", "grade", "source"} <= set(found) <= keys:
        raise SpecError(f"{where}: needs value, unit, grade and source, and may have low and high; got {found!r}")
    numbers = [found["value"], found.get("low", found["value"]), found.get("high", found["value"])]
    if any(isinstance(each, bool) or not isinstance(each, int | float) or not 0 < each < 1e9 for each in numbers):
        raise SpecError(f"{where}: value, low and high must be numbers above 0 and below 1e9; got {numbers}")
    value, low, high = numbers
    if not low <= value <= high:
        raise SpecError(f"{where}: low must not be above value, nor value above high; got {low}, {value}, {high}")
    if found["unit"] != unit:
        raise SpecError(f"{where}: is in {unit}; got the unit {found['unit']!r}")
    if found["grade"] not in GRADES or not str(found["source"]).strip():
        raise SpecError(f"{where}: grade must be one of {', '.join(GRADES)}, with a source; got {found['grade']!r}")
    return Figure(value, unit, found["grade"], str(found["source"]), low, high)
