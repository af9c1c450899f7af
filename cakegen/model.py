"""Leaf module: the records that planner, emitter and runtime share. No torch, no pydantic, no I/O.

Everything here is a frozen dataclass of numbers and strings, so that a plan is a pure function of hashable values
and a registry can hold a model as a literal. Sizes in bytes end in `_bytes`; K is counted in chunks of `block_k`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

from cakegen.arch import architecture
from cakegen.errors import RegistryError
from cakegen.rules import DecodeRules, HopperPrefillRules, HopperTile, PrefillRules

R = TypeVar("R")


@dataclass(frozen=True)
class ModelDims:
    """Dimensions and constants of one latent mixture-of-experts block.

    front: `x [T, hidden]` -> logits `[T, experts]` fp32, latent `[T, latent]` bf16, shared_act
    `[T, shared_intermediate / TP]` bf16. tail: routed `[P, T, latent]` and shared_act -> out `[T, hidden]` bf16.
    """

    hidden: int
    latent: int
    experts: int
    shared_intermediate: int
    norm_eps: float
    situ_beta: float
    situ_linear_beta: float

    def i_local(self, tp: int) -> int:
        """Shared-expert columns of one rank."""
        return self.shared_intermediate // tp

    def latent_slice(self, tp: int) -> int:
        """Latent columns that one rank multiplies in the tail."""
        return self.latent // tp


@dataclass(frozen=True)
class Target:
    """One architecture that an export serves: its TP degrees and the SM counts of the parts to plan for."""

    arch: str
    tp_degrees: tuple[int, ...]
    sm_counts: tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """One kernel family of an export: which template writes it for one architecture family."""

    name: str
    arch_family: str
    template: str


@dataclass(frozen=True)
class Model:
    """All that planning needs: what the registry's `MODEL` literal holds."""

    name: str
    dims: ModelDims
    max_tokens: int
    max_partials: int
    targets: tuple[Target, ...]
    families: tuple[Family, ...]
    decode: DecodeRules
    decode_sm90: DecodeRules
    prefill: PrefillRules
    prefill_sm90: HopperPrefillRules

    def target(self, arch: str) -> Target | None:
        """The target for an architecture, or None where the export does not serve it."""
        return next((t for t in self.targets if t.arch == arch), None)

    def for_family(self, arch_family: str) -> Model:
        """This model with the decode rules of one architecture family in `decode`."""
        if arch_family != "sm90" or self.decode == self.decode_sm90:
            return self
        return dataclasses.replace(self, decode=self.decode_sm90)

    def preferring(self, tile: HopperTile) -> Model:
        """This model with costs at which Hopper's prefill takes one of its tiles, whatever the others would save."""
        return dataclasses.replace(self, prefill_sm90=self.prefill_sm90.preferring(tile))

    def template_for(self, family: str, arch_family: str) -> str | None:
        """The template of a kernel family, or None where the export declares none."""
        found = (f.template for f in self.families if (f.name, f.arch_family) == (family, arch_family))
        return next(found, None)


@dataclass(frozen=True)
class DeviceFacts:
    """What a plan may depend on of a device.

    Parameters
    ----------
    arch
        Architecture name (`sm_90a`).
    sm_count
        Streaming multiprocessors that a launch may use.
    resident_pairs
        Two-CTA clusters that can be resident at once with one CTA an SM: the driver's occupancy where there is a
        device, else `sm_count // 2`.
    max_dynamic_smem_bytes
        Dynamic shared memory of one CTA.
    """

    arch: str
    sm_count: int
    resident_pairs: int
    max_dynamic_smem_bytes: int

    @staticmethod
    def nominal(arch: str, sm_count: int) -> DeviceFacts:
        """Facts of a device that is not at hand: every two SMs can hold a pair."""
        return DeviceFacts(arch, sm_count, sm_count // 2, architecture(arch).max_dynamic_smem_bytes)


def to_literal(record: Any) -> Any:
    """A record as nested dicts, lists, numbers and strings: what a registry can hold as a literal."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_literal(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, tuple):
        return [to_literal(item) for item in record]
    return record


def from_literal(cls: type[R], literal: Any) -> R:
    """The inverse of `to_literal`.

    Raises
    ------
    RegistryError
        A field is missing, unknown, or of the wrong type.
    """
    return typing.cast(R, _convert(cls, literal, cls.__name__))


def _convert(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        if not isinstance(value, dict) or set(value) != set(hints):
            got = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise RegistryError(f"{where}: needs exactly the fields {sorted(hints)}; got {got}")
        return kind(**{name: _convert(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})
    if typing.get_origin(kind) is tuple:
        return _convert_tuple(typing.get_args(kind), value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and type(value) is not kind:
        raise RegistryError(f"{where}: needs {kind.__name__}; got {value!r}")
    return value


def _convert_tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    """`tuple[X, ...]`, or `tuple[X, Y]` of exactly as many items."""
    if not isinstance(value, (list, tuple)):
        raise RegistryError(f"{where}: needs a list; got {type(value).__name__}")
    items = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
    if len(value) != len(items):
        raise RegistryError(f"{where}: needs {len(items)} items; got {len(value)}")
    return tuple(_convert(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(items, value, strict=True)))


@functools.cache
def _hints(record: type) -> dict[str, Any]:
    return typing.get_type_hints(record)
