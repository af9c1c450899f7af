"""Every hostile or unlucky situation is survived, and the page's figures are of those that there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from try_situations import BEGIN, END, PAGE, attempt, figures, kinds

KINDS = kinds()
EVERY = [(kind, name) for kind, found in KINDS.items() for name in found]


@pytest.mark.parametrize(("kind", "name"), EVERY, ids=[f"{kind}-{number}" for number, (kind, _) in enumerate(EVERY)])
def test_situation_is_survived(kind: str, name: str) -> None:
    assert attempt(KINDS[kind][name]) == "", name


def test_page_holds_the_figures_of_these_situations() -> None:
    """Run `python tests/try_situations.py --write` after a change of the situations."""
    _, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    counts = {kind: (len(found), len(found)) for kind, found in KINDS.items()}
    assert rest.partition(END)[0].strip() == "".join(figures(counts)).strip()


def test_failed_situation_is_told() -> None:
    def fails(folder: Path) -> None:
        assert not folder.is_dir(), "it is"

    def forgets(folder: Path) -> None:
        with pytest.raises(ValueError, match="never"):
            folder.exists()

    assert attempt(fails).startswith("AssertionError: it is")
    assert attempt(forgets).startswith("Failed: DID NOT RAISE")
