"""Blackwell's sums of a decode CTA in tensor memory. Pure."""

from __future__ import annotations

from cakegen.arch import family_member
from cakegen.emit.program import Constant
from cakegen.errors import EmitError
from cakegen.model import Model
from cakegen.plan.records import DecodeForm
from cakegen.plan.smem import DecodeSmem

MIN_TENSOR_COLUMNS = 32
"""Of an allocation in tensor memory, whose columns are a power of two (PTX ISA 9.7.16.7)."""
# of the flag words, those of a chaos build come first
_TENSOR_BASE_WORD_BYTES = 8


def tensor_memory_constants(model: Model, form: DecodeForm, smem: DecodeSmem) -> tuple[Constant, ...]:
    """Where the sums lie in tensor memory; a column holds one token's, a lane one weight row's.

    Raises
    ------
    EmitError
        More CTAs fit an SM by their shared memory than its tensor memory can serve: one of them would wait for columns
        while others wait for it.
    """
    width = max(MIN_TENSOR_COLUMNS, form.n_pad)
    columns = 2 * width if form.gated else width
    _refuse_shared_columns(model, form, columns, smem.total_bytes)
    word = smem.flags_offset + _TENSOR_BASE_WORD_BYTES
    constants: tuple[Constant, ...] = (
        Constant("kTensorColumns", columns, "columns of tensor memory, a power of two from 32 on"),
        Constant("kTensorBaseOffset", word, "byte offset of the word that holds their address"),
    )
    if form.stage == "front":
        meaning = "first column of a shared tile's up sums" if form.gated else "no tile has up sums"
        constants += (Constant("kUpColumn", width if form.gated else 0, meaning),)
    if form.cluster_ctas == 2:
        late = Constant("kDeferredClusterWait", form.wide_wait, "only the epilogue waits for the partner's start")
        constants += (late,)
    return constants


def _refuse_shared_columns(model: Model, form: DecodeForm, columns: int, smem_bytes: int) -> None:
    arch = family_member("sm100")
    ctas = arch.resident_ctas(smem_bytes)
    if ctas * columns > arch.tensor_memory_cols:
        raise EmitError(
            f"{model.name}: decode {form.stage} TP {form.tp} n_pad={form.n_pad}: {arch.smem_per_sm_bytes} bytes of "
            f"shared memory hold {ctas} CTAs of {smem_bytes}, which need {ctas} * {columns} columns of tensor memory; "
            f"an SM has {arch.tensor_memory_cols}. Raise decode.max_stages, so that fewer CTAs share an SM."
        )
