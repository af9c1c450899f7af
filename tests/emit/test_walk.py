"""The walk over all plans, remembered on disk: the same keys, and a bad entry is none."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.models import changed, tiny_model

from cakegen import paths
from cakegen.cli.main import main
from cakegen.emit import reach
from cakegen.emit import walk as remembered
from cakegen.emit.reach import reached_keys
from cakegen.emit.walk import MOST_ENTRIES, remembered_keys
from cakegen.model import Model, Target


def small_model() -> Model:
    """Few programs, of both families, with tiles that only a preferring model takes."""
    targets = (Target("sm_90a", (8,), (6, 132)), Target("sm_100a", (8,), (10,)), Target("sm_103a", (8,), (10,)))
    return dataclasses.replace(tiny_model(), targets=targets)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Model]:
    """The models that were walked, in this test."""
    seen: list[Model] = []
    original = reach.walk.__wrapped__

    def walk(model: Model) -> object:
        seen.append(model)
        return original(model)

    monkeypatch.setattr(remembered, "walk", walk)
    return seen


def test_remembered_keys_are_those_of_a_walk(tmp_path: Path, walks: list[Model]) -> None:
    model = small_model()
    expected = reached_keys(model)
    assert remembered_keys(model, tmp_path / "walks") == expected
    assert remembered_keys(model, tmp_path / "walks") == expected
    assert walks == [model]
    assert {arch for key in expected for arch in key.arches} == {"sm_90a", "sm_100a", "sm_103a"}
    (entry,) = (tmp_path / "walks").iterdir()
    assert any(witness["tile"] is not None for witness in json.loads(entry.read_text()))


def test_another_model_or_other_sources_are_walked_anew(
    tmp_path: Path, walks: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    other = changed(model, hopper__decode__max_stages=11)
    for each in (model, other):
        remembered_keys(each, tmp_path)
    assert walks == [model, other]
    monkeypatch.setattr(remembered, "sources_digest", lambda: "another planner")
    remembered_keys(model, tmp_path)
    assert walks == [model, other, model]


def test_sources_are_those_of_planner_rules_and_reach() -> None:
    package = Path(remembered.__file__).parent.parent
    found = {file.relative_to(package).as_posix() for p in remembered._SOURCES for file in package.glob(p)}
    assert found > {"arch.py", "model.py", "plan/decode.py", "rules/hopper.py", "emit/reach.py"}


DAMAGE = {
    "no JSON": lambda text: text[:-5],
    "empty": lambda text: "",
    "no list": lambda text: "{}",
    "no key": lambda text: "[]",
    "another request": lambda text: json.dumps([each | {"tokens": 1} for each in json.loads(text)]),
    "request without a plan": lambda text: json.dumps([each | {"tp": 3} for each in json.loads(text)]),
    "a field too many": lambda text: json.dumps([each | {"extra": 1} for each in json.loads(text)]),
    "a tile that is none": lambda text: json.dumps([each | {"tile": 99} for each in json.loads(text)]),
    "out of order": lambda text: json.dumps(json.loads(text)[::-1]),
    "not UTF-8": lambda text: "\udcff",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_bad_entry_is_a_miss_and_is_written_again(tmp_path: Path, walks: list[Model], damage: str) -> None:
    model = small_model()
    expected = remembered_keys(model, tmp_path)
    (entry,) = tmp_path.iterdir()
    whole = entry.read_text()
    entry.write_text(DAMAGE[damage](whole), encoding="utf-8", errors="surrogateescape")
    assert remembered_keys(model, tmp_path) == expected
    assert len(walks) == 2
    assert entry.read_text() == whole
    assert list(tmp_path.iterdir()) == [entry]


def test_folder_that_can_not_be_written_costs_a_walk_and_no_more(tmp_path: Path, walks: list[Model]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    model = small_model()
    for _ in range(2):
        assert remembered_keys(model, file / "walks") == reached_keys(model)
    assert len(walks) == 2


def test_old_entries_go(tmp_path: Path, walks: list[Model]) -> None:
    for number in range(MOST_ENTRIES + 3):
        old = tmp_path / f"{number}.json"
        old.write_text("[]")
        os.utime(old, (number, number))
    remembered_keys(small_model(), tmp_path)
    kept = {file.name for file in tmp_path.iterdir()}
    assert len(kept) == MOST_ENTRIES
    assert {"0.json", "1.json", "2.json", "3.json"}.isdisjoint(kept)


PROCESS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_walk import small_model
from cakegen.emit.walk import remembered_keys
print(len(remembered_keys(small_model(), Path(sys.argv[1]))))
"""


def test_processes_that_meet_leave_one_whole_entry(tmp_path: Path) -> None:
    root = Path(paths.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(root / "tests")))}
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "walks"), str(Path(__file__).parent)]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counts = {process.communicate()[0] for process in processes}
    assert counts == {f"{len(reached_keys(small_model()))}\n"}
    assert len(list((tmp_path / "walks").iterdir())) == 1


def test_export_remembers_and_check_does_not_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that was changed without its digest would hide behind an entry; --check is what CI trusts."""
    monkeypatch.setenv("CAKEGEN_CACHE_DIR", str(tmp_path / "cache"))
    runner = CliRunner()
    assert runner.invoke(main, ["new", "mine", "--dest", str(tmp_path)]).exit_code == 0
    arguments = ["export", str(tmp_path / "mine" / "export.toml"), "--dest", str(tmp_path / "trees")]
    assert runner.invoke(main, arguments).exit_code == 0
    (entry,) = (tmp_path / "cache" / "walks").iterdir()
    few = json.loads(entry.read_text())[:3]
    entry.write_text(json.dumps(few))
    assert runner.invoke(main, [*arguments, "--check"]).exit_code == 0
    assert "changed" in runner.invoke(main, arguments).output
    assert runner.invoke(main, [*arguments, "--check"]).exit_code == 1
