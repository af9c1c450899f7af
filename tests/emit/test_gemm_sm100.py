"""Specifications of Blackwell's prefill GEMMs: bytes, arrivals and columns from the plan's records."""

from __future__ import annotations

import dataclasses

import pytest
from support.models import kimi_k3_model, tiny_ragged_model

from cakegen.emit.gemm_sm100 import gemm_program_sm100
from cakegen.emit.program import ProgramSpec
from cakegen.errors import EmitError
from cakegen.model import DeviceFacts, Model, Target
from cakegen.plan import GemmForm, plan_route
from cakegen.plan.gemm_layout import blackwell_gemm_smem
from cakegen.plan.workspace import control_words, partials_elems

LIMIT = 232448


def front_form(model: Model, tp: int = 8, tokens: int = 129) -> GemmForm:
    device = DeviceFacts.nominal("sm_100a", 148)
    (launch,) = plan_route(model, stage="front", tp=tp, tokens=tokens, partials=1, device=device).launches
    assert isinstance(launch.form, GemmForm)
    return launch.form


def front_program(tokens: int = 129, **changes: object) -> ProgramSpec:
    model = kimi_k3_model()
    form = dataclasses.replace(front_form(model, tokens=tokens), **changes)  # type: ignore[arg-type]
    return gemm_program_sm100(model, form, "sm100")


def value_of(program: ProgramSpec, constant: str) -> object:
    return {entry.name: entry.value for entry in program.constants}[constant]


def test_stage_holds_the_tokens_and_half_of_the_weights() -> None:
    program = front_program()
    # 128 tokens and 128 of 256 weight rows of 64 bf16
    assert (value_of(program, "kStageABytes"), value_of(program, "kStageBytes")) == (16384, 32768)
    assert value_of(program, "kStagesOffset") == 2048
    assert program.launch.dynamic_smem_bytes == 2048 + 7 * 32768 <= LIMIT
    boxes = {entry.name: entry.box for entry in program.tensor_maps}
    assert boxes == dict.fromkeys(("gate_weight", "down_weight", "shared_gate_up_weight", "x"), (64, 128, 1))


def test_narrow_tiles_have_a_narrower_stage() -> None:
    program = front_program(block_n=128, num_stages=9)
    assert value_of(program, "kStageBytes") == 16384 + 8192
    assert program.launch.dynamic_smem_bytes == 2048 + 9 * 24576
    assert {entry.box for entry in program.tensor_maps} == {(64, 64, 1), (64, 128, 1)}


def test_arrivals_count_the_warps_of_both_ctas() -> None:
    program = front_program()
    assert program.launch.block == (320, 1, 1)
    assert program.launch.cluster == (2, 1, 1)
    # a lane of 8 epilogue warps each; those, a loader each, and the one thread that multiplies
    arrivals = {barrier.name: barrier.arrivals for barrier in program.pipeline.barriers}
    assert (arrivals["sums_empty"], arrivals["item_empty"]) == (16, 19)


@pytest.mark.parametrize(("block_n", "columns"), [(64, 128), (128, 256), (192, 512), (256, 512)])
def test_tensor_memory_is_a_power_of_two_that_holds_two_tiles(block_n: int, columns: int) -> None:
    assert value_of(front_program(block_n=block_n), "kTensorColumns") == columns


def test_words_lie_behind_the_barriers_and_before_the_flags() -> None:
    model = kimi_k3_model()
    smem = blackwell_gemm_smem(front_form(model))
    barriers = front_program().barriers
    assert dict(barriers) == {
        "stage_full": 7,
        "stage_empty": 7,
        "sums_full": 2,
        "sums_empty": 2,
        "item_full": 2,
        "item_empty": 2,
    }
    ends = [8 * sum(count for _, count in barriers), smem.tensor_base_offset, smem.answers_offset, smem.arrivals_offset]
    assert ends == sorted(ends)
    assert smem.answers_offset % 16 == smem.arrivals_offset % 16 == 0
    assert smem.arrivals_offset + 2 * 16 == 1024


def test_evict_first_is_a_program_of_its_own() -> None:
    cached, streamed = front_program(513), front_program(512)
    assert (value_of(cached, "kEvictFirst"), value_of(streamed, "kEvictFirst")) == (False, True)
    assert cached.name != streamed.name
    assert streamed.summary.endswith("weights evict-first")


def test_programs_of_all_tp_degrees_are_one() -> None:
    model = kimi_k3_model()
    names = {gemm_program_sm100(model, front_form(model, tp), "sm100").name for tp in (1, 2, 4, 8, 16)}
    assert len(names) == 1


def test_workspace_holds_every_group_of_every_segment() -> None:
    model = kimi_k3_model()
    device = DeviceFacts.nominal("sm_100a", 148)
    (launch,) = plan_route(model, stage="front", tp=8, tokens=129, partials=1, device=device).launches
    # 24 cut tiles of 2 segments, 2 CTAs of 2 groups of 128 rows x 128 columns
    assert partials_elems(launch) == 24 * 2 * 2 * 2 * 128 * 128
    assert control_words(launch) == 24 * 2 * 2


def test_ragged_widths_round_up_to_tiles() -> None:
    ragged = tiny_ragged_model()
    model = dataclasses.replace(ragged, targets=(Target("sm_100a", (16,), (148,)),))
    form = front_form(model, tp=16)
    # 384 experts, 640 latent columns, 64 gate columns of 128 in a shared tile
    assert form.constants == (("I_LOCAL", 64), ("N_TILES", 2 + 3 + 1), ("S_TILES", 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_n": 320},
            "2 tiles' sums of 320 columns take 1024 columns of tensor memory; an SM has 512. Use narrower tiles",
        ),
        (
            {"num_stages": 1, "staged_store": True},
            "2 slabs * 8 warps * 4096 = 65536 bytes of the drained ring, which has 1 * 32768 = 32768. Raise the stages",
        ),
        (
            {"num_stages": 8},
            "2048 bytes of barriers and flags + 8 stages * 32768 = 264192 bytes of shared memory; a CTA has 232448. "
            "Lower the stages of tiles of 256 columns in blackwell.prefill.",
        ),
    ],
)
def test_form_that_does_not_fit_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(EmitError) as caught:
        front_program(**changes)
    assert message in str(caught.value)
