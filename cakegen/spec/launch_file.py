"""A launch file: JSON -> strict records of buffers and launches. Imports errors and pydantic; docs/emulate-launch.md.

Bounds are those of any CUDA device (CUDA C++ Programming Guide, compute capabilities); what an architecture adds, the
launch itself finds.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cakegen.errors import SpecError

Element = Literal[
    "bf16", "f16", "f32", "f64", "e4m3", "e5m2", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"
]  # fmt: skip
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z_$][A-Za-z0-9_$]*$")]
Count = Annotated[int, Field(ge=0, le=2**40)]
Extent = Annotated[int, Field(ge=1, le=2**31 - 1)]
Triple = Annotated[tuple[Extent, ...], Field(min_length=1, max_length=3)]
_MOST_THREADS, _MOST_CLUSTER = 1024, 16
MOST_FILE_BYTES = 1 << 24
MOST_BUFFER_BYTES = 1 << 28
"""Of all buffers together: the emulator keeps a few bytes beside each."""
_ELEMENT_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "e4m3": 1, "e5m2": 1}
_ELEMENT_BYTES |= {f"{kind}{8 * size}": size for kind in "iu" for size in (1, 2, 4, 8)}


class Record(BaseModel):
    """One object of the file: no unknown key, no conversion, no change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Expectation(Record):
    """What a buffer must hold after the last launch: `|got - expected| <= atol + rtol * |expected|`; 0: bit for bit."""

    file: str
    atol: Annotated[float, Field(ge=0)] = 0.0
    rtol: Annotated[float, Field(ge=0)] = 0.0


class BufferSection(Record):
    """An array that launches share: its role, its elements, and where its first values come from."""

    role: Literal["read", "write", "update"]
    element: Element
    file: str | None = None
    shape: Annotated[tuple[Extent, ...], Field(min_length=1, max_length=8)] | None = None
    fill: Literal["poison", "index", "normal"] | float | None = None
    expect: Expectation | None = None


class BufferArgumentSection(Record):
    """A pointer to a buffer."""

    kind: Literal["buffer"]
    name: str
    offset_bytes: Count = 0


class ScalarSection(Record):
    """A number by value."""

    kind: Element
    value: int | float


class BytesSection(Record):
    """Any other value, such as a struct: its bytes in hexadecimal, as they lie in memory."""

    kind: Literal["bytes"]
    hex: Annotated[str, Field(pattern=r"^([0-9a-fA-F]{2})+$")]


class TensorMapSection(Record):
    """A tensor map by value; lists are innermost first, `strides_bytes` one shorter than `dims`."""

    kind: Literal["tensor_map"]
    name: str
    offset_bytes: Count = 0
    dims: Annotated[tuple[Extent, ...], Field(min_length=1, max_length=5)]
    strides_bytes: Annotated[tuple[Extent, ...], Field(max_length=4)] = ()
    box: Annotated[tuple[Extent, ...], Field(min_length=1, max_length=5)]
    swizzle: Literal["none", "32B", "64B", "128B"] = "none"
    element: Element | None = None


ArgumentSection = Annotated[
    BufferArgumentSection | ScalarSection | BytesSection | TensorMapSection, Field(discriminator="kind")
]


class LaunchSection(Record):
    """One launch. `barriers` names the mbarriers of dynamic shared memory by their byte offsets."""

    entry: Identifier | None = None
    grid: Triple
    block: Triple
    cluster: Triple = (1, 1, 1)
    dynamic_smem_bytes: Annotated[int, Field(ge=0, le=232448)] = 0
    cooperative: bool = False
    programmatic: bool = False
    arguments: tuple[ArgumentSection, ...] = ()
    barriers: dict[str, Annotated[int, Field(ge=0, multiple_of=8)]] = {}


class LaunchFile(Record):
    """The whole file."""

    version: Literal[1]
    buffers: dict[Identifier, BufferSection] = {}
    launches: Annotated[tuple[LaunchSection, ...], Field(min_length=1, max_length=2000)]


