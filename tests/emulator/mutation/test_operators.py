"""Mutation operators: each on the instructions it is for, and on none beside them."""

from __future__ import annotations

import pytest

from cakegen.emulator.mutation.operators import OPERATORS
from cakegen.emulator.mutation.statements import Statement, statement_of
from cakegen.emulator.text.parse import parse_kernel
from cakegen.emulator.text.ptx import Instruction

BY_NAME = {operator.name: operator for operator in OPERATORS}
COPY = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4]"
)
MULTICAST = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
    "[%r1], [%rd1, {%r2, %r3}], [%r4], %rs1"
)
STORE_BOX = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r2, %r3}], [%r1]"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], %r2, [%r3]"
WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 0"
TRY_WAIT = "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p1, [%r1], %r2"
EXPECT = "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r1], %r2"
TCGEN_MMA = "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1"
TCGEN_LD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3]"


def instruction(text: str) -> Instruction:
    registers = ".reg .pred %p<9>; .reg .b16 %rs<9>; .reg .f32 %f<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;"
    ptx = f".target sm_90a\n.visible .entry k()\n{{\n{registers}\n{text};\nret;\n}}\n"
    return parse_kernel(ptx, "k").instructions[0]


def changes(operator: str, text: str) -> dict[str, str]:
    return dict(BY_NAME[operator].rewrite(statement_of(instruction(text))))


def computed(operation: str, bits: int, old: str, amount: int, rest: str) -> str:
    return f"{{ .reg .b{bits} %mutated; {operation} %mutated, {old}, {amount}; {rest}; }}"


@pytest.mark.parametrize(
    ("operator", "text"),
    [
        ("drop-fence", "fence.proxy.async.shared::cta"),
        ("drop-fence", "fence.acq_rel.gpu"),
        ("drop-fence", "wgmma.fence.sync.aligned"),
        ("drop-fence", "tcgen05.fence::before_thread_sync"),
        ("drop-commit", "wgmma.commit_group.sync.aligned"),
        ("drop-commit", "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1]"),
        ("drop-commit", "cp.async.bulk.commit_group"),
        ("drop-wait", "bar.sync 0"),
        ("drop-wait", "barrier.cluster.wait.acquire.aligned"),
        ("drop-wait", "griddepcontrol.wait"),
        ("drop-wait", "wgmma.wait_group.sync.aligned 0"),
        ("drop-wait", "cp.async.bulk.wait_group.read 0"),
        ("drop-wait", "tcgen05.wait::ld.sync.aligned"),
        ("drop-arrival", EXPECT),
        ("drop-arrival", "mbarrier.init.shared::cta.b64 [%r1], %r2"),
        ("drop-arrival", "barrier.cluster.arrive.release.aligned"),
        ("drop-copy", COPY),
        ("drop-copy", "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3]"),
        ("drop-store", "st.shared.b32 [%r1], %r2"),
        ("drop-product", WGMMA),
        ("leak", "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 64"),
    ],
)
def test_dropped_instruction_leaves_nothing(operator: str, text: str) -> None:
    assert changes(operator, text) == {"dropped": ""}
    others = [each.name for each in OPERATORS if "drop" in each.name and each.name != operator]
    assert [name for name in others if changes(name, text)] == []


def test_dropped_try_wait_succeeds_at_once() -> None:
    assert changes("drop-wait", TRY_WAIT) == {"succeeds at once": "setp.eq.u32 %p1, 1, 1"}


def test_dropped_counter_arrival_still_reads() -> None:
    text = "atom.acq_rel.gpu.global.inc.u32 %r1, [%rd1], %r2"
    assert changes("drop-arrival", text) == {"only reads": "ld.relaxed.gpu.global.u32 %r1, [%rd1]"}


def test_counts_change_by_one_of_their_units() -> None:
    init = "mbarrier.init.shared::cta.b64 [%r1], %r2"
    left = init.replace("%r2", "%mutated")
    assert changes("count", init) == {
        "+1": computed("add.s32", 32, "%r2", 1, left),
        "-1": computed("add.s32", 32, "%r2", -1, left),
    }
    assert list(changes("count", "bar.sync %r1, %r2")) == ["+32", "-32"]
    assert changes("count", "wgmma.wait_group.sync.aligned 1") == {"+1": "wgmma.wait_group.sync.aligned 2"}
    assert changes("count", "bar.sync 0") == {}


def test_guard_stays_in_front_of_the_changed_instruction() -> None:
    text = "@!%p1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r1], %r2"
    plus = changes("bytes", text)["+16"]
    assert plus == computed("add.s32", 32, "%r2", 16, text.replace("%r2", "%mutated"))


def test_bytes_of_a_bulk_copy() -> None:
    assert changes("bytes", BULK)["-16"] == computed("add.s32", 32, "%r2", -16, BULK.replace("%r2", "%mutated"))
    assert changes("bytes", COPY) == {}


def test_parity_is_flipped() -> None:
    assert changes("parity", TRY_WAIT) == {
        "flipped": computed("xor.b32", 32, "%r2", 1, TRY_WAIT.replace("%r2", "%mutated"))
    }


@pytest.mark.parametrize(
    ("text", "old"),
    [(TRY_WAIT, "[%r1]"), (EXPECT, "[%r1]"), (COPY, "[%r4]"), (MULTICAST, "[%r4]"), (BULK, "[%r3]")],
)
def test_neighbour_is_the_barrier_eight_bytes_on(text: str, old: str) -> None:
    assert changes("neighbour", text)["+8 bytes"] == text.replace(old, f"{old[:-1]}+8]")
    assert changes("neighbour", text.replace(old, f"{old[:-1]}+64]"))["-8 bytes"] == text.replace(
        old, f"{old[:-1]}+56]"
    )


