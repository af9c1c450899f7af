"""Names that a command line takes: completed by a shell, and suggested where one is not known. Imports click.

cakegen is imported inside functions. What completes a word never fails: without a tree there is nothing to offer.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem


def nearest(name: str, known: Iterable[str]) -> str:
    """`; the nearest: …`, of at most three known names; empty where none is like it."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; the nearest: {', '.join(near)}" if near else ""


class KeyType(click.ParamType[str]):
    """A logical key, a program's name, or a pattern of either; keys of the line's --export are offered."""

    name = "key"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Keys that begin with what is typed."""
        from cakegen.errors import CakeError
        from cakegen.registry import load_registry

        try:
            keys = load_registry(ctx.params.get("export") or "kimi_k3_latent_moe").kernels
        except (CakeError, OSError):
            return []
        return [CompletionItem(key) for key in keys if key.startswith(incomplete)]


class ExportType(click.ParamType[str]):
    """The name of an export that is shipped, or a tree's folder."""

    name = "name"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Exports whose name begins with what is typed; a folder where it is written as a path."""
        from cakegen import paths

        if paths.is_path(incomplete):
            return [CompletionItem(incomplete, type="dir")]
        return [CompletionItem(name) for name in shipped_exports() if name.startswith(incomplete)]


class ArchType(click.ParamType[str]):
    """A target, such as sm_90a."""

    name = "arch"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Targets that begin with what is typed."""
        from cakegen.arch import ARCHITECTURES

        return [CompletionItem(name) for name in ARCHITECTURES if name.startswith(incomplete)]


def shipped_exports() -> list[str]:
    """Names of the trees that are shipped."""
    from cakegen import paths
    from cakegen.registry import REGISTRY_FILE

    return sorted(file.parent.name for file in paths.generated_root().glob(f"*/{REGISTRY_FILE}"))


KEY, EXPORT, ARCH = KeyType(), ExportType(), ArchType()
