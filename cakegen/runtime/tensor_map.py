"""Tensor maps as plain records that check themselves, and their encoding by the driver.

A record needs no driver: tests and other consumers read it; `encode_tensor_map` turns it into 128 bytes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from cakegen.errors import LaunchError
from cakegen.known_faults import SMALL_MAP_BYTES, cleared
from cakegen.plan.smem import BF16_BYTES
from cakegen.registry import TensorMapEntry
from cakegen.runtime import driver

MAX_BOX = 256
MAX_DIM = 2**32
MAX_STRIDE_BYTES = 2**40
SWIZZLE_BYTES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
CHUNK_COLS = 64
"""Columns of a K chunk in every program, and of a packed weight: one 128-byte row of the swizzle."""

# values of the driver's enumerations (cuda.h, CUtensorMap*)
_BFLOAT16 = 9
_INTERLEAVE_NONE = 0
_SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
_PROMOTIONS = {"none": 0, "64B": 1, "128B": 2, "256B": 3}
_OOB_FILLS = {"zeros": 0, "nan": 1}


@dataclass(frozen=True)
class TensorMap:
    """One view of global memory for the tensor memory accelerator; element strides are 1.

    Parameters
    ----------
    name
        Name of the kernel argument.
    address
        First element; a multiple of 16.
    dims
        Extents in elements, innermost first.
    strides_bytes
        Distance between neighbours along dims 1, 2, …; dim 0 is contiguous.
    box
        Elements that one copy moves, innermost first.
    swizzle, promotion, oob
        `128B`, `none`, `zeros`: the spelling of the driver's enumerations.
    element_bytes, element
        2 and `bf16`, which is all that the programs use.

    Raises
    ------
    LaunchError
        A limit of cuTensorMapEncodeTiled is exceeded; the message names the field.

    Notes
    -----
    Limits: CUDA Driver API, cuTensorMapEncodeTiled; PTX ISA 5.5 (tensors).
    """

    name: str
    address: int
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "128B"
    promotion: str = "none"
    oob: str = "zeros"
    element_bytes: int = BF16_BYTES
    element: str = "bf16"

    def __post_init__(self) -> None:
        rank = len(self.dims)
        if not 1 <= rank <= 5 or len(self.box) != rank or len(self.strides_bytes) != rank - 1:
            got = f"{rank} dims, {len(self.strides_bytes)} strides, {len(self.box)} box extents"
            self._refuse("rank", got, "1 to 5 dims, one stride fewer, one box extent a dim")
        if self.address <= 0 or self.address % 16:
            got = f"{self.address:#x} (mod 16 = {self.address % 16})"
            self._refuse("address", got, "a multiple of 16 bytes, not null")
        for axis, extent in enumerate(self.dims):
            if not 1 <= extent <= MAX_DIM:
                self._refuse(f"dims[{axis}]", str(extent), f"1 to 2^32 = {MAX_DIM}")
        for axis, stride in enumerate(self.strides_bytes):
            if stride <= 0 or stride % 16 or stride >= MAX_STRIDE_BYTES:
                got = f"{stride} (mod 16 = {stride % 16})"
                self._refuse(f"strides_bytes[{axis}]", got, f"a multiple of 16 below 2^40 = {MAX_STRIDE_BYTES}")
        for axis, extent in enumerate(self.box):
            if not 1 <= extent <= MAX_BOX:
                self._refuse(f"box[{axis}]", str(extent), f"1 to {MAX_BOX} elements")
        self._check_inner_box()

    def _check_inner_box(self) -> None:
        inner = self.box[0] * self.element_bytes
        got = f"{self.box[0]} elements * {self.element_bytes} bytes = {inner}"
        if inner % 16:
            self._refuse("box[0]", got, "a multiple of 16 bytes")
        if self.swizzle not in SWIZZLE_BYTES or self.promotion not in _PROMOTIONS or self.oob not in _OOB_FILLS:
            spelled = f"{self.swizzle!r}, {self.promotion!r}, {self.oob!r}"
            known = f"{list(SWIZZLE_BYTES)}, {list(_PROMOTIONS)}, {list(_OOB_FILLS)}"
            self._refuse("swizzle, promotion, oob", spelled, f"one each of {known}")
        width = SWIZZLE_BYTES[self.swizzle]
        if width and inner > width:
            self._refuse("box[0]", got, f"at most the {width} bytes of its swizzle")

    def _refuse(self, field: str, got: str, need: str) -> None:
        raise LaunchError(f"tensor map {self.name}: {field} must be {need} (cuTensorMapEncodeTiled); got {got}.")

    @property
    def is_small_and_loose(self) -> bool:
        """Whether what it spans may be an allocation below 128 KiB, and its strides are not dense in the dims' order.

        Of the published export's maps these are views of activations with few rows, 9 of the hidden width or 18 of the
        latent one: a chunk's rows lie a pitch apart. A weight spans megabytes. In the small model all can be.
        """
        packed = self.dims[0] * self.element_bytes
        span, dense = packed, True
        for extent, stride in zip(self.dims[1:], self.strides_bytes, strict=True):
            dense = dense and stride == packed
            packed *= extent
            span += (extent - 1) * stride
        return span < SMALL_MAP_BYTES and not dense

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy of a whole box adds to its barrier."""
        count = self.element_bytes
        for extent in self.box:
            count *= extent
        return count


