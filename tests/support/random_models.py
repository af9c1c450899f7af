"""Random legal models, as plain records (no pydantic: a machine that runs programs need not have it), and as TOML."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

from support.models import hopper, of_family, tiny_model

from cakegen.errors import PlanError
from cakegen.model import DeviceFacts, Model, NamedFunction, Target, to_literal
from cakegen.plan import plan_route
from cakegen.rules import (
    DecodeRules,
    FrontRules,
    FrontSplit,
    LandingAlias,
    NarrowTiles,
    ShortRing,
    SmallTile,
    StagedRows,
    StaggeredFill,
    TailRules,
    TailSplit,
    rule_fields,
)


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
    """The export file that declares a model, with every rule in it."""
    literal = to_literal(model)
    head = {key: literal[key] for key in ("name",)}
    head["block"] = "latent_moe"
    head["requests"] = {"max_tokens": model.max_tokens, "max_partials": model.max_partials}
    lines = [_assignment(key, value) for key, value in head.items()]
    dims = {key: value for key, value in literal["dims"].items() if key not in ("activation", "block")}
    dims |= zip(("situ_beta", "situ_linear_beta"), model.dims.activation.numbers, strict=True)
    lines += ["", "[model]", *_assignments(dims)]
    lines += [line for target in literal["targets"] for line in ("", "[[targets]]", *_assignments(target))]
    for name in ("hopper", "blackwell"):
        rules = getattr(model, name)
        lines += ["", *_rules_lines(name, rules)] if rules is not None else []
    return "\n".join(lines) + "\n"


def _rules_lines(where: str, rules: Any) -> list[str]:
    """A table a record; what is None is `false`, so that the shared rule does not come in its place."""
    flat, nested = [f"[{where}]"], []
    for field in rule_fields(type(rules)):
        value = getattr(rules, field.name)
        if field.table is not None and value is not None and not isinstance(value, tuple):
            nested += ["", *_rules_lines(f"{where}.{field.name}", value)]
        else:
            flat.append(_assignment(field.name, False if value is None else to_literal(value)))
    return [*flat, *nested]


def _assignments(values: dict[str, Any]) -> list[str]:
    return [_assignment(key, value) for key, value in values.items()]


def _assignment(key: str, value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "\n".join([f"{key} = [", *(f"    {_inline(entry)}," for entry in value), "]"])
    return f"{key} = {_inline(value)}"


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def _draw(chance: random.Random, seed: int) -> Model:
    tiny = of_family(tiny_model(), "sm_90a")
    degrees = tuple(sorted(chance.sample((1, 2, 4, 8), 2)))
    dims = dataclasses.replace(
        tiny.dims,
        hidden=128 * chance.randint(2, 12),
        latent=128 * chance.randint(2, 10),
        experts=128 * chance.randint(1, 4),
        shared_intermediate=64 * degrees[-1] * chance.randint(1, 6),
        norm_eps=chance.choice((1e-6, 1e-5, 1e-3)),
        activation=NamedFunction("situ", (chance.choice((1.5, 4.0, 8.0)), chance.choice((2.0, 25.0)))),
    )
    sm_counts = tuple(sorted(chance.sample((2, 5, 9, 16, 24, 40, 78, 132), 2)))
    rules = hopper(tiny)
    return dataclasses.replace(
        tiny,
        name=f"random_{seed}",
        dims=dims,
        max_partials=chance.randint(1, 8),
        targets=(Target("sm_90a", degrees, sm_counts),),
        hopper=dataclasses.replace(rules, decode=_draw_decode(chance, rules.decode)),
    )


def _draw_decode(chance: random.Random, rules: DecodeRules) -> DecodeRules:
    wider = chance.choice(((), (192,), (160, 192), (192, 256), (160, 320, 384)))
    n_pads = (*chance.choice(((8, 16, 32, 64, 128), (8, 32, 128), (16, 64, 128), (128,))), *wider)
    return dataclasses.replace(
        rules,
        n_pads=n_pads,
        max_cta_tokens=max(tokens for tokens in n_pads if tokens <= 192),
        max_stages=chance.randint(3, 12),
        overlap_min_sm_percent=chance.choice((0, 75)),
        overlap_ahead_n_pad=chance.choice((None, 8, 128)),
        split_finalize_n_pad=chance.choice((None, 16, 32, 128)),
        landing_alias=chance.choice((None, LandingAlias(128, 2), LandingAlias(128, 8))),
        front=FrontRules(
            depth2_min_stages_single=chance.randint(1, 8),
            depth2_min_stages_pair=chance.randint(1, 8),
            weights_ahead=chance.randint(0, 4),
            narrow=chance.choice((None, NarrowTiles(64, 32), NarrowTiles(96, 128))),
            split_tokens=chance.choice((None, FrontSplit(32, 0), FrontSplit(128, 70))),
        ),
        tail=_draw_tail(chance, rules.tail),
    )


def _draw_tail(chance: random.Random, rules: TailRules) -> TailRules:
    staggered = chance.choice((None, StaggeredFill(chance.choice((8, 16, 32)), chance.randint(1, 3))))
    staged = StagedRows(chance.randint(1, 32), chance.randint(1, 8), staggered)
    split = TailSplit(chance.choice((16, 64, 128)), chance.choice((4, 64)), chance.choice((None, 64, 128)))
    return dataclasses.replace(
        rules,
        short_down_units=chance.randint(0, 16),
        resident_tokens_long=chance.randint(0, 32),
        resident_tokens_short=chance.randint(0, 32),
        resident_min_stages=chance.randint(1, 8),
        weights_ahead=chance.randint(1, 3),
        depth2_min_stages=chance.choice((None, 2, 5)),
        staged=chance.choice((None, staged, staged)),
        small=chance.choice((None, SmallTile(8, 2))),
        split_tokens=chance.choice((None, split, split)),
        short_ring=chance.choice((None, ShortRing(7, 12, 6))),
    )


def _can_be_planned(model: Model) -> bool:
    try:
        for target in model.targets:
            for tp in target.tp_degrees:
                for sm_count in target.sm_counts:
                    device = DeviceFacts.nominal(target.arch, sm_count)
                    for tokens in range(1, hopper(model).decode.max_tokens + 1):
                        plan_route(model, stage="front", tp=tp, tokens=tokens, partials=1, device=device)
                        for partials in {1, model.max_partials}:
                            plan_route(model, stage="tail", tp=tp, tokens=tokens, partials=partials, device=device)
    except PlanError:
        return False
    return True
