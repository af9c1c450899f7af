"""`cakegen export`, `list` and `show`, and the group that holds the commands."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cakegen import __version__, paths
from cakegen.cli import export
from cakegen.cli import main as cli
from cakegen.cli.main import main
from cakegen.compile import compile_cubin, request_for
from cakegen.errors import SealError
from cakegen.registry import SHARED_FILE, SHARED_FOLDER, load_registry

TINY = "tiny_latent_moe"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def copy_trees(trees: Path, folder: Path) -> None:
    """The small export's tree and the headers beside it."""
    for name in (TINY, SHARED_FOLDER):
        shutil.copytree(trees / name, folder / name)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small export's tree."""
    folder = tmp_path_factory.mktemp("trees")
    result = run("export", TINY, "--dest", folder)
    assert result.exit_code == 0, result.output
    return folder


def test_export_writes_a_tree_that_check_accepts(trees: Path) -> None:
    assert len(load_registry(trees / TINY).programs) > 20
    result = run("export", TINY, "--check", "--dest", trees)
    assert result.exit_code == 0
    assert "0 changed" in result.output
    assert "0 stale" in result.output


def test_check_reports_hand_edit_and_writes_nothing(trees: Path, tmp_path: Path) -> None:
    copy_trees(trees, tmp_path)
    edited = next((tmp_path / TINY).rglob("*_kernel.cu"))
    edited.write_text(edited.read_text() + "// mine\n")
    before = edited.read_bytes()
    result = run("export", TINY, "--check", "--dest", tmp_path)
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "1 changed" in result.stderr
    assert f"edited by hand   {edited.relative_to(tmp_path / TINY).as_posix()}" in result.stderr
    assert f"`cakegen export {TINY} --dest {tmp_path}`" in result.stderr
    assert edited.read_bytes() == before


def test_check_reports_an_edited_template(trees: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = tmp_path / "templates"
    shutil.copytree(paths.templates_root(), templates)
    edited = templates / "kernels" / "tail_norm.cuh"
    edited.write_text(edited.read_text() + "// one more line\n")
    monkeypatch.setattr(paths, "templates_root", lambda: templates)
    before = {path: path.read_bytes() for path in trees.rglob("*") if path.is_file()}
    result = run("export", TINY, "--check", "--dest", trees)
    assert result.exit_code == 1
    for name in ("cake_kernels_tail_norm.cuh", SHARED_FILE):
        assert f"  changed          {name}" in result.stderr
    assert f"{trees / SHARED_FOLDER}: 2 changed" in result.stderr, "the header and the table of digests"
    assert f"{TINY}: 0 changed" in result.stdout
    assert f"`cakegen export {TINY} --dest {trees}`" in result.stderr
    assert {path: path.read_bytes() for path in trees.rglob("*") if path.is_file()} == before


def test_check_reports_a_stale_file_and_export_drops_it(trees: Path, tmp_path: Path) -> None:
    copy_trees(trees, tmp_path)
    kept = next((tmp_path / TINY).rglob("*_kernel.cu"))
    stale = kept.with_name(f"cake_{TINY}_{'0' * 20}_kernel.cu")
    shutil.copy(kept, stale)
    result = run("export", TINY, "--check", "--dest", tmp_path)
    assert result.exit_code == 1
    assert "0 changed" in result.stderr
    assert f"  stale            {stale.relative_to(tmp_path / TINY).as_posix()}" in result.stderr
    assert f"`cakegen export {TINY} --dest {tmp_path}`" in result.stderr
    assert run("export", TINY, "--dest", tmp_path).exit_code == 0
    assert not stale.exists()


def test_check_of_all_reports_every_tree(tmp_path: Path) -> None:
    result = run("export", "--check", "--dest", tmp_path)
    assert result.exit_code == 1
    for file in paths.exports_root().glob("*/export.toml"):
        assert f"{tmp_path / file.parent.name}: " in result.stderr


def test_check_reports_tree_without_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trees: Path) -> None:
    shutil.copytree(trees / TINY, tmp_path / "gone")
    monkeypatch.setattr(paths, "generated_root", lambda: tmp_path)
    monkeypatch.setattr(paths, "exports_root", lambda: tmp_path / "none")
    result = run("export", "--check")
    assert result.exit_code == 1
    assert f"{tmp_path / 'gone'}: stale, no export declares it" in result.stderr


