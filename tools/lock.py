"""Writes the locks of the environment, with the hash of every file that an index may give: `python tools/lock.py`.

`tools/lock.txt` holds what `make setup` installs: what cakegen, its development tools and its build back end need, and
what torch needs of the common packages. `tools/lock-docs.txt` holds what `make docs` adds. Torch itself is in neither,
nor the CUDA libraries of its builds: which build is right depends on the machine (README.md), and a CPU build, a CUDA
build and a file on disk have different hashes.

Pins that are in a lock stay, unless `--upgrade` or `--upgrade-package NAME` is given. Needs uv, which resolves for
Python 3.11 to 3.13 at once; the index is uv's own setting and is not written.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK, DOCS_LOCK = ROOT / "tools" / "lock.txt", ROOT / "tools" / "lock-docs.txt"
TORCH = "torch"
TORCH_NEEDS = ("filelock", "fsspec", "networkx", "setuptools", "sympy", "typing-extensions")
# an editable installation of hatchling's asks for it
BACKEND_NEEDS = ("editables",)
HEAD = """\
# Written by `python tools/lock.py`; installed by {command} with --require-hashes.
# {what}
"""


def requirements() -> tuple[list[str], list[str]]:
    """What the environment of a checkout holds besides torch, and what the pages need, as pyproject.toml says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = project["project"]["optional-dependencies"]
    named = [
        *project["project"]["dependencies"],
        *extras["dev"],
        *extras["signing"],
        *project["build-system"]["requires"],
    ]
    own = [entry for entry in named if re.split(r"[^A-Za-z0-9_-]", entry)[0] != TORCH]
    return [*own, *TORCH_NEEDS, *BACKEND_NEEDS], list(extras["docs"])


def lock(entries: list[str], file: Path, head: str, options: list[str]) -> None:
    """Resolve some requirements, and write the file; uv keeps the pins that it holds already."""
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--output-file", str(file), *options, "-"]
    subprocess.run(command, input="\n".join(entries), text=True, check=True, stdout=subprocess.DEVNULL)
    file.write_text(head + file.read_text("utf-8"), encoding="utf-8")


def main() -> None:
    """Write both locks; the second has the versions of the first where both name a package."""
    needed, pages = requirements()
    options = sys.argv[1:]
    lock(needed, LOCK, HEAD.format(command="tools/setup.sh", what="Torch is not in it: see tools/lock.py."), options)
    constrained = [*options, "--constraint", str(LOCK)]
    lock(pages, DOCS_LOCK, HEAD.format(command="`make docs`", what="Versions are those of lock.txt."), constrained)


if __name__ == "__main__":
    main()
