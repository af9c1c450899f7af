"""The environment is installed by hashes: every requirement is pinned, nothing else is asked for, no host is named."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("lock.txt", "lock-docs.txt")
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==([^ ;]+)(?: ; ([^\\]+))? \\$")
PYTHONS = ("3.11", "3.12", "3.13")


def blocks(name: str) -> list[list[str]]:
    """Each requirement of a lock with its lines of hashes."""
    lines = [line for line in (ROOT / "tools" / name).read_text("utf-8").splitlines() if not line.startswith("#")]
    found: list[list[str]] = []
    for line in lines:
        if line.startswith(" "):
            found[-1].append(line)
        else:
            found.append([line])
    return found


def pins(name: str, python: str) -> dict[str, str]:
    """Versions of a lock on Linux with CPython of a version."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    environment |= {"os_name": "posix", "platform_python_implementation": "CPython", "implementation_name": "cpython"}
    found = {}
    for head, *_ in blocks(name):
        pin = PIN.match(head)
        assert pin, head
        if not pin[3] or Marker(pin[3].strip()).evaluate(environment):
            assert canonicalize_name(pin[1]) not in found, head
            found[canonicalize_name(pin[1])] = pin[2]
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_line_of_a_lock_is_a_pin_with_hashes(name: str) -> None:
    assert len(blocks(name)) > 20
    for head, *hashes in blocks(name):
        assert PIN.match(head), head
        assert hashes, head
        for line in hashes:
            assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?", line), line


@pytest.mark.parametrize("name", LOCKS)
def test_no_lock_names_a_host_or_a_file(name: str) -> None:
    assert not re.search(r"://|@ |--index|--find-links|--extra", (ROOT / "tools" / name).read_text("utf-8"))


@pytest.mark.parametrize("python", PYTHONS)
def test_lock_holds_what_the_project_asks_for_and_not_torch(python: str) -> None:
    needed, pages = runpy.run_path(str(ROOT / "tools" / "lock.py"))["requirements"]()
    for wanted, locks in ((needed, LOCKS[:1]), (pages, LOCKS[1:])):
        held = pins(locks[0], python)
        for text in wanted:
            requirement = Requirement(text)
            assert requirement.specifier.contains(held[canonicalize_name(requirement.name)]), text
    assert "hatchling" in pins("lock.txt", python), "the build back end is part of it"
    for name in LOCKS:
        assert "torch" not in pins(name, python)


@pytest.mark.parametrize("python", PYTHONS)
def test_both_locks_agree_on_what_both_hold(python: str) -> None:
    base, pages = (pins(name, python) for name in LOCKS)
    shared = base.keys() & pages.keys()
    assert shared
    assert {name: base[name] for name in shared} == {name: pages[name] for name in shared}


def test_set_up_installs_by_hash_and_asks_an_index_for_torch_alone() -> None:
    """Each call of pip: the lock by its hashes, torch, and the checkout without an index."""
    script = (ROOT / "tools" / "setup.sh").read_text("utf-8")
    calls = re.findall(r'^ *"\$\{pip\[@\]\}" (.*)$', script, re.MULTILINE)
    assert calls == [
        '--require-hashes --requirement "$root/tools/lock.txt"',
        '"$torch"',
        '--no-deps --no-build-isolation --editable "$root"',
    ]
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("\\\n", " ")
    installs = [line for line in makefile.splitlines() if "pip install" in line]
    assert len(installs) == 1
    assert "--require-hashes --requirement tools/lock-docs.txt" in re.sub(r"\s+", " ", installs[0])
    assert "--no-isolation" in makefile, "a wheel is built with the back end of the environment"
