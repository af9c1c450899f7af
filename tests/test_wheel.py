"""The wheel, installed where there is no checkout: it carries its data, works, and writes nothing into itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cakegen.compile import load_nvrtc
from cakegen.version import full_version

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]

ROOT = Path(__file__).resolve().parents[1]


def _run(command: Sequence[str | Path], folder: Path, **variables: str) -> str:
    """Run outside the checkout, with nothing of this process's Python paths; returns stdout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CAKEGEN"))}
    return _run_in(environment | {"PYTHONDONTWRITEBYTECODE": "1"} | variables, command, folder).stdout


def _run_in(
    environment: dict[str, str], command: Sequence[str | Path], folder: Path
) -> subprocess.CompletedProcess[str]:
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, which so holds all that it needs."""
    pytest.importorskip("build", reason="needs the package build")
    pytest.importorskip("hatchling", reason="needs the package hatchling")
    folder = tmp_path_factory.mktemp("dist")
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], folder)
    (built,) = folder.glob("cakegen-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel alone; its dependencies are those of this one, by a path file."""
    folder = tmp_path_factory.mktemp("environment")
    _run([sys.executable, "-m", "venv", "--without-pip", folder], folder)
    python = folder / "bin" / "python"
    install = ["-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    _run([sys.executable, *install, wheel], folder)  # with bytecode, as pip leaves it
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_installed_wheel_passes_its_own_check_and_names_its_commit(environment: Path, tmp_path: Path) -> None:
    assert list(environment.rglob("_data/generated/*/__pycache__/*.pyc")), "pip compiled the registries"
    checked = _run([environment / "bin/cakegen", "export", "tiny_latent_moe", "--check"], tmp_path)
    assert checked.count("0 changed") == 2
    version = _run([environment / "bin/python", "-m", "cakegen.cli.main", "--version"], tmp_path).strip()
    assert version == full_version()
    assert "cakegen emulate --cuda" in _run([environment / "bin/cakegen", "docs", "emulate-launch"], tmp_path)


def test_installed_wheel_without_torch_lists_plans_compiles_and_says_what_is_missing(
    environment: Path, tmp_path: Path
) -> None:
    python, key = environment / "bin/python", "tail_norm:e0@sm_90a"
    start = "import sys; sys.modules['torch'] = None; from cakegen.cli.main import main; main(sys.argv[1:])"
    settings = {"CAKEGEN_CACHE_DIR": str(tmp_path / "cache"), "CAKEGEN_NVRTC": str(load_nvrtc().path)}
    for words in (
        ("list", "--export", "tiny_latent_moe"),
        ("plan", "--stage", "front", "--tp", "8", "--tokens", "200"),
        ("compile", "--export", "tiny_latent_moe", key),
    ):
        _run([python, "-c", start, *words], tmp_path, **settings)
    refused = subprocess.run(
        [python, "-c", start, "emulate", key, "--export", "tiny_latent_moe"],
        cwd=tmp_path,
        env=_only(**settings),
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert "this needs the package torch, which is not installed" in refused.stderr


def _tree(export: str) -> Path:
    return ROOT / "generated" / export


def test_wheel_holds_every_template_export_and_generated_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("templates", "exports", "generated"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert files
        assert {f"cakegen/_data/{path.relative_to(ROOT)}" for path in files} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {"cakegen/review/page.html", "cakegen/py.typed"} <= names
    pages = {f"cakegen/_data/{page.relative_to(ROOT)}" for page in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 20
    assert pages <= names
    assert not [name for name in names if name.startswith(("tests/", "templates/", "generated/"))]


def test_installed_wheel_is_not_the_checkout(environment: Path) -> None:
    found = _run([environment / "bin/python", "-c", "import cakegen; print(cakegen.__file__)"], environment)
    assert Path(found.strip()).is_relative_to(environment)


def test_installed_wheel_lists_plans_and_compiles_and_leaves_itself_alone(environment: Path, tmp_path: Path) -> None:
    cakegen = environment / "bin" / "cakegen"
    before = {path: path.stat().st_mtime_ns for path in environment.rglob("*")}
    listed = _run([cakegen, "list", "--export", "tiny_latent_moe"], tmp_path)
    key = next(word for word in listed.split() if word.startswith("decode:") and word.endswith("@sm_90a"))
    arguments = ["compile", "--export", "tiny_latent_moe", key]
    # NVRTC is looked for in an environment's own folder, and this one's is beside the path file's
    settings = {"CAKEGEN_CACHE_DIR": str(tmp_path / "cache"), "CAKEGEN_NVRTC": str(load_nvrtc().path)}
    compiled = _run([cakegen, *arguments], tmp_path, **settings)
    assert "1 compiled, 0 from the cache, 0 failed" in compiled
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) == 1
    planned = _run([cakegen, "plan", "--stage", "tail", "--tp", "8", "--tokens", "16"], tmp_path)
    assert "decode:tail_tp8_n16_" in planned
    assert {path: path.stat().st_mtime_ns for path in environment.rglob("*")} == before


def test_installed_wheel_exports_the_committed_tree_to_a_folder_of_the_user(environment: Path, tmp_path: Path) -> None:
    _run([environment / "bin/cakegen", "export", "tiny_latent_moe", "--dest", tmp_path], tmp_path)
    committed = {p.relative_to(_tree("tiny_latent_moe")): p.read_bytes() for p in _tree("tiny_latent_moe").rglob("*.*")}
    written = tmp_path / "tiny_latent_moe"
    assert {p.relative_to(written): p.read_bytes() for p in written.rglob("*.*")} == committed


# What lets root write where the mode of a folder forbids it.
_PRIVILEGES = "-dac_override,-dac_read_search"


@pytest.fixture
def sealed(environment: Path) -> Iterator[tuple[Path, list[str]]]:
    """The environment with every folder and file read-only, and what to run before a command to be bound by that."""
    bound: list[str] = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv, since these tests run as root")
        bound = ["setpriv", f"--bounding-set={_PRIVILEGES}", f"--inh-caps={_PRIVILEGES}"]
    paths = [environment, *(path for path in environment.rglob("*") if not path.is_symlink())]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(modes[path] & ~0o222)
    try:
        yield environment, bound
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def _only(**variables: str) -> dict[str, str]:
    """An environment of nothing but the search path for programs."""
    return {"PATH": os.environ["PATH"]} | variables


def test_sealed_environment_can_not_be_written(sealed: tuple[Path, list[str]]) -> None:
    """Else the tests below would prove nothing."""
    environment, bound = sealed
    done = subprocess.run([*bound, "touch", str(environment / "mark")], capture_output=True, text=True)
    assert "Permission denied" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "--export", "tiny_latent_moe"),
        ("plan", "--stage", "front", "--tp", "8", "--tokens", "200"),
        ("show", "tail_norm:e0@sm_90a", "--export", "tiny_latent_moe"),
        ("compile", "tail_norm:e0@sm_90a", "--export", "tiny_latent_moe"),
        ("doctor", "--export", "tiny_latent_moe"),
        ("cache", "list"),
    ],
)
def test_read_only_wheel_works_without_a_home(
    sealed: tuple[Path, list[str]], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """No HOME, no XDG variable, no writable site-packages; the cache's folder is the one thing that is given."""
    environment, bound = sealed
    settings = _only(CAKEGEN_NVRTC=str(load_nvrtc().path), CAKEGEN_CACHE_DIR=str(tmp_path / "cache"))
    _run_in(settings, [*bound, environment / "bin" / "cakegen", *arguments], tmp_path)


def test_read_only_wheel_compiles_where_nothing_at_all_can_be_written(
    sealed: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """The default cache lies in a home that does not exist and can't be made: one warning, and the program."""
    environment, bound = sealed
    key = "tail_norm:e0@sm_90a"
    settings = _only(CAKEGEN_NVRTC=str(load_nvrtc().path), HOME="/proc/none")
    command = [*bound, environment / "bin" / "cakegen", "compile", key, "--export", "tiny_latent_moe"]
    done = _run_in(settings, command, environment)
    assert "1 of 1 programs: 1 compiled, 0 from the cache, 0 failed" in done.stdout
    assert done.stderr.count("CacheWarning") == 1
    assert "Set CAKEGEN_CACHE_DIR to a folder that can be written" in done.stderr


def test_read_only_wheel_makes_and_takes_a_bundle_the_latter_without_a_compiler(
    sealed: tuple[Path, list[str]], tmp_path: Path
) -> None:
    environment, bound = sealed
    cakegen, key = environment / "bin" / "cakegen", "tail_norm:e0@sm_90a"
    arguments = ["bundle", key, "--export", "tiny_latent_moe", "--out", tmp_path / "bundle"]
    settings = _only(CAKEGEN_NVRTC=str(load_nvrtc().path), CAKEGEN_CACHE_DIR=str(tmp_path / "cache"))
    _run_in(settings, [*bound, cakegen, *arguments], tmp_path)
    without = _only(CAKEGEN_NVRTC=str(tmp_path / "none.so"), CAKEGEN_CACHE_DIR=str(tmp_path / "none"))
    checked = _run_in(without, [*bound, cakegen, *arguments, "--check"], tmp_path)
    assert "1 programs of tiny_latent_moe, whole" in checked.stdout
    bundled = without | {"CAKEGEN_BUNDLE": str(tmp_path / "bundle")}
    told = json.loads(
        _run_in(bundled, [*bound, cakegen, "doctor", "--json", "--export", "tiny_latent_moe"], tmp_path).stdout
    )
    states = {finding["topic"]: finding["state"] for finding in told["findings"]}
    assert (states["nvrtc"], states["bundle"]) == ("absent", "absent"), "one program of many"