def test_descriptors_change_in_one_field() -> None:
    found = changes("descriptor", WGMMA)
    assert set(found) == {
        f"{side} {field} {sign}" for side in "ab" for field in ("start", "stride") for sign in ("+1", "-1")
    }
    left = WGMMA.replace("%rd2", "%mutated")
    assert found["b stride +1"] == computed("add.s64", 64, "%rd2", 1 << 32, left)
    assert {"instruction N +1", "instruction M -1", "a start +1"} <= set(changes("descriptor", TCGEN_MMA))


def test_operands_of_a_product_are_swapped() -> None:
    assert changes("swap", WGMMA)["a and b"] == WGMMA.replace("%rd1, %rd2", "%rd2, %rd1")


def test_product_starts_anew_instead_of_adding() -> None:
    masked = TCGEN_MMA.replace("%r2, %p1", "%r2, {%r3, %r4, %r5, %r6}, !%p1")
    assert changes("accumulate", TCGEN_MMA) == {"inverted": TCGEN_MMA.replace("%p1", "!%p1")}
    assert changes("accumulate", masked) == {"inverted": masked.replace("!%p1", "%p1")}
    assert changes("accumulate", WGMMA) == {"inverted": WGMMA.replace("%rd2, 1,", "%rd2, 0,")}


def test_allocation_names_other_columns() -> None:
    alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], %r2"
    changed = alloc.replace("%r2", "%mutated")
    assert changes("allocation", alloc) == {
        "twice": computed("shl.b32", 32, "%r2", 1, changed),
        "half": computed("shr.b32", 32, "%r2", 1, changed),
    }


def test_wait_for_stores_becomes_one_for_their_sources() -> None:
    wait = "cp.async.bulk.wait_group 0"
    assert changes("sources-only", wait) == {"wait_group.read": "cp.async.bulk.wait_group.read 0"}
    assert changes("sources-only", "cp.async.bulk.wait_group.read 0") == {}


def test_place_moves_coordinates_and_destination() -> None:
    found = changes("place", COPY)
    assert list(found) == ["destination +128", "coordinate 0 +1", "coordinate 1 +1"]
    assert found["coordinate 1 +1"] == computed("add.s32", 32, "%r3", 1, COPY.replace("%r3", "%mutated"))
    assert found["destination +128"] == COPY.replace("[%r1]", "[%r1+128]")
    assert list(changes("place", BULK)) == ["destination +16"]
    assert list(changes("place", STORE_BOX)) == ["coordinate 0 +1", "coordinate 1 +1"]


def test_multicast_mask_and_rank() -> None:
    assert list(changes("multicast", MULTICAST)) == ["mask ^ 1", "mask ^ 2"]
    assert changes("multicast", COPY) == {}
    assert list(changes("rank", "mapa.shared::cluster.u32 %r1, %r2, %r3")) == ["rank ^ 1"]


@pytest.mark.parametrize(
    ("text", "change", "opcode"),
    [
        ("fence.acq_rel.gpu", "gpu -> cta", "fence.acq_rel.cta"),
        ("ld.acquire.gpu.global.u32 %r1, [%rd1]", "gpu -> cta", "ld.acquire.cta.global.u32"),
        ("fence.proxy.async.global", "global -> shared::cta", "fence.proxy.async.shared::cta"),
        ("fence.proxy.async.shared::cta", "shared::cta -> global", "fence.proxy.async.global"),
        (TRY_WAIT.replace("acquire.cta", "acquire.cluster"), "cluster -> cta", TRY_WAIT.split()[0]),
    ],
)
def test_scope_is_narrowed(text: str, change: str, opcode: str) -> None:
    assert {name: new.split()[0] for name, new in changes("scope", text).items()} == {change: opcode}


def test_barrier_of_a_cluster_has_no_narrower_scope() -> None:
    assert changes("scope", "barrier.cluster.arrive.release.aligned") == {}
    assert changes("scope", "fence.mbarrier_init.release.cluster") == {}


def test_order_becomes_relaxed() -> None:
    assert changes("order", EXPECT) == {"release -> relaxed": EXPECT.replace("release", "relaxed")}
    assert changes("order", "fence.acq_rel.gpu") == {}
    assert changes("order", "barrier.cluster.wait.acquire.aligned") == {}


def test_tensor_memory_addresses() -> None:
    assert changes("column", TCGEN_LD)["+8"] == TCGEN_LD.replace("[%r3]", "[%r3+8]")
    assert changes("column", TCGEN_MMA)["-8"] == TCGEN_MMA.replace("[%r1]", "[%r1+-8]")
    assert changes("quadrant", TCGEN_LD)["+32 lanes"] == TCGEN_LD.replace("[%r3]", "[%r3+2097152]")
    assert changes("quadrant", TCGEN_MMA) == {}


def test_every_operator_says_what_it_breaks() -> None:
    assert all(operator.description.endswith(".") for operator in OPERATORS)


def test_statement_gives_its_text_back() -> None:
    for text in (COPY, WGMMA, TRY_WAIT, "@%p1 bar.sync 0", "wgmma.fence.sync.aligned"):
        assert statement_of(instruction(text)).text() == text
    assert Statement("@%p1 ", "bar.sync", ("0",)).parts == ("bar", "sync")
