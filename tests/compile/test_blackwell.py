"""Blackwell programs, proved without a device: the committed table of what they take, and their machine code."""

from __future__ import annotations

import collections
import csv
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.emulator.bodies import current_rows, quick_rows

from cakegen import paths
from cakegen.compile import CompiledProgram, cached_cubin, compile_many, load_nvrtc, request_for
from cakegen.registry import Registry, load_registry
from cakegen.review.cost import cost_of

ROOT = Path(paths.exports_root()).parent
TABLE = ROOT / "benchmarks/static/blackwell.tsv"
COMMAND = f"cakegen compile --arch sm_100a --arch sm_103a | grep -P '\\t' > {TABLE.relative_to(ROOT)}"
ARCHES = ("sm_100a", "sm_103a")
QUICK_AND_ALL = [pytest.param(True, id="a key of each body"), pytest.param(False, id="all", marks=pytest.mark.thorough)]
# The largest of the programs that the published planner's keys belong to; theirs have 742 to 3542 lines.
PUBLISHED_INSTRUCTIONS = 4960
MOST_LINES = 430


@pytest.fixture(autouse=True)
def cache_folder() -> None:
    """The machine's own cache: its keys are contents, so an unchanged program need not be compiled again."""


@pytest.fixture(scope="module")
def kimi() -> Registry:
    return load_registry("kimi_k3_latent_moe")


def blackwell_keys(registry: Registry) -> list[str]:
    return [key for key in registry.kernels if set(registry.program(key).arches) & set(ARCHES)]


@functools.cache
def quick_pairs(export: str) -> list[tuple[str, str]]:
    """Two keys at most of each body that an export has, for the architecture that the text is of."""
    rows = [row for row in current_rows() if (row.export, row.arch) == (export, ARCHES[0])]
    return [(row.key, row.arch) for row in quick_rows(rows)]


@functools.cache
def compiled_keys(export: str, is_quick: bool = False) -> dict[tuple[str, str], CompiledProgram]:
    registry = load_registry(export)
    every = [(key, arch) for key in blackwell_keys(registry) for arch in ARCHES]
    pairs = quick_pairs(export) if is_quick else every
    outcomes = compile_many([request_for(registry, key, arch) for key, arch in pairs])
    # an outcome that is no program is an error: a spill, among others
    failures = [str(outcome) for outcome in outcomes if not isinstance(outcome, CompiledProgram)]
    assert failures == []
    return dict(zip(pairs, outcomes, strict=True))  # type: ignore[arg-type]


def table_rows() -> dict[tuple[str, str], dict[str, str]]:
    lines = TABLE.read_text().splitlines()
    rows = csv.DictReader([line for line in lines if "\t" in line], delimiter="\t")
    return {(row["keys"], row["arch"]): row for row in rows}


def test_table_has_a_row_for_every_key_and_architecture(kimi: Registry) -> None:
    assert set(table_rows()) == {(key, arch) for key in blackwell_keys(kimi) for arch in ARCHES}, COMMAND


@pytest.mark.parametrize("is_quick", QUICK_AND_ALL)
def test_numbers_of_the_table_hold(kimi: Registry, is_quick: bool) -> None:
    """Instructions and bytes within a twentieth, so that the edit of a wait leaves the table as it is."""
    rows = table_rows()
    compiled = compiled_keys("kimi_k3_latent_moe", is_quick)
    if load_nvrtc().version not in {(13, 0)}:
        pytest.skip(f"the table is of NVRTC 13.0; here is {load_nvrtc().label}")
    for pair, program in compiled.items():
        row, cost = rows[pair], cost_of(program, kimi.programs[program.name].launch.dynamic_smem_bytes)
        near = {
            "registers": (cost.registers, 8),
            "instructions": (cost.instructions, cost.instructions / 20),
            "cubin": (program.report.cubin_bytes, program.report.cubin_bytes / 20),
            "lines": (kimi.read(kimi.programs[program.name].kernel_source).count("\n"), 20),
        }
        for column, (value, slack) in near.items():
            assert abs(int(row[column]) - value) <= slack, f"{pair} {column}: {row[column]}; write again: {COMMAND}"
        assert (int(row["shared memory"]), int(row["stack"])) == (cost.smem_bytes, 0), pair


