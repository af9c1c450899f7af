"""The headers that all exports share, each rendered from one template and nothing else. Pure: writes nothing.

A text names such a header by its template, `#include "device/tma.cuh"`, so that templates compile as they stand with
`-I templates`; the header is then part of the tree, and its file's name replaces the template's. That is the path, so
that no two templates can mean one file: `cake_device_tma.cuh`. What a template needs beside is given with the name and
spelled in the file's: `n = 96` makes `cake_device_wgmma_mma_n96.cuh`. No export, program or key can change its text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import jinja2

from cakegen.emit.environment import render_template
from cakegen.emit.seal import included_files, render_sealed, render_sealed_json
from cakegen.errors import EmitError
from cakegen.registry import SHARED_SCHEMA, file_digest, header_closure

_TEMPLATE = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)*\.cuh")
_INCLUDE = re.compile(r'^#include "([a-z0-9_]+/[a-z0-9_/]+\.cuh)"$', re.MULTILINE)


class HeaderPool:
    """The shared headers that some texts name, and those that these name in turn.

    Parameters
    ----------
    environment
        Of the templates.
    """

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment
        self._named: dict[str, tuple[str, dict[str, int]]] = {}

    def header(self, template: str, **values: int) -> str:
        """File name of a header, which is then one of this pool.

        Parameters
        ----------
        template
            Path below `templates/`.
        values
            What the header's template may name beside.

        Raises
        ------
        EmitError
            The path is none of a header's template, or its file's name is that of another header.
        """
        if not _TEMPLATE.fullmatch(template):
            raise EmitError(f"{template!r} is no template of a header; name a .cuh below templates/ in small letters")
        stem = PurePosixPath(template).with_suffix("").as_posix().replace("/", "_")
        name = f"cake_{stem}{''.join(f'_{key}{value}' for key, value in values.items())}.cuh"
        if self._named.setdefault(name, (template, values)) != (template, values):
            raise EmitError(
                f"{template} and {self._named[name][0]} would both be written to {name}; rename one of them"
            )
        return name

    def render(self, template: str, context: Mapping[str, Any]) -> str:
        """A template as text that includes headers of this pool by their files' names.

        Raises
        ------
        EmitError
            The template is wrong, or includes what is no template of a header.
        """
        text = render_template(self._environment, template, context)
        return _INCLUDE.sub(lambda found: f'#include "{self.header(found[1])}"', text)

    def texts(self) -> dict[str, str]:
        """All headers that were named so far, and what they include, by file name, sealed.

        Raises
        ------
        EmitError
            A template is wrong.
        """
        found: dict[str, str] = {}
        while missing := [name for name in self._named if name not in found]:
            for name in missing:
                found[name] = self._render(name)
        return found

    def _render(self, name: str) -> str:
        template, values = self._named[name]
        return seal_header(name, f"From templates/{template}.", self.render(template, values))


def seal_header(name: str, summary: str, body: str) -> str:
    """A shared header's whole text."""
    return render_sealed(name, None, summary, body)


def included_closure(source: str, texts: Mapping[str, str]) -> tuple[str, ...]:
    """Shared headers that a source includes, directly or not, in the order of inclusion.

    Raises
    ------
    EmitError
        It includes what is no shared header.
    """

    def includes_of(name: str) -> tuple[str, ...]:
        if name not in texts:
            raise EmitError(f"{source}: includes {name!r}, which the export does not write; name it with header(...)")
        return _includes(texts[name])

    return header_closure(_includes(texts[source]), includes_of)


@functools.lru_cache(maxsize=256)
def _includes(text: str) -> tuple[str, ...]:
    return tuple(included_files(text))


def render_shared_table(headers: Mapping[str, str]) -> str:
    """The table of the shared folder: digest and includes of every header, sealed.

    Parameters
    ----------
    headers
        Sealed texts by file name.
    """
    entries: dict[str, Any] = {
        name: {"sha256": file_digest(text), "includes": list(_includes(text))} for name, text in sorted(headers.items())
    }
    values = {"schema": SHARED_SCHEMA, "headers": entries}
    summary = f"Digests of {len(entries)} headers."
    return render_sealed_json(None, summary, "cakegen export", values)
