"""Leaf module: one thing that was looked at. Imports nothing of cakegen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OK, ABSENT, PROBLEM = "ok", "absent", "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Parameters
    ----------
    topic
        What was looked at.
    state
        `ok`; `absent`: not here, which limits what can be done; `problem`: here, and wrong.
    text
        What was found, for a person.
    facts
        The same for a program: JSON values by name.
    """

    topic: str
    state: str
    text: str
    facts: Mapping[str, object] = field(default_factory=dict)
