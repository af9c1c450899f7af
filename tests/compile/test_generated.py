"""Every committed program: it compiles for its exact target, and is what its registry record says."""

from __future__ import annotations

import re

import pytest
from support.emulator.bodies import current_rows, quick_rows

from cakegen import paths
from cakegen.cli.compile import failures_of, select_jobs
from cakegen.compile import CompiledProgram, cached_cubin, compile_many, compile_ptx, request_for
from cakegen.compile.program import CHAOS_FLAG
from cakegen.registry import Program, Registry, load_registry

EXPORTS = sorted(path.parent.name for path in paths.generated_root().glob("*/cake_jit.py"))
SIZES = {"tma_buffer": (128, 64), "buffer": (8, 8), "parameter": (4, 4)}


@pytest.fixture(autouse=True)
def cache_folder() -> None:
    """The machine's own cache: its keys are contents, so an unchanged program need not be compiled again."""


@pytest.fixture(params=EXPORTS)
def registry(request: pytest.FixtureRequest) -> Registry:
    return load_registry(request.param)


def _parameter_bytes(program: Program) -> int:
    """The end of the last parameter, each aligned by its kind."""
    end = 0
    for size, alignment in (SIZES[kind] for kind, _ in program.arg_plan if kind != "grid"):
        end = -(-end // alignment) * alignment + size
    return end


def test_every_export_has_a_committed_tree() -> None:
    assert sorted(path.parent.name for path in paths.exports_root().glob("*/export.toml")) == EXPORTS


def of_each_body(registry: Registry) -> list[str]:
    """Two keys at most of each body that an export has."""
    return [row.key for row in quick_rows(row for row in current_rows() if row.export == registry.export)]


@pytest.mark.parametrize(
    ("registry", "is_quick"),
    [
        ("kimi_k3_latent_moe", True),
        *(pytest.param(export, False, marks=pytest.mark.thorough) for export in EXPORTS),
    ],
    indirect=["registry"],
    ids=lambda value: {True: "a key of each body", False: "all"}.get(value, value),
)
def test_generated_programs_compile_and_fit_their_records(registry: Registry, is_quick: bool) -> None:
    jobs = select_jobs(registry, of_each_body(registry)) if is_quick else select_jobs(registry)
    outcomes = compile_many([job.request for job in jobs])
    assert failures_of(jobs, outcomes) == []
    for job, compiled in zip(jobs, outcomes, strict=True):
        assert isinstance(compiled, CompiledProgram)
        program = registry.programs[compiled.name]
        report = compiled.report
        smem_bytes = report.static_smem_bytes + job.dynamic_smem_bytes
        assert report.parameter_bytes == _parameter_bytes(program), program.name
        assert (report.spill_bytes, report.stack_bytes) == (0, 0), program.name
        assert smem_bytes <= 232448, f"{program.name}: {smem_bytes} bytes of shared memory"
        threads = program.launch.block[0] * program.launch.block[1] * program.launch.block[2]
        assert report.registers * threads <= 65536, f"{program.name}: {report.registers} registers x {threads} threads"


def _of_each_kind(registry: Registry) -> list[str]:
    """One key for every role and launch record."""
    kinds = {}
    for key in registry.kernels:
        program = registry.program(key)
        kinds.setdefault((program.role, program.launch.cluster, program.launch.programmatic), key)
    return list(kinds.values())


def test_generated_ptx_agrees_with_the_launch_record(registry: Registry) -> None:
    """The cluster shape is the record's, and each waits for the launch before it (which is free in an ordinary one)."""
    for key in _of_each_kind(registry):
        program = registry.program(key)
        ptx = compile_ptx(request_for(registry, key, program.arches[0]))
        cluster = re.search(r"\.reqnctapercluster\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", ptx)
        declared = tuple(int(extent or 1) for extent in cluster.groups()) if cluster else (1, 1, 1)
        assert declared == program.launch.cluster, key
        assert "griddepcontrol.wait" in ptx, key


@pytest.mark.parametrize(
    ("registry", "is_quick"),
    [
        ("kimi_k3_latent_moe", True),
        pytest.param("kimi_k3_latent_moe", False, marks=pytest.mark.thorough),
        pytest.param("tiny_latent_moe", False, marks=pytest.mark.long),
    ],
    indirect=["registry"],
)
def test_hopper_gemms_that_sleep_at_every_wait_compile(registry: Registry, is_quick: bool) -> None:
    """`-DCAKEGEN_CHAOS`: such builds may spill, but their matrix instructions still run side by side.

    The small model has the same tiles over shorter loops, and takes as long.
    """
    keys = of_each_body(registry) if is_quick else registry.kernels
    programs = {registry.program(key).name: key for key in keys if key.endswith("@sm_90a")}
    gemms = [key for name, key in programs.items() if registry.program(key).role.endswith("gemm")]
    assert len(gemms) > 5
    for key in gemms:
        assert cached_cubin(request_for(registry, key, "sm_90a", (CHAOS_FLAG,))).cubin
