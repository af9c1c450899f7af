"""Strategies that the fuzz tests share: values that do not belong, and valid things with a part of them replaced.

`CAKEGEN_FUZZ_EXAMPLES` sets how many examples a test draws (30 by default, always the same ones).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

_DEFAULT_EXAMPLES = 30
EXAMPLES = int(os.environ.get("CAKEGEN_FUZZ_EXAMPLES", _DEFAULT_EXAMPLES))

fuzzed = settings(
    max_examples=EXAMPLES,
    derandomize=EXAMPLES == _DEFAULT_EXAMPLES,
    # a failing example is small as it is, and to shrink it can take minutes
    phases=(Phase.explicit, Phase.generate),
    # an example is judged by what becomes of it; one that hangs is ended by pytest-timeout
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)

odd_ints = st.sampled_from((-(2**63), -1, 0, 1, 2, 3, 7, 63, 64, 65, 128, 2**20, 2**31 - 1, 2**31, 2**63, 10**30))
odd_floats = st.sampled_from((0.0, -0.0, -1.0, 1e-320, 1e308, float("inf"), float("nan")))
odd_texts = st.one_of(
    st.sampled_from(("", " ", "../..", "/etc/passwd", "sm_90a", "sm_999z", "x" * 5000, "\x00", "ü", "${x}", "{%s}")),
    st.text(max_size=8),
)
odd_scalars = st.one_of(st.none(), st.booleans(), odd_ints, odd_floats, odd_texts)
odd_values = st.one_of(
    odd_scalars,
    st.lists(odd_scalars, max_size=3),
    st.dictionaries(st.text(max_size=4), odd_scalars, max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every part of nested dicts and lists, the whole left out."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield (*path, name)
        yield from places(part, (*path, name))


@st.composite
def damaged(draw: st.DrawFn, whole: Any, values: st.SearchStrategy[Any] = odd_values) -> Any:
    """Nested dicts and lists with one to three parts replaced, removed, or put in twice."""
    value = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(value))
        if not found:
            break
        *path, last = draw(st.sampled_from(found))
        parent = value
        for step in path:
            parent = parent[step]
        kind = draw(st.sampled_from(("replace", "replace", "replace", "remove", "repeat")))
        if kind == "replace":
            parent[last] = draw(values)
        elif kind == "remove":
            del parent[last]
        elif isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
    return value


@st.composite
def damaged_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """A text with a few bytes changed, a part cut out, doubled or cut off."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        if not content:
            break
        start = draw(st.integers(0, len(content) - 1))
        end = min(len(content), start + draw(st.sampled_from((1, 2, 8, 64, 4096))))
        kind = draw(st.sampled_from(("set", "flip", "cut", "double", "end", "insert")))
        if kind == "set":
            content[start:end] = bytes([draw(st.sampled_from((0, 1, 0x7F, 0x80, 0xFF)))]) * (end - start)
        elif kind == "flip":
            content[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del content[start:end]
        elif kind == "double":
            content[start:start] = content[start:end]
        elif kind == "end":
            del content[start:]
        else:
            content[start:start] = draw(st.binary(max_size=8))
    return bytes(content)
