"""What a decode program is given on the compile line, so that one text serves several TP degrees. Pure."""

from __future__ import annotations

from cakegen.emit.program import Constant
from cakegen.model import Model
from cakegen.plan.records import DecodeForm
from cakegen.plan.smem import larger_half, unit_shares


def decode_line(model: Model, form: DecodeForm) -> dict[str, int]:
    """Macro -> value: the grid, and the extents of K and of outputs that depend on the TP degree."""
    line = {"GRID_CTAS": form.grid_ctas}
    if form.stage == "front":
        return line | {"SHARED_COLS": model.dims.i_local(form.tp)}
    for rank, share in enumerate(unit_shares(form)):
        line |= {f"RANK{rank}_DOWN_UNITS": share.k2_count, f"RANK{rank}_UP_UNITS": share.k1_count}
    if form.token_parts > 1:
        line["FIRST_DOWN_UNITS"] = larger_half(form.k2_chunks // form.chunks_per_stage)
        line["FIRST_UP_UNITS"] = larger_half(form.k1_chunks // form.chunks_per_stage)
    if form.resident_b:
        line["UP_COLS"] = form.k1_cols
    return line


def line_constants(meaning: str, *macros: str) -> tuple[Constant, ...]:
    """The members of `struct Cfg` that the compile line gives: `GRID_CTAS` is `kGridCtas`."""
    names = ("".join(word.capitalize() for word in macro.split("_")) for macro in macros)
    return tuple(Constant(f"k{name}", macro, meaning) for name, macro in zip(names, macros, strict=True))