@pytest.mark.parametrize("is_quick", QUICK_AND_ALL)
@pytest.mark.parametrize("export", ["kimi_k3_latent_moe", "tiny_latent_moe"])
def test_programs_keep_their_bounds(export: str, is_quick: bool) -> None:
    registry = load_registry(export)
    for (key, arch), program in compiled_keys(export, is_quick).items():
        record = registry.programs[program.name]
        threads = record.launch.block[0]
        assert program.report.registers * threads <= 65536, f"{key} {arch}"
        assert (program.report.spill_bytes, program.report.stack_bytes) == (0, 0), f"{key} {arch}"
        cost = cost_of(program, record.launch.dynamic_smem_bytes)
        # nothing static: all shared memory is what the plan computed
        assert cost.smem_bytes == record.launch.dynamic_smem_bytes, f"{key} {arch}"
        assert cost.instructions < PUBLISHED_INSTRUCTIONS, f"{key} {arch}: {cost.instructions} instructions"
        lines = registry.read(record.kernel_source).count("\n")
        assert lines <= MOST_LINES, f"{record.kernel_source}: {lines} lines"


def find_disassembler() -> str:
    """nvdisasm on PATH, below CUDA_HOME, or in the nvidia-cuda-nvdisasm wheel; skips where there is none."""
    home = os.environ.get("CUDA_HOME")
    places = [Path(home, "bin/nvdisasm")] if home else []
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        places += Path(folder).glob("*/bin/nvdisasm")
    found = shutil.which("nvdisasm") or next((str(place) for place in places if place.is_file()), None)
    if found is None:
        pytest.skip("needs nvdisasm: on PATH, below CUDA_HOME, or from the nvidia-cuda-nvdisasm wheel")
    return found


def disassemble(program: CompiledProgram, folder: Path) -> str:
    """The machine code of a program as text."""
    file = folder / f"{program.name}.{program.arch}.cubin"
    file.write_bytes(program.cubin)
    return subprocess.run(
        [find_disassembler(), "-c", str(file)], capture_output=True, text=True, check=True, timeout=900
    ).stdout


def opcodes(text: str) -> collections.Counter[str]:
    """How often each opcode stands in a program, suffixes included."""
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text, re.MULTILINE)
    return collections.Counter(found)


def count(found: collections.Counter[str], prefix: str) -> int:
    return sum(number for opcode, number in found.items() if opcode.startswith(prefix))


@pytest.mark.parametrize("arch", [ARCHES[0], pytest.param(ARCHES[1], marks=pytest.mark.thorough)])
def test_machine_code_has_what_the_design_says(kimi: Registry, tmp_path: Path, arch: str) -> None:
    """One key of each form at TP 1 and 8: the 23 that the published planner reaches."""
    published = [key for key in blackwell_keys(kimi) if re.search(r"_t7_28_(96|12)_|_k(56_96|7_12)_", key)]
    assert len(published) == 23
    for key in published:
        program = cached_cubin(request_for(kimi, key, arch))
        found = opcodes(disassemble(program, tmp_path))
        front, pair = "_t7_28_" in key, "_c2" in key
        chunks = 2 if "_d2_" in key else 1
        # four products of K = 16 a chunk; a shared tile's code has gate and up, and another tile's its own
        assert count(found, "UTCHMMA") >= 4 * chunks * (3 if front else 1), key
        # one commit frees a stage, one says that the sums are complete
        assert count(found, "UTCBAR") == 2, key
        # two halves of a thread's sums
        assert count(found, "LDTM.16") == 2, key
        assert count(found, "UTMALDG.3D") >= 3, key
        assert count(found, "UTCATOMSWS") >= 2, f"{key}: tensor memory is taken and given back"
        assert (count(found, "STAS") > 0) == pair, f"{key}: st.async only where a pair exchanges sums"
        assert count(found, "ACQBULK") >= 2, f"{key}: waits for the launch before it"
        assert count(found, "PREEXIT") == 1, f"{key}: releases the launch after it"
        assert (count(found, "UBLKCP") > 0) == ("_rs" in key), f"{key}: rows are copied in bulk where they are staged"
        assert (count(found, "UTMACCTL") == 0) == ("_np" in key), f"{key}: prefetch of tensor maps"
        assert count(found, "STG.E.128") > 0, f"{key}: outputs leave in 16-byte stores"
        for absent in ("STL", "LDL", "HMMA", "HGMMA"):
            assert count(found, absent) == 0, f"{key}: {absent}"


