"""Random legal models, as plain records (no pydantic: a machine that runs programs need not have it), and as TOML."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

from models import SM90_DECODE_CHANGES, tiny_model

from cakegen.errors import PlanError
from cakegen.model import DeviceFacts, Model, Target, to_literal
from cakegen.plan import plan_route
from cakegen.rules import DecodeRules


def random_model(seed: int) -> Model:
    """A legal model that differs from the tiny one in dimensions, thresholds, TP degrees and SM counts.

    It has one target, `sm_90a`, with two SM counts, so that an export holds a few dozen programs.
    """
    chance = random.Random(seed)
    while True:
        model = _draw(chance, seed)
        if _can_be_planned(model):
            return model


def model_toml(model: Model) -> str:
    """The export file that declares a model."""
    literal = to_literal(model)
    literal["decode_sm90"] = {key: literal["decode_sm90"][key] for key in SM90_DECODE_CHANGES}
    requests = {"max_tokens": model.max_tokens, "max_partials": model.max_partials}
    sections = [f"name = {json.dumps(model.name)}", _table("[model]", literal["dims"]), _table("[requests]", requests)]
    sections += [_table("[[targets]]", target) for target in literal["targets"]]
    sections += [_table("[[kernels]]", family) for family in literal["families"]]
    tiles = literal["prefill_sm90"].pop("tiles")
    sections += [_table(f"[{rules}]", literal[rules]) for rules in ("decode", "decode_sm90", "prefill", "prefill_sm90")]
    sections += [_table("[[prefill_sm90.tiles]]", tile) for tile in tiles]
    return "\n\n".join(sections) + "\n"


def _table(head: str, values: dict[str, Any]) -> str:
    return "\n".join([head, *(f"{key} = {json.dumps(value)}" for key, value in values.items())])


def _draw(chance: random.Random, seed: int) -> Model:
    tiny = tiny_model()
    degrees = tuple(sorted(chance.sample((1, 2, 4, 8), 2)))
    dims = dataclasses.replace(
        tiny.dims,
        hidden=128 * chance.randint(2, 12),
        latent=128 * chance.randint(2, 10),
        experts=128 * chance.randint(1, 4),
        shared_intermediate=64 * degrees[-1] * chance.randint(1, 6),
        norm_eps=chance.choice((1e-6, 1e-5, 1e-3)),
        situ_beta=chance.choice((1.5, 4.0, 8.0)),
        situ_linear_beta=chance.choice((2.0, 25.0)),
    )
    rules = dataclasses.replace(
        tiny.decode,
        n_pads=chance.choice(((8, 16, 32, 64, 128), (8, 32, 128), (16, 64, 128), (128,))),
        max_stages=chance.randint(3, 12),
        depth2_min_stages_single=chance.randint(1, 8),
        depth2_min_stages_pair=chance.randint(1, 8),
        alias_min_chunks=chance.randint(0, 8),
        staged_max_down_units=chance.randint(0, 16),
        staged_min_stages=chance.randint(1, 8),
        staged_wide_n_pad=chance.choice((8, 16, 32)),
        resident_tokens_staged=chance.randint(0, 32),
        resident_tokens_long=chance.randint(0, 32),
        resident_tokens_short=chance.randint(0, 32),
        resident_min_stages=chance.randint(1, 8),
        issue_ahead=chance.randint(1, 3),
        front_ahead=chance.randint(0, 4),
        overlap_ahead_n_pad=chance.choice((0, 8, 128)),
        stagger_units=chance.randint(1, 3),
    )
    wider = chance.choice(((), (192,), (160, 192), (192, 256), (160, 320, 384)))
    sm_counts = tuple(sorted(chance.sample((2, 5, 9, 16, 24, 40, 78, 132), 2)))
    return dataclasses.replace(
        tiny,
        name=f"random_{seed}",
        dims=dims,
        max_partials=chance.randint(1, 8),
        targets=(Target("sm_90a", degrees, sm_counts),),
        families=tuple(family for family in tiny.families if family.arch_family == "sm90"),
        decode=rules,
        decode_sm90=_draw_hopper(chance, rules, wider),
    )


def _draw_hopper(chance: random.Random, rules: DecodeRules, wider: tuple[int, ...]) -> DecodeRules:
    return dataclasses.replace(
        rules,
        max_tokens=(*rules.n_pads, *wider)[-1],
        max_cta_tokens=max(tokens for tokens in (*rules.n_pads, *wider) if tokens <= 192),
        n_pads=(*rules.n_pads, *wider),
        depth2_min_stages_pair=chance.randint(1, 8),
        alias_min_chunks=chance.choice((2, 8, 4096)),
        resident_tokens_staged=chance.randint(0, 32),
        split_finalize_n_pad=chance.choice((0, 16, 32, 128)),
        overlap_min_sm_percent=chance.choice((0, 75)),
        front_split_n_pad=chance.choice((0, 32, 128)),
        front_split_min_sm_percent=chance.choice((0, 70)),
        tail_split_n_pad=chance.choice((0, 16, 64, 128)),
        tail_split_max_chunks=chance.choice((4, 64)),
        tail_split_long_n_pad=chance.choice((0, 64, 128)),
        narrow_block_m=chance.choice((0, 64, 96)),
        narrow_n_pad=chance.choice((0, 32, 128)),
    )


def _can_be_planned(model: Model) -> bool:
    try:
        for target in model.targets:
            for tp in target.tp_degrees:
                for sm_count in target.sm_counts:
                    device = DeviceFacts.nominal(target.arch, sm_count)
                    for tokens in range(1, model.decode_sm90.max_tokens + 1):
                        plan_route(model, stage="front", tp=tp, tokens=tokens, partials=1, device=device)
                        for partials in {1, model.max_partials}:
                            plan_route(model, stage="tail", tp=tp, tokens=tokens, partials=partials, device=device)
    except PlanError:
        return False
    return True
