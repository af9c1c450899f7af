"""Rules of the template folder, and of the layers that must not know any one model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cakegen
from cakegen import paths
from cakegen.emit.environment import template_environment

ROOT = paths.templates_root()
TEMPLATES = sorted(file for file in ROOT.rglob("*") if file.is_file())
ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b")
INCLUDE = re.compile(r"^\s*#\s*include\s*[<\"](?!\$\{)(.*?)[>\"]", re.MULTILINE)
# folder of a text -> folders whose headers it may include
INCLUDED_FOLDERS = {"device": {"device"}, "kernels": {"device", "kernels"}, "host": {"host"}, "probe": {"device"}}
HOST_HEADERS = re.compile(r"cuda\.h|tvm/ffi/.*|[a-z_]+|std[a-z]+\.h")
PRODUCT = re.compile(r"kimi|\bk3\b", re.IGNORECASE)
NEUTRAL = [
    file for part in ("spec", "plan", "emit", "compile") for file in (Path(cakegen.__file__).parent / part).glob("*.py")
]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("file", TEMPLATES, ids=name_of)
def test_instructions_are_written_in_device_templates_only(file: Path) -> None:
    if file.relative_to(ROOT).parts[0] != "device":
        assert not ASM.search(file.read_text())


def test_device_templates_do_hold_instructions() -> None:
    assert any(ASM.search(file.read_text()) for file in TEMPLATES)


def test_every_device_function_is_used() -> None:
    text = "".join(re.sub(r"//.*", "", file.read_text()) for file in TEMPLATES)
    device = "".join(file.read_text() for file in TEMPLATES if file.relative_to(ROOT).parts[0] == "device")
    functions = set(
        re.findall(r"^__device__ (?:__forceinline__ )?[\w ]+?[ *&]+(\w+)(?:<[^>]*>)?\(", device, re.MULTILINE)
    )
    assert {"mbarrier_wait", "tma_load_3d", "wgmma_m64_k16"} <= functions
    assert {name for name in functions if len(re.findall(rf"\b{name}\b", text)) == 1} == set()


@pytest.mark.parametrize("file", TEMPLATES, ids=name_of)
def test_template_includes_no_toolkit_header(file: Path) -> None:
    folder = file.relative_to(ROOT).parts[0]
    for name in INCLUDE.findall(file.read_text()):
        if ROOT / name in TEMPLATES:
            assert Path(name).parts[0] in INCLUDED_FOLDERS[folder], name
            continue
        assert folder == "host", f"{name}: device code includes headers of templates alone"
        assert HOST_HEADERS.fullmatch(name), name
        assert not name.startswith(("cuda_", "cuda/", "device_", "cooperative_groups")), name


@pytest.mark.parametrize("file", TEMPLATES, ids=name_of)
def test_no_text_asks_for_its_architecture(file: Path) -> None:
    """A program is written for its family, and the host asks the device: `__CUDA_ARCH__` is absent on the host."""
    assert "__CUDA_ARCH" not in file.read_text()


@pytest.mark.parametrize("file", TEMPLATES, ids=name_of)
def test_template_parses_and_is_lf_ascii_without_tabs(file: Path) -> None:
    environment = template_environment(ROOT)
    environment.parse(environment.loader.get_source(environment, name_of(file))[0])  # type: ignore[union-attr]
    raw = file.read_bytes()
    assert b"\t" not in raw
    assert raw.isascii()
    assert raw.endswith(b"\n")


@pytest.mark.parametrize("file", [*NEUTRAL, *TEMPLATES], ids=lambda file: file.name)
def test_generator_and_templates_name_no_product(file: Path) -> None:
    assert not PRODUCT.search(file.read_text())