@pytest.mark.parametrize("arch", [ARCHES[0], pytest.param(ARCHES[1], marks=pytest.mark.thorough)])
def test_machine_code_of_the_gemms_has_what_the_design_says(kimi: Registry, tmp_path: Path, arch: str) -> None:
    """The published prefill keys, of TP 1 and 8."""
    published = [key for key in blackwell_keys(kimi) if re.match(r"front:i(6144|768)|tail_gemm:tp[18]e", key)]
    assert len(published) == 10
    for key in published:
        text = disassemble(cached_cubin(request_for(kimi, key, arch)), tmp_path)
        found = opcodes(text)
        # four products of K = 16 a block; a commit frees the stage, another says that the sums are complete
        assert count(found, "UTCHMMA.2CTA") == count(found, "UTCHMMA") == 4, key
        assert count(found, "UTCBAR.2CTA.MULTICAST") == count(found, "UTCBAR") == 2, key
        # tokens, and the weights of each matrix (the front's router and latent share one); bytes of both CTAs count on
        # one barrier
        copies = re.findall(r"UTMALDG\S* .*;", text)
        assert len(copies) == (3 if key.startswith("front") else 4), key
        assert all(copy.startswith("UTMALDG.3D.2CTA ") for copy in copies), key
        streamed = [copy for copy in copies if "desc[" in copy]
        assert len(streamed) == (2 if "e1" in key else 0), f"{key}: weights, and only they, leave L2 first"
        # two halves of a tile, where it is whole, where it is cut, and where its sums are handed over
        assert count(found, "LDTM") == 6, key
        assert (count(found, "UGETNEXTWORKID.BROADCAST") > 0) == ("f1" not in key), (
            f"{key}: clusters take further items"
        )
        assert count(found, "UTCATOMSWS") >= 2, f"{key}: tensor memory is taken and given back"
        assert (count(found, "UTMASTG") > 0) == ("t1" in key), f"{key}: a cluster's last tile is stored by copies"
        assert count(found, "STG.E.ENL2.256") > 0, f"{key}: outputs leave in 32-byte stores"
        assert count(found, "ACQBULK") >= 2, f"{key}: waits for the launch before it"
        assert count(found, "PREEXIT") == 1, f"{key}: releases the launch after it"
        for absent in ("STL", "LDL", "HMMA", "HGMMA"):
            assert count(found, absent) == 0, f"{key}: {absent}"


def test_build_that_sleeps_at_every_wait_keeps_its_registers(kimi: Registry) -> None:
    """`-DCAKEGEN_CHAOS`; the programs with the most registers, which a spill would show first."""
    rows = table_rows()
    for key, arch in sorted(rows, key=lambda pair: int(rows[pair]["registers"]))[-4:]:
        program = cached_cubin(request_for(kimi, key, arch, ("-DCAKEGEN_CHAOS",)))
        assert (program.report.spill_bytes, program.report.stack_bytes) == (0, 0), key


@pytest.mark.slow
def test_other_releases_of_the_compiler_accept_every_program(tmp_path: Path) -> None:
    """Set CAKEGEN_TEST_NVRTC to a folder of `pip install --target` installations of other NVRTC releases."""
    folder = os.environ.get("CAKEGEN_TEST_NVRTC")
    if not folder:
        pytest.skip("CAKEGEN_TEST_NVRTC names no folder with other NVRTC releases")
    libraries = sorted(path for path in Path(folder).rglob("libnvrtc.so.*") if ".alt." not in path.name)
    assert libraries
    arches = [option for arch in ARCHES for option in ("--arch", arch)]
    for library in libraries:
        environment = {**os.environ, "CAKEGEN_NVRTC": str(library), "CAKEGEN_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-m", "cakegen", "compile", *arches]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == 0, f"{library}: {done.stderr}"
        assert ", 0 failed;" in done.stdout, f"{library}: {done.stdout[-300:]}"
