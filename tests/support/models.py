"""The models that tests plan, render and run: those of the committed registries, and changes of them.

A registry's literal needs neither TOML nor pydantic, and a test of the spec holds both to the export files.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from cakegen.model import Model
from cakegen.plan import family_of
from cakegen.registry import load_registry
from cakegen.rules import BlackwellRules, HopperRules


@functools.cache
def kimi_k3_model() -> Model:
    """The product's model, at every TP degree on each architecture."""
    return load_registry("kimi_k3_latent_moe").model


@functools.cache
def tiny_model() -> Model:
    """A small model that reaches the forms of the large one at a few SM counts."""
    return load_registry("tiny_latent_moe").model


def changed(record: Any, **values: Any) -> Any:
    """A record with other values of fields, which may lie in records within it: `hopper__decode__max_stages=1`."""
    inner: dict[str, dict[str, Any]] = {}
    outer = {}
    for path, value in values.items():
        head, below, rest = path.partition("__")
        if below:
            inner.setdefault(head, {})[rest] = value
        else:
            outer[head] = value
    nested = {head: changed(getattr(record, head), **rest) for head, rest in inner.items()}
    return dataclasses.replace(record, **outer, **nested)


def hopper(model: Model) -> HopperRules:
    """A model's rules for Hopper."""
    assert model.hopper is not None
    return model.hopper


def blackwell(model: Model) -> BlackwellRules:
    """A model's rules for Blackwell."""
    assert model.blackwell is not None
    return model.blackwell


def of_family(model: Model, arch: str) -> Model:
    """A model with the targets and rules of one architecture's family alone."""
    family = family_of(arch)
    targets = tuple(target for target in model.targets if family_of(target.arch) is family)
    others = {name: None for name in ("hopper", "blackwell") if name != family.rules_name}
    return dataclasses.replace(model, targets=targets, **others)


def with_tile(model: Model, block_n: int) -> Model:
    """A model whose Hopper prefill plans take tiles of one width; its tree holds the programs of every width."""
    (tile,) = (tile for tile in hopper(model).prefill.tiles if tile.block_n == block_n)
    return model.preferring(tile)


def one_tile_models(model: Model) -> tuple[Model, ...]:
    """A model with each of its Hopper prefill tiles in turn."""
    return tuple(with_tile(model, tile.block_n) for tile in hopper(model).prefill.tiles)


def tiny_quarters_model(block_n: int) -> Model:
    """The tiny model with one tile whose 8 K iterations may be cut in quarters: segments that end where tiles do."""
    return changed(with_tile(tiny_model(), block_n), hopper__prefill__cut__min_ipc=2)


def tiny_ragged_model() -> Model:
    """The tiny model with a latent width whose slices end inside a K chunk while a pair can still split them.

    640 / TP 4 = 160 columns are 3 chunks, the last of 32; the tiny model's own 512 end raggedly only at TP 16, where
    one chunk is left and no pair splits it. 640 / 8 = 80 vectors also leave the norm's 32 lanes unequal shares.
    """
    tiny = tiny_model()
    return dataclasses.replace(tiny, name="tiny_ragged_moe", dims=dataclasses.replace(tiny.dims, latent=640))


def short_decode(model: Model) -> Model:
    """The model with prefill from 193 tokens on, also where two CTAs could split the tokens of a decode tile."""
    n_pads = tuple(n_pad for n_pad in hopper(model).decode.n_pads if n_pad <= 192)
    return changed(model, hopper__decode__n_pads=n_pads)