def view_matrix(
    entry: TensorMapEntry, address: int, rows: int, cols: int, pitch_elems: int, chunk_elems: int = 0
) -> TensorMap:
    """The map of a `[rows, cols]` bf16 matrix, as a registry entry views it.

    Parameters
    ----------
    pitch_elems
        Elements from one row to the next: of the matrix, or of a packed weight's chunk.
    chunk_elems
        Elements from one chunk of 64 columns to the next where the matrix is packed (0: it is row-major).

    Raises
    ------
    LaunchError
        The matrix can't be viewed so; the message names the field and shows the arithmetic.
    """
    pitch_bytes = pitch_elems * BF16_BYTES
    if entry.view == "chunks":
        if cols % CHUNK_COLS:
            raise LaunchError(
                f"tensor map {entry.name}: view 'chunks' needs whole chunks of {CHUNK_COLS} columns; "
                f"{entry.operand} has {cols} = {cols // CHUNK_COLS} * {CHUNK_COLS} + {cols % CHUNK_COLS}."
            )
        dims = (CHUNK_COLS, rows, cols // CHUNK_COLS)
        strides = (pitch_bytes, (chunk_elems or CHUNK_COLS) * BF16_BYTES)
    elif entry.view == "columns" and chunk_elems:
        raise LaunchError(
            f"tensor map {entry.name}: a packed {entry.operand} has no slice that ends inside a chunk; it ends at "
            f"column {cols} = {cols // CHUNK_COLS} * {CHUNK_COLS} + {cols % CHUNK_COLS}. Pass the weight unpacked."
        )
    elif entry.view == "columns":
        # the third extent is 1, so its stride moves nothing; it must only be legal
        dims = (cols, rows, 1)
        strides = (pitch_bytes, pitch_bytes * rows)
    else:
        raise LaunchError(f"tensor map {entry.name}: view must be 'chunks' or 'columns'; got {entry.view!r}.")
    return TensorMap(entry.name, address, dims, strides, entry.box)


def encode_tensor_map(record: TensorMap, destination: int, *, clears_small: bool = False) -> None:
    """Write the 128 bytes of a record's CUtensorMap to a 64-byte aligned host address.

    Parameters
    ----------
    clears_small
        The driver may set a bit wrongly in small maps (`known_faults.SMALL_MAP`).

    Raises
    ------
    LaunchError
        The driver refused the record.
    """
    assert destination % 64 == 0, destination
    assert record.element_bytes == BF16_BYTES, record
    rank = len(record.dims)
    result = driver.tensor_map_encoder()(
        destination,
        _BFLOAT16,
        rank,
        record.address,
        (ctypes.c_uint64 * rank)(*record.dims),
        (ctypes.c_uint64 * (rank - 1))(*record.strides_bytes),
        (ctypes.c_uint32 * rank)(*record.box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        _INTERLEAVE_NONE,
        _SWIZZLES[record.swizzle],
        _PROMOTIONS[record.promotion],
        _OOB_FILLS[record.oob],
    )
    if result:
        module = driver.bindings()
        text = driver.result_text(module, module.CUresult(result))
        raise LaunchError(f"cuTensorMapEncodeTiled refused {record}: {text}")
    if clears_small and record.is_small_and_loose:
        second = ctypes.c_uint64.from_address(destination + 8)
        second.value = cleared(second.value)
