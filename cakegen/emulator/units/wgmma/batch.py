"""wgmmas that follow each other in a block, decoded together and once for the descriptors that they are given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from cakegen.emulator.faults import Fault, Where
from cakegen.emulator.machine.memory import SharedMemory
from cakegen.emulator.units.wgmma.form import WgmmaForm
from cakegen.emulator.units.wgmma.operands import Descriptor, Tile, TileStack, TileTable, decode_descriptor
from cakegen.errors import EmulationError

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Product:
    """One wgmma of a warp, with its operands: the instruction of an index."""

    form: WgmmaForm
    index: int
    a: Descriptor | None
    b: Descriptor
    tile: Tile

    @property
    def what(self) -> tuple[int, Descriptor | None, Descriptor]:
        """What all warps of a warpgroup must agree on."""
        return self.form.instruction.place.ptx_line, self.a, self.b


@dataclass(frozen=True, eq=False)
class Part:
    """The products of a batch that add to one accumulator.

    Parameters
    ----------
    numbers
        Which of the batch they are.
    tiles
        Their operands, where all are bf16 in shared memory into fp32; else None.
    fresh
        Which of them start from zero.
    """

    form: WgmmaForm
    numbers: tuple[int, ...]
    products: tuple[Product, ...]
    tiles: TileStack | None
    fresh: Array


@dataclass(frozen=True, eq=False)
class Batch:
    """Products that are issued together; `granules` are those that they read, each once."""

    products: tuple[Product, ...]
    parts: tuple[Part, ...]
    granules: Array
    what: tuple[tuple[int, Descriptor | None, Descriptor], ...]
    widths: tuple[int, ...]


@dataclass(eq=False)
class IssueRun:
    """Instructions of a block that issue products one behind the other, with their indices."""

    forms: tuple[tuple[WgmmaForm, int], ...]
    registers: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        named = [register for form, _ in self.forms for register in (form.a, form.b, form.predicate) if register >= 0]
        self.registers = tuple(dict.fromkeys(named))

    def key(self, R: list[Any]) -> tuple[bytes, ...]:
        """What the products depend on."""
        return tuple([R[index].tobytes() for index in self.registers])

    def decode(self, R: list[Any], warp: int, cta: int, tiles: TileTable, shared: SharedMemory) -> Batch:
        """The products that the registers describe, for one warp.

        Raises
        ------
        Fault, EmulationError
            A descriptor is not valid, or not modelled; the place is that of its own instruction.
        """
        products = []
        for form, index in self.forms:
            try:
                form = form.at(R)
                width = form.kind.width
                a = None if form.a < 0 else decode_descriptor(R[form.a], "a", width, form.a_across)
                b = decode_descriptor(R[form.b], "b", width, form.b_across)
                products.append(Product(form, index, a, b, tiles.tile(a, b, warp % 4, form.n, shared)))
            except EmulationError as error:
                _locate(error, form, warp, cta)
        return make_batch(products, tiles)


def make_batch(products: list[Product], tiles: TileTable) -> Batch:
    """Some products as a batch."""
    by_registers: dict[tuple[int, ...], list[int]] = {}
    for number, product in enumerate(products):
        by_registers.setdefault(product.form.registers, []).append(number)
    parts = []
    for numbers in by_registers.values():
        mine = [products[number] for number in numbers]
        plain = all(product.form.kind.is_plain and product.a is not None for product in mine)
        stack = tiles.stack(tuple(product.tile for product in mine)) if plain else None
        fresh = np.array([not product.form.accumulate for product in mine], np.bool_)
        parts.append(Part(mine[0].form, tuple(numbers), tuple(mine), stack, fresh))
    granules = tiles.union(tuple(product.tile for product in products))
    what = tuple(product.what for product in products)
    return Batch(tuple(products), tuple(parts), granules, what, tuple(product.form.n for product in products))


def _locate(error: EmulationError, form: WgmmaForm, warp: int, cta: int) -> NoReturn:
    if isinstance(error, Fault):
        raise error.at(Where(form.instruction, cta, warp, "0-31")) from None
    raise EmulationError(f"{form.instruction.place}: {error}") from None
