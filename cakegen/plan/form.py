"""Leaf module: what two launches have in common when their shapes are taken away. Imports records and `stream_k`."""

from __future__ import annotations

from collections.abc import Hashable

from cakegen.plan.records import DecodeForm, GemmForm, Launch, NormForm
from cakegen.plan.stream_k import max_pieces


def form_of(launch: Launch) -> Hashable:
    """The shape-free form of a launch: its flags, without counts of tiles, chunks or stages.

    Two models reach the same program structure where their forms are equal; a small model whose forms cover those of
    a large one covers its code paths.
    """
    form = launch.form
    if isinstance(form, DecodeForm):
        return (
            f"decode_{form.stage}",
            ("n_pad", form.n_pad),
            ("block_m", form.block_m),
            ("chunks_per_stage", form.chunks_per_stage),
            ("cluster_ctas", form.cluster_ctas),
            *(
                name
                for name, is_set in (
                    ("fused_norm", form.fused_norm),
                    ("resident_b", form.resident_b),
                    ("staged_rows", form.staged_rows),
                    ("issue_gate", form.issue_gate > 0),
                    ("no_prefetch", form.no_prefetch),
                    ("stagger", form.stagger_units > 0),
                    ("wide_wait", form.wide_wait),
                    ("landing_alias", form.landing_alias),
                    ("split_finalize", form.split_finalize),
                    ("split_tokens", form.token_parts > 1),
                    ("needs_residency", form.needs_residency),
                    ("ragged", form.k1_ragged_cols > 0),
                )
                if is_set
            ),
        )
    if isinstance(form, NormForm):
        return ("tail_norm" if form.normed else "tail_sum", *(("early_trigger",) if form.early_trigger else ()))
    return _gemm_form(launch, form)


def _gemm_form(launch: Launch, form: GemmForm) -> Hashable:
    """Whether a row tile has no second; with a cut, what a cluster meets: whole tiles, segments, items of several."""
    parameters = dict(launch.parameters)
    total = parameters["sk_total"]
    pieces = max_pieces(total, form.num_k, parameters["sk_ipc"]) if total else 0
    flags = (
        ("evict_first", form.evict_first),
        ("fused_norm", form.fused_norm),
        ("staged_store", form.staged_store),
        ("ragged", form.k1_ragged_cols > 0),
        ("lone_row_tile", parameters["m_tiles"] % 2 == 1),
        ("several_items", 2 * parameters["num_items"] > launch.grid_ctas[0]),
        ("split_k", total > 0),
        ("whole_first", total > 0 and parameters["full_items"] > 0),
        ("many_segments", parameters["sk_max_seg"] > 2),
        ("crossing", pieces == 2),
        ("tile_inside", pieces > 2),
    )
    return (
        f"gemm_{form.stage}",
        ("block_n", form.block_n),
        ("num_stages", form.num_stages),
        ("tile_groups", form.tile_groups),
        *(name for name, is_set in flags if is_set),
    )
