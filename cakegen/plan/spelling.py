"""Spells the logical key of a decode form; `keys` says what each part means. Imports the records of `plan`."""

from __future__ import annotations

from cakegen.plan.records import DecodeForm, NormPlace, Sharing

_USUAL_BLOCK_M = 128


def spell_decode_key(form: DecodeForm, export: str, suffix: str) -> str:
    """The logical key of a decode form, with its architecture's suffix; without one it is spelled as published."""
    return f"decode:{_spell_form(form) if suffix else _spell_published(form, export)}{suffix}"


def _spell_form(form: DecodeForm) -> str:
    """What the planner decided, in words and numbers; tiles, K and columns follow from the stage and the TP degree."""
    words = (
        (form.stage, True),
        (f"tp{form.tp}", True),
        (f"n{form.n_pad}", True),
        (f"r{form.num_stages}", True),
        (f"d{form.chunks_per_stage}", form.chunks_per_stage > 1),
        (f"m{form.block_m}", form.block_m != _USUAL_BLOCK_M),
        ("pair", form.sharing is Sharing.PAIR),
        ("tokens", form.sharing is Sharing.TOKENS),
        (form.norm.name.lower(), form.norm is not NormPlace.NONE),
        (f"gate{form.issue_gate}", form.issue_gate),
        (f"pause{form.stagger_units}", form.stagger_units),
        ("alias", form.landing_alias),
        ("halves", form.split_finalize),
    )
    return "_".join(word for word, is_set in words if is_set)


def _spell_published(form: DecodeForm, export: str) -> str:
    """`p0` and `w0` are always the same: no program of ours is what they name."""
    head = (
        f"{export}_decode_g{form.grid_ctas}_n{form.n_pad}_r{form.num_stages}_d{form.chunks_per_stage}_p0_w0"
        f"_t{form.router_tiles}_{form.latent_tiles}_{form.shared_tiles}_k{form.k1_chunks}_{form.k2_chunks}"
        f"_o{form.out_cols}_c{form.cluster_ctas}"
    )
    suffixes = (
        (f"_m{form.block_m}", form.block_m != _USUAL_BLOCK_M),
        ("_f", form.fused_norm),
        (f"_g{form.issue_gate}", form.issue_gate),
        ("_sb", form.resident_b),
        ("_rs", form.staged_rows),
        ("_np", form.no_prefetch),
        (f"_st{form.stagger_units}", form.stagger_units),
        ("_ww", form.wide_wait),
        ("_la", form.landing_alias),
        ("_sf", form.split_finalize),
        (f"_tt{form.token_parts}", form.token_parts > 1),
        (f"_kt{form.k1_ragged_cols}", form.k1_ragged_cols),
    )
    return head + "".join(suffix for suffix, is_set in suffixes if is_set)
