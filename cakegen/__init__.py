"""cakegen: declarative specs to GPU kernels, and a runtime that launches them."""

from __future__ import annotations

__version__: str


def __getattr__(name: str) -> str:
    """`__version__`, which names the commit, and so asks git in a checkout: when it is wanted, not at every import."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cakegen.version import full_version

    found = globals()[name] = full_version()
    return found
