"""Device files: each figure with its source; what is wrong in one is refused by its name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from cakegen.arch import ARCHITECTURES
from cakegen.errors import SpecError
from cakegen.timing.figures import DEVICES, GRADES, UNITS, device_names, load_device


@pytest.mark.parametrize("name", device_names())
def test_every_figure_of_a_device_has_a_source_and_a_range(name: str) -> None:
    device = load_device(name)
    assert device.arch in ARCHITECTURES
    for figure in device.figures().values():
        assert figure.low <= figure.value <= figure.high
        assert figure.grade in GRADES
        # what was only assumed says within what, and what was taken from others says from whom
        assert figure.grade != "assumed" or figure.low < figure.high
        assert len(figure.source) > 10


def test_a_path_is_read_and_a_name_is_none(tmp_path: Path) -> None:
    copy = tmp_path / "mine.toml"
    copy.write_text((DEVICES / "h200.toml").read_text())
    assert load_device(str(copy)) == load_device("h200")


def edited(tmp_path: Path, old: str, new: str) -> str:
    text = (DEVICES / "h200.toml").read_text()
    assert old in text
    file = tmp_path / "edited.toml"
    file.write_text(text.replace(old, new, 1))
    return str(file)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sm_count = 132", "sm_count = true", "sm_count must be of type int; got True"),
        ("[launch_gap]", "[launch_gape]", "missing: launch_gap; unknown: launch_gape"),
        ('unit = "cycles/ns"', 'unit = "GHz"', "clock: is in cycles/ns; got the unit 'GHz'"),
        ('grade = "measured"', 'grade = "sure"', "clock: grade must be one of measured, derived, published, assumed"),
        ("value = 1.98", "value = 3.5", "low must not be above value, nor value above high; got 1.83, 3.5, 1.98"),
        ("value = 1.98", "value = -1", "must be numbers above 0 and below 1e9"),
        ("value = 1.98", "valve = 1.98", "clock: needs value, unit, grade and source, and may have low and high"),
        ("[launch_gap]", "[launch_gap", "edited.toml: not a TOML file: "),
    ],
)
def test_a_damaged_device_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_device(edited(tmp_path, old, new))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'name = "\xff"', "not a TOML file: 'utf-8' codec can't decode"),
        (b"x = " + b"9" * 5000, "not a TOML file: Exceeds the limit"),
        (b"x = " + b"[" * 10_000, "not a TOML file: "),
        (b".".join([b"x"] * 100) + b" = 1", "tables within tables, more than 32 levels of them"),
        (b"#" * (1 << 21), "a file of at most 1048576 is read"),
    ],
    ids=["bytes", "digits", "depth", "levels", "size"],
)
def test_a_text_that_no_device_has_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load_device(str(file))
    assert message in str(caught.value)


def test_every_figure_is_used() -> None:
    folder = DEVICES.parent
    texts = "".join(file.read_text() for file in folder.glob("*.py") if file.name != "figures.py")
    assert [name for name in UNITS if f".{name}." not in texts] == []


def test_an_unknown_device_is_refused_with_those_there_are() -> None:
    with pytest.raises(SpecError, match=r"b100: no such device file .*; there are .*h200"):
        load_device("b100")


def test_units_are_those_of_the_file() -> None:
    found = tomllib.loads((DEVICES / "h200.toml").read_text())
    assert {name: found[name]["unit"] for name in UNITS} == UNITS