def test_check_of_all_trees_tells_each_that_is_right_and_refuses_the_rest(
    trees: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_trees(trees, tmp_path)
    shutil.copytree(trees / TINY, tmp_path / "gone")
    monkeypatch.setattr(paths, "generated_root", lambda: tmp_path)
    monkeypatch.setattr(export, "export_files", lambda name: [paths.exports_root() / TINY / "export.toml"])
    said: list[str] = []
    with pytest.raises(SealError, match=r"gone: stale, no export declares it"):
        export.check_trees(said.append)
    assert [line.partition(":")[0] for line in said] == [SHARED_FOLDER, TINY]
    assert all("0 changed" in line for line in said)


def test_check_of_an_installed_package_says_how_to_install_it_again(
    trees: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cakegen export NAME` is refused there, so it is no advice."""
    copy_trees(trees, tmp_path)
    next((tmp_path / TINY).rglob("*_kernel.cu")).unlink()
    monkeypatch.setattr(paths, "generated_root", lambda: tmp_path)
    monkeypatch.setattr(paths, "is_checkout", lambda: False)
    result = run("export", TINY, "--check")
    assert result.exit_code == 1
    assert "install cakegen again (pip install --force-reinstall --no-deps)" in result.stderr
    assert f"Run `cakegen export {TINY}`" not in result.stderr


def test_check_takes_no_leftover_of_a_killed_export_for_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f".{TINY}.new").mkdir()
    (tmp_path / f".{TINY}.new" / "cake_jit.py").touch()
    monkeypatch.setattr(paths, "generated_root", lambda: tmp_path)
    monkeypatch.setattr(paths, "exports_root", lambda: tmp_path / "none")
    result = run("export", "--check")
    assert (result.exit_code, result.stderr) == (0, "")


def test_export_takes_the_path_of_a_file(tmp_path: Path, trees: Path) -> None:
    file = tmp_path / "any.toml"
    for beside in ("hopper.toml", "blackwell.toml"):
        shutil.copy(paths.exports_root() / TINY / beside, tmp_path)
    shutil.copy(paths.exports_root() / TINY / "export.toml", file)
    assert run("export", file, "--dest", tmp_path).exit_code == 0
    for path in trees.rglob("*"):
        if path.is_file():
            assert (tmp_path / path.relative_to(trees)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "nope"), "no export 'nope'; there is: kimi_k3_latent_moe, tiny_latent_moe"),
        (("export", "nope.toml"), "nope.toml: No such file"),
        (("list", "--export", "nope"), "no registry there"),
        (("list", "--arch", "sm_80"), "'sm_80' is not supported"),
    ],
)
def test_error_is_one_message_without_traceback(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("cakegen: ")
    assert message in result.stderr
    assert "Traceback" not in result.output + result.stderr


def test_installed_package_never_writes_into_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "is_checkout", lambda: False)
    result = run("export", TINY)
    assert result.exit_code == 1
    assert "--dest DIR" in result.stderr


def test_name_must_be_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(paths.exports_root() / TINY, tmp_path / "other")
    for folder in ("rules", "blocks"):
        shutil.copytree(paths.exports_root() / folder, tmp_path / folder)
    monkeypatch.setattr(paths, "exports_root", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    for argument in ("other", "other/export.toml"):
        result = run("export", argument, "--dest", tmp_path)
        assert result.exit_code == 1
        assert f"other/export.toml: name = '{TINY}'; it must be its folder's name" in result.stderr


def test_name_of_a_small_model_must_be_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(paths.exports_root(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "small" / "tiny_relu2_moe.toml").rename(tmp_path / "small" / "other.toml")
    monkeypatch.setattr(paths, "exports_root", lambda: tmp_path)
    result = run("export", "other", "--dest", tmp_path / "trees")
    assert result.exit_code == 1
    assert "small/other.toml: name = 'tiny_relu2_moe'; it must be its file's name" in result.stderr


def test_list_prints_every_key_once(trees: Path) -> None:
    registry = load_registry(trees / TINY)
    lines = run("list", "--export", trees / TINY).output.splitlines()
    rows = [line.split("\t") for line in lines[1:-1]]
    assert {row[0]: row[3] for row in rows} == registry.kernels
    assert len(rows) == len(registry.kernels)
    assert lines[-1].startswith(f"{len(rows)} keys, {len(registry.programs)} programs")


def test_list_filters_by_architecture(trees: Path) -> None:
    for arch in ("sm_90a", "sm_100a"):
        keys = {k for k, name in load_registry(trees / TINY).kernels.items()
                if arch in load_registry(trees / TINY).programs[name].arches}  # fmt: skip
        lines = run("list", "--export", trees / TINY, "--arch", arch).output.splitlines()
        assert {line.split("\t")[0] for line in lines[1:-1]} == keys


def test_show_explains_key_and_program_alike(trees: Path) -> None:
    registry = load_registry(trees / TINY)
    key = next(key for key, name in registry.kernels.items() if registry.programs[name].role == "decode_tail")
    by_key = run("show", key, "--export", trees / TINY)
    assert by_key.exit_code == 0, by_key.stderr
    assert by_key.output == run("show", registry.kernels[key], "--export", trees / TINY).output
    heads = [line for line in by_key.output.splitlines() if line and line[0] != " "]
    assert heads == ["declared:", "plan:", "source:", "launch:"]
    program = registry.program(key)
    for text in (
        key,
        program.kernel_symbol,
        program.kernel_source,
        "num_stages = ",
        "reached by tail TP",
        "more lines",
    ):
        assert text in by_key.output
    for barrier, count in program.barriers:
        assert f"barrier {barrier}: {count}" in by_key.output


@pytest.mark.parametrize("role", ["decode_front", "decode_tail", "tail_norm", "front_gemm", "tail_gemm"])
def test_show_source_prints_one_text_that_compiles_to_the_same_code(trees: Path, role: str) -> None:
    """The compile line's constants are in it, and no file is left to include."""
    registry = load_registry(trees / TINY)
    key = next(key for key, name in registry.kernels.items() if registry.programs[name].role == role)
    program = registry.program(key)
    text = run("show", key, "--export", trees / TINY, "--source").output
    assert "#include" not in text
    for name, header in registry.closure(program)[1:]:
        assert text.count(f"// {name}: begin\n") == text.count(f"// {name}: end\n") == 1
        assert {line for line in header.splitlines() if not line.startswith("#")} <= set(text.splitlines())
    request = request_for(registry, key, program.arches[0])
    flat = dataclasses.replace(request, source=text, headers=(), constants=())
    assert compile_cubin(flat).cubin == compile_cubin(request).cubin


def test_show_source_of_a_program_is_that_of_its_first_key(trees: Path) -> None:
    registry = load_registry(trees / TINY)
    key = next(key for key in registry.kernels if registry.constants(key))
    name = registry.kernels[key]
    first = next(key for key, program in registry.kernels.items() if program == name)
    shown = run("show", name, "--export", trees / TINY, "--source").output
    assert shown == run("show", first, "--export", trees / TINY, "--source").output
    for constant, value in registry.constants(first).items():
        assert f"#define {constant} {value}\n" in shown


def test_show_names_the_nearest_key(trees: Path) -> None:
    key = next(iter(load_registry(trees / TINY).kernels))
    result = run("show", key[:-2], "--export", trees / TINY)
    assert result.exit_code == 2
    assert "the nearest: " in result.stderr
    assert key in result.stderr


def test_command_that_can_not_be_loaded_breaks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "plan", "cakegen.cli.absent:plan_command")
    listing = run("--help")
    assert listing.exit_code == 0
    assert "can't be loaded: No module named 'cakegen.cli.absent'" in " ".join(listing.output.split())
    for line in (["plan"], ["plan", "--tp", "8", "more"]):
        refused = run(*line)
        assert refused.exit_code == 1
        assert "`cakegen plan` can't be loaded: No module named 'cakegen.cli.absent'" in refused.stderr
    assert run("--version").output == f"{__version__}\n"


def test_command_line_is_a_module_too() -> None:
    for module in ("cakegen", "cakegen.cli.main"):
        done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"{__version__}\n"


def test_missing_package_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "docs_root", lambda: __import__("absent_package.part"))
    assert run("docs").stderr == (
        "cakegen: this needs the package absent_package, which is not installed. Install it; `cakegen doctor` looks "
        "for more.\n"
    )


def test_listing_commands_loads_no_heavy_package() -> None:
    code = (
        "import sys\nfrom cakegen.cli.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print(sorted({'torch', 'pydantic', 'jinja2', 'cuda', 'numpy'} & set(sys.modules)))"
    )
    root = str(Path(paths.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_error_of_the_system_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr("cakegen.emit.render_tree", full)
    result = run("export", TINY, "--dest", tmp_path)
    assert result.exit_code == 1
    assert result.stderr == "cakegen: somewhere: No space left on device\n"


def test_reader_that_has_enough_ends_a_command_quietly() -> None:
    root = str(Path(paths.__file__).parents[1])
    command = f"{sys.executable} -m cakegen list --export {TINY} | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("key\t")
    assert "Traceback" not in done.stderr
