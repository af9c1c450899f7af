"""The one way in which commands choose programs: keys or patterns, or the requests that reach them. Imports click."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from cakegen.cli.names import ARCH, EXPORT, KEY, nearest

if TYPE_CHECKING:
    from cakegen.registry import Registry

Decorated = Callable[..., Any]

_EXPORT = click.option(
    "--export",
    "export",
    default="kimi_k3_latent_moe",
    show_default=True,
    is_eager=True,
    type=EXPORT,
    help="Export, or a tree's folder.",
)
_KEYS = click.argument("keys", nargs=-1, metavar="[KEY]...", type=KEY)
_ARCHES = click.option(
    "--arch", "arches", multiple=True, type=ARCH, help="Only this target, e.g. sm_90a; may be repeated."
)
_REQUEST = (
    click.option("--stage", type=click.Choice(["front", "tail"]), help="Only programs that this half launches."),
    click.option("--tp", type=int, help="Only programs of this tensor-parallel degree."),
    click.option("--tokens", metavar="T|FIRST:LAST", help="Only programs of this token count, or range of them."),
)


@dataclass(frozen=True)
class Selection:
    """What a command line chooses: keys that match a pattern, and that one of the described requests launches.

    Parameters
    ----------
    patterns
        Keys, names of programs, or patterns of either; empty: all.
    stage, tp, tokens
        Of requests; None: any.
    arches
        Targets; empty: all.
    """

    patterns: tuple[str, ...] = ()
    stage: str | None = None
    tp: int | None = None
    tokens: str | None = None
    arches: tuple[str, ...] = ()

    @property
    def of_requests(self) -> bool:
        """Whether requests are described."""
        return any(each is not None for each in (self.stage, self.tp, self.tokens))

    @property
    def words(self) -> tuple[str, ...]:
        """The options that describe requests and targets, as a command line gives them."""
        given = (("stage", self.stage), ("tp", self.tp), ("tokens", self.tokens), *(("arch", a) for a in self.arches))
        return tuple(f"--{name} {value}" for name, value in given if value is not None)


def selected_by(command: Decorated) -> Decorated:
    """Give a command KEY, --stage, --tp, --tokens, --arch and --export; `take_selection` makes one of their values."""
    for option in (_EXPORT, _ARCHES, *reversed(_REQUEST), _KEYS):
        command = option(command)
    return command


def request_options(command: Decorated) -> Decorated:
    """Give a command --stage, --tp and --tokens, where it has a KEY and an --arch of its own."""
    for option in reversed(_REQUEST):
        command = option(command)
    return command


def take_selection(values: Mapping[str, Any]) -> Selection:
    """The selection of a command's parameters, by their names."""
    return Selection(
        tuple(values["keys"]), values["stage"], values["tp"], values["tokens"], tuple(values.get("arches", ()))
    )


def select_keys(registry: Registry, selection: Selection) -> list[str]:
    """Keys that a selection chooses, in the registry's order.

    Raises
    ------
    click.UsageError
        A pattern, a target or the requests match nothing.
    PlanError
        A target is not known, or a request has no plan.
    """
    keys = matching_keys(registry, selection.patterns)
    if selection.of_requests:
        requested = _requested(registry, selection)
        keys = [key for key in keys if key in requested]
        if not keys:
            degrees = sorted({tp for target in registry.model.targets for tp in target.tp_degrees})
            raise click.UsageError(
                f"{registry.export}: no selected program is launched for {' '.join(selection.words)}; it is exported"
                f" for TP {', '.join(map(str, degrees))} and 1 to {registry.model.max_tokens} tokens"
            )
    return _of_arches(registry, keys, selection.arches)


def matching_keys(registry: Registry, patterns: Sequence[str]) -> list[str]:
    """Keys that match a pattern themselves or whose program does; without a pattern all.

    Raises
    ------
    click.UsageError
        A pattern matches nothing; the message names what is like it.
    """
    from fnmatch import fnmatchcase

    from cakegen.renamed_keys import renamed_keys

    today = [renamed_keys().get(pattern, pattern) for pattern in patterns]
    for pattern in today:
        if not any(fnmatchcase(key, pattern) or fnmatchcase(name, pattern) for key, name in registry.kernels.items()):
            near = nearest(pattern, [*registry.kernels, *registry.programs])
            raise click.UsageError(
                f"{registry.export}: no key or program matches {pattern!r}{near}; see `cakegen list`"
            )
    return [
        key
        for key, name in registry.kernels.items()
        if not today or any(fnmatchcase(key, pattern) or fnmatchcase(name, pattern) for pattern in today)
    ]


def _requested(registry: Registry, selection: Selection) -> set[str]:
    from cakegen.cli.plan import parse_tokens
    from cakegen.emit.reach import requested_keys

    tokens = None if selection.tokens is None else parse_tokens(selection.tokens)
    return requested_keys(
        registry.model, stage=selection.stage, tp=selection.tp, tokens=tokens, arches=selection.arches
    )


def _of_arches(registry: Registry, keys: Sequence[str], arches: Sequence[str]) -> list[str]:
    """Keys whose program is written for one of the targets."""
    from cakegen.arch import architecture

    written = [arch for key in keys for arch in registry.program(key).arches]
    for arch in arches:
        architecture(arch)
    unused = [arch for arch in arches if arch not in written]
    if unused or not keys:
        raise click.UsageError(
            f"{registry.export}: no selected program is written for {', '.join(unused) or 'any target'}; "
            f"there is: {', '.join(sorted(set(written))) or 'none'}"
        )
    return [key for key in keys if not arches or set(arches) & set(registry.program(key).arches)]
