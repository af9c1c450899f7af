"""Which tokens a decode CTA loads and multiplies, by architecture family. Pure."""

from __future__ import annotations

from cakegen.emit.decode_line import line_constants
from cakegen.emit.program import Constant
from cakegen.plan import FAMILIES
from cakegen.plan.records import BLOCK_K, DecodeForm
from cakegen.plan.smem import larger_half, mma_tokens
from cakegen.registry import TensorMapEntry

MAX_TWO_SUMS_TOKENS = 96
"""Two sums a token, of 128 weight rows: 2 * 96 of the 255 registers that a thread may have."""


def token_part_constants(form: DecodeForm, arch_family: str) -> tuple[Constant, ...]:
    """How the CTAs of a tile split the tokens, and what each adds up for them."""
    if not FAMILIES[arch_family].clips_tokens:
        return (Constant("kTokenParts", 0, "0: a box of tokens has kNPad rows whatever the request has"),)
    if form.token_parts == 1:
        return (Constant("kTokenParts", 1, "parts of the tokens: a CTA loads all of them"),)
    parts = Constant("kTokenParts", form.token_parts, "parts of the tokens, a CTA of the tile each")
    if not has_two_sums(form):
        return (parts, Constant("kTwoSums", False, "registers hold one sum a token"))
    two = Constant("kTwoSums", True, "K as where two CTAs split it, a sum each: a token gets the same bits")
    up = larger_half(form.k1_chunks // form.chunks_per_stage)
    if form.stage == "front":
        return (parts, two, Constant("kFirstUnits", up, "ring units of the first sum: the larger half"))
    return (
        parts,
        two,
        *line_constants("shared-down units of the first sum", "FIRST_DOWN_UNITS"),
        *line_constants("up units of the first sum", "FIRST_UP_UNITS"),
    )


def has_two_sums(form: DecodeForm) -> bool:
    """Whether a CTA that has a part of the tokens adds each up as two CTAs would that split K."""
    return form.token_parts > 1 and mma_tokens(form) <= MAX_TWO_SUMS_TOKENS


def token_map(form: DecodeForm, arch_family: str, name: str, view: str = "chunks") -> TensorMapEntry:
    """The map of an operand whose rows are tokens."""
    box = (BLOCK_K, mma_tokens(form), form.chunks_per_stage)
    return TensorMapEntry(name, name, view, box, form.token_parts if FAMILIES[arch_family].clips_tokens else 0)