def parse_launch_file(path: Path) -> LaunchFile:
    """Read and check a launch file.

    Raises
    ------
    SpecError
        It is missing or not JSON; a key is unknown, missing or out of bounds; or what it says does not fit together.
        One line a fault: the field, what was received, what is needed.
    """
    try:
        size = path.stat().st_size
        if size > MOST_FILE_BYTES:
            raise SpecError(f"{path}: {size} bytes; a launch file of at most {MOST_FILE_BYTES} is read")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: {getattr(error, 'strerror', None) or error}; give a JSON file of launches") from None
    try:
        launches = LaunchFile.model_validate_json(text)
    except ValidationError as error:
        raise SpecError("\n".join(f"{path.name}: {_explain(entry)}" for entry in error.errors())) from None
    faults = [*_buffer_faults(launches), *_launch_faults(launches)]
    if faults:
        raise SpecError("\n".join(f"{path.name}: {fault}" for fault in faults))
    return launches


def _explain(entry: Any) -> str:
    location = ".".join(str(part) for part in entry["loc"]) or "the file"
    if entry["type"] == "extra_forbidden":
        return f"{location}: unknown key; remove it, or correct its spelling"
    if entry["type"] == "missing":
        return f"{location}: missing"
    shown = repr(entry["input"])
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"{location} = {shown}: {entry['msg']}"


def _buffer_faults(launches: LaunchFile) -> list[str]:
    faults = []
    sizes = {
        name: math.prod(buffer.shape or ()) * _ELEMENT_BYTES[buffer.element]
        for name, buffer in launches.buffers.items()
        if buffer.shape is not None
    }
    if sum(sizes.values()) > MOST_BUFFER_BYTES:
        largest, total = max(sizes, key=lambda name: sizes[name]), sum(sizes.values())
        shown = f"{total} bytes together, {largest} alone {sizes[largest]}"
        faults.append(f"buffers: {shown}; at most {MOST_BUFFER_BYTES} are made")
    for name, buffer in launches.buffers.items():
        where = f"buffers.{name}"
        if (buffer.file is None) == (buffer.shape is None):
            faults.append(f"{where}: needs either a file, or a shape (and a fill)")
        elif buffer.file is not None and buffer.fill is not None:
            faults.append(f"{where}: fill = {buffer.fill!r} beside a file; its values come from the file")
        elif buffer.file is None and buffer.fill is None and buffer.role != "write":
            faults.append(f"{where}: a buffer of role {buffer.role!r} needs its first values: a file or a fill")
    return faults


def _launch_faults(launches: LaunchFile) -> list[str]:
    faults = []
    for number, launch in enumerate(launches.launches):
        where = f"launches.{number}"
        for at, argument in enumerate(launch.arguments):
            if (
                isinstance(argument, (BufferArgumentSection, TensorMapSection))
                and argument.name not in launches.buffers
            ):
                known = ", ".join(launches.buffers) or "none"
                faults.append(f"{where}.arguments.{at}: no buffer {argument.name!r}; the file has {known}")
        threads, cluster = _product(launch.block), _product(launch.cluster)
        if threads > _MOST_THREADS:
            faults.append(f"{where}.block = {list(launch.block)}: {threads} threads; a CTA has at most {_MOST_THREADS}")
        if cluster > _MOST_CLUSTER:
            faults.append(f"{where}.cluster = {list(launch.cluster)}: {cluster} CTAs; at most {_MOST_CLUSTER}")
        if any(extent % size for extent, size in zip(triple(launch.grid), triple(launch.cluster), strict=True)):
            faults.append(f"{where}.grid = {list(launch.grid)}: no whole clusters of {list(launch.cluster)}")
        if number == 0 and launch.programmatic:
            faults.append(f"{where}.programmatic: the first launch has none before it to overlap")
    return faults


def triple(extents: tuple[int, ...]) -> tuple[int, int, int]:
    """Extents along x, y, z; those left out are 1."""
    x, y, z = (*extents, 1, 1)[:3]
    return x, y, z


def _product(extents: tuple[int, ...]) -> int:
    x, y, z = triple(extents)
    return x * y * z
