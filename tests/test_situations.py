"""Every hostile or unlucky situation is survived, and the page's figures are of those that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.try_situations import BEGIN, END, PAGE, TESTS, attempt, attempt_tests, figures, kinds

KINDS = kinds()
ROWS = re.compile(r"^\| ([\w ]+) \| (\d+) \| (\d+) \|$", re.MULTILINE)
EVERY = [(kind, name) for kind, found in KINDS.items() for name in found]


@pytest.mark.parametrize(("kind", "name"), EVERY, ids=[f"{kind}-{number}" for number, (kind, _) in enumerate(EVERY)])
def test_situation_is_survived(kind: str, name: str) -> None:
    assert attempt(KINDS[kind][name]) == "", name


def test_page_holds_the_figures_of_these_situations() -> None:
    """Run `python tests/support/try_situations.py --write` after a change of the situations."""
    _, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    written = rest.partition(END)[0]
    counts = {kind: (len(found), len(found)) for kind, found in KINDS.items()}
    # those that tests try run with the tests, and are counted by the script
    counts |= {kind: (int(tried), int(survived)) for kind, tried, survived in ROWS.findall(written) if kind in TESTS}
    assert list(counts) == [*KINDS, *TESTS]
    assert all(tried == survived > 0 for tried, survived in counts.values())
    assert written.strip() == "".join(figures(counts)).strip()


def test_failed_situation_is_told() -> None:
    def fails(folder: Path) -> None:
        assert not folder.is_dir(), "it is"

    def forgets(folder: Path) -> None:
        with pytest.raises(ValueError, match="never"):
            folder.exists()

    assert attempt(fails).startswith("AssertionError: it is")
    assert attempt(forgets).startswith("Failed: DID NOT RAISE")


def test_cases_of_tests_are_counted_as_they_end(tmp_path: Path) -> None:
    file = tmp_path / "test_three.py"
    file.write_text("import pytest\n@pytest.mark.parametrize('x', [0, 1, 2])\ndef test_it(x):\n    assert x\n")
    assert attempt_tests([str(file)]) == (3, 2)
