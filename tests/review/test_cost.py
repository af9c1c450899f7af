"""What touched programs compile to, before and after, with the real compiler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.compile.sources import PLAIN_REQUEST
from support.review.trees import EXPORT, KERNEL, SmallProgram, small_programs, write_small_tree

from cakegen.compile import cached_cubin
from cakegen.review import CostChange, compare_trees, measure_costs
from cakegen.review.cost import INSTRUCTION_BYTES, cost_of
from cakegen.review.trees import read_trees

FIRST, SECOND, NORM = small_programs()


def costs(folder: Path, before: list[SmallProgram] | None, after: list[SmallProgram] | None) -> list[CostChange]:
    sides = []
    for programs in (before, after):
        if programs is not None:
            write_small_tree(folder, programs)
        sides.append(read_trees(folder)[EXPORT] if programs is not None else None)
    return measure_costs(compare_trees(*sides), *sides)


def test_untouched_programs_are_not_compiled(trees: Path) -> None:
    assert costs(trees, small_programs(), small_programs()) == []


def test_comment_changes_no_machine_code(trees: Path) -> None:
    edited = replace(FIRST, text=f"// a comment\n{KERNEL}")
    (change,) = costs(trees, [FIRST, NORM], [edited, NORM])
    assert change.keys == (FIRST.key,)
    assert change.same_code
    assert change.before == change.after


def test_more_code_is_counted(trees: Path) -> None:
    (change,) = costs(trees, [FIRST], [replace(FIRST, stages=64, smem_bytes=8192)])
    before, after = change.before, change.after
    assert before is not None
    assert after is not None
    assert not change.same_code
    assert after.instructions > before.instructions > 10
    assert after.code_bytes > before.code_bytes
    assert (before.smem_bytes, after.smem_bytes) == (4096, 8192)
    assert before.registers > 0


@pytest.mark.parametrize("order", [(1, 0), (0,), ()], ids=["binding first", "kernel alone", "none"])
def test_kernel_is_found_by_its_name_wherever_a_registry_lists_it(trees: Path, order: tuple[int, ...]) -> None:
    write_small_tree(trees, [FIRST])
    whole = read_trees(trees)[EXPORT]
    (name,) = whole.modules
    sources = [whole.modules[name]["sources"][at] for at in order]
    listed = replace(whole, modules={name: {**whole.modules[name], "sources": sources}})
    changes = measure_costs(compare_trees(listed, whole), listed, whole)
    if order:
        assert changes == []
        return
    (change,) = changes
    assert change.before is None
    assert "before: " in change.failure
    assert change.after is not None


def test_changed_launch_without_changed_code_is_shown(trees: Path) -> None:
    (change,) = costs(trees, [FIRST], [replace(FIRST, smem_bytes=8192)])
    assert change.same_code
    assert change.before is not None
    assert change.after is not None
    assert (change.before.smem_bytes, change.after.smem_bytes) == (4096, 8192)


def test_each_target_of_either_side_has_an_entry(trees: Path) -> None:
    entries = costs(trees, [FIRST], [replace(FIRST, arches=("sm_90a", "sm_100a"))])
    assert [(entry.arch, entry.before is None, entry.after is None) for entry in entries] == [("sm_100a", True, False)]


def test_key_that_came_or_went_has_one_side(trees: Path) -> None:
    other = replace(NORM, key="x:1", role="x")
    entries = {entry.keys[0]: entry for entry in costs(trees, [FIRST, NORM], [FIRST, other])}
    assert entries["x:1"].before is None
    assert entries[NORM.key].after is None
    (gone,) = costs(trees, [FIRST], None)
    assert gone.after is None


def test_keys_of_one_program_share_an_entry(trees: Path) -> None:
    second_key = replace(FIRST, key="front:g9_r4@sm_90a")

    def tree(programs: list[SmallProgram]) -> object:
        write_small_tree(trees, programs)
        registry = trees / EXPORT / "cake_jit.py"
        text = registry.read_text().replace("KERNELS = {", f'KERNELS = {{"{second_key.key}": "{programs[0].name}",')
        text = text.replace("SPECIALIZATIONS = {", f'SPECIALIZATIONS = {{"{second_key.key}": {{"SCALE": 3}},')
        registry.write_text(text)
        return read_trees(trees)[EXPORT]

    old, new = tree([FIRST]), tree([replace(FIRST, text=KERNEL.replace("^ 1", "^ 2"))])
    (entry,) = measure_costs(compare_trees(old, new), old, new)
    assert entry.keys == (FIRST.key, second_key.key)


def test_program_that_does_not_compile_is_an_entry_with_the_compilers_words(trees: Path) -> None:
    (change,) = costs(trees, [FIRST], [replace(FIRST, text=f"{KERNEL}int broken = ;\n")])
    assert change.before is not None
    assert change.after is None
    assert change.failure.startswith(f"after: {FIRST.name} for sm_90a, NVRTC")
    assert "expected an expression" in change.failure


@pytest.mark.parametrize("count", [1, 40])
def test_instructions_are_those_of_the_code_without_its_padding(trees: Path, count: int) -> None:
    body = "".join(f"  out[{i * 2 + 1}] = {i}.5f;\n" for i in range(count))
    source = f'extern "C" __global__ void kernel_plain(float* out) {{\n{body}}}\n'
    cost = cost_of(cached_cubin(replace(PLAIN_REQUEST, source=source)), 0)
    assert cost.code_bytes % 128 == 0, "functions are padded to whole lines of instructions"
    words = [cost.code[at : at + INSTRUCTION_BYTES] for at in range(0, cost.code_bytes, INSTRUCTION_BYTES)]
    assert count < cost.instructions < len(words)
    assert set(words[cost.instructions :]) == {words[-1]}
