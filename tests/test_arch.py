"""The table of architectures: what members of a family must share."""

from __future__ import annotations

import pytest

from cakegen.arch import ARCHITECTURES, Architecture, family_member


def limits(arch: Architecture) -> tuple[int, ...]:
    return arch.max_dynamic_smem_bytes, arch.smem_per_sm_bytes, arch.tensor_memory_cols


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_limits_are_those_of_the_whole_family(name: str) -> None:
    """One text serves all members of a family, and is laid out for one of them."""
    arch = ARCHITECTURES[name]
    first = family_member(arch.family)
    assert first.family == arch.family
    assert limits(arch) == limits(first)
