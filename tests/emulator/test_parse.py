"""The PTX reader: every body of every export, and the corners of the syntax."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.emulator.bodies import Body, current_rows, quick_rows, without_size

from cakegen.compile import CompileRequest, compile_ptx, request_for
from cakegen.emulator.text.parse import parse_kernel
from cakegen.emulator.text.ptx import Address, Immediate, Kernel, Label, Register, Special, Vector
from cakegen.emulator.text.translate import Program
from cakegen.errors import EmulationError
from cakegen.registry import load_registry

# One list for each family: those of sm_103a are those of sm_100a.
FORMS = {
    "sm_90a": Path(__file__).with_name("opcode_forms.txt"),
    "sm_100a": Path(__file__).with_name("opcode_forms_sm_100a.txt"),
}
# Into so many parts all programs are divided: about fifty programs each
PARTS = {"sm_90a": 12, "sm_100a": 4}
HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n"


def kernel(body: str, parameters: str = "") -> Kernel:
    return parse_kernel(f"{HEADER}.visible .entry k({parameters})\n{{\n{body}\n}}\n", "k")


def requests_of(arch: str, rows: Iterable[Body]) -> list[CompileRequest]:
    places = [(load_registry(row.export), row.key) for row in rows if row.arch == arch]
    return list({request_for(registry, key, arch, ("-lineinfo",)): None for registry, key in places})


def opcodes_of(request: CompileRequest) -> frozenset[str]:
    parsed = parse_kernel(compile_ptx(request), request.kernel_symbol)
    Program(parsed).translate_all()
    return parsed.opcodes()


def forms_of(requests: Iterable[CompileRequest]) -> frozenset[str]:
    """The opcodes of some programs, all of which are read and translated."""
    with ThreadPoolExecutor(2) as pool:
        return frozenset[str]().union(*pool.map(opcodes_of, requests))


@pytest.mark.slow
@pytest.mark.xdist_group("emulator_forms")
@pytest.mark.parametrize("arch", FORMS)
def test_every_body_of_every_export_is_read_and_translated_and_uses_the_listed_forms(arch: str) -> None:
    """A form that is new to the list has been looked at: it has a meaning here and, where it can, a test."""
    found, listed = forms_of(requests_of(arch, quick_rows(current_rows()))), set(FORMS[arch].read_text().split())
    assert found <= listed
    assert {without_size(form) for form in listed} == {without_size(form) for form in found}


@pytest.mark.thorough
@pytest.mark.parametrize(("arch", "part"), [(arch, part) for arch in FORMS for part in range(PARTS[arch])])
def test_every_program_of_every_export_is_read_and_translated_and_uses_listed_forms(arch: str, part: int) -> None:
    """Of bodies in other sizes too, a part of the programs at a time."""
    requests = requests_of(arch, current_rows())[part :: PARTS[arch]]
    assert requests
    assert forms_of(requests) <= set(FORMS[arch].read_text().split())


def widest_difference_first(rows: Iterable[Body]) -> list[Body]:
    """One program of each token tile, then one of each tile and body, then all others."""
    tiles: set[int] = set()
    forms: set[tuple[str, int]] = set()

    def rank(row: Body) -> int:
        known = (row.tile in tiles) + ((row.body, row.tile) in forms)
        tiles.add(row.tile)
        forms.add((row.body, row.tile))
        return known

    return sorted(rows, key=rank)


@pytest.mark.thorough
@pytest.mark.parametrize("arch", FORMS)
def test_each_listed_form_is_used_in_the_size_that_the_list_names(arch: str) -> None:
    """Programs are compiled until every form was seen: where none of the list is superfluous, long before the last."""
    unseen = set(FORMS[arch].read_text().split())
    for request in requests_of(arch, widest_difference_first(row for row in current_rows() if row.arch == arch)):
        unseen -= set(re.findall(r"[\w.:]+", compile_ptx(request)))
        if not unseen:
            break
    assert unseen == set()


def test_registers_of_an_inner_scope_hide_outer_ones() -> None:
    parsed = kernel(".reg .pred %p<2>;\n{ .reg .pred %p1; setp.eq.s32 %p1, 1, 1; }\n@%p1 bra L;\nL: ret;")
    inner = parsed.instructions[0].operands[0]
    assert isinstance(inner, Register)
    assert parsed.instructions[1].guard is not None
    assert inner.index != parsed.instructions[1].guard.index


def test_labels_that_repeat_in_scopes_stay_apart() -> None:
    parsed = kernel("{ W: nanosleep.u32 1; bra W; }\n{ W: nanosleep.u32 1; bra W; }\nret;")
    targets = [each.operands[0] for each in parsed.instructions if each.root == "bra"]
    assert [target.target for target in targets if isinstance(target, Label)] == [0, 2]


def test_several_instructions_and_comments_share_lines() -> None:
    parsed = kernel(
        ".reg .b32 %r<3>; mov.u32 %r0, 0X1F; /* a\nb */ mov.u32 %r1, %tid.x; // c\n\tadd.s32  \t%r2, %r1, -4;ret;"
    )
    assert [each.opcode for each in parsed.instructions] == ["mov.u32", "mov.u32", "add.s32", "ret"]
    assert parsed.instructions[0].operands[1] == Immediate(31)
    assert parsed.instructions[1].operands[1] == Special("tid.x")
    assert parsed.instructions[2].operands[2] == Immediate(-4)


def test_parameters_keep_their_alignment() -> None:
    parsed = kernel("ret;", ".param .u32 a, .param .align 64 .b8 m[128], .param .u64 p, .param .u32 q, .param .u64 r")
    assert [(p.name, p.offset, p.num_bytes) for p in parsed.parameters] == [
        ("a", 0, 4),
        ("m", 64, 128),
        ("p", 192, 8),
        ("q", 200, 4),
        ("r", 208, 8),
    ]


def test_tensor_address_has_coordinates() -> None:
    parsed = kernel(".reg .b64 %rd1; .reg .b32 %r<3>;\nprefetch.x [%rd1+16, {%r0, %r1}]; ret;")
    address = parsed.instructions[0].operands[0]
    assert isinstance(address, Address)
    assert address.offset == 16
    assert len(address.coordinates) == 2
    assert not isinstance(address.coordinates[0], Vector)


def test_place_names_source_lines_from_the_innermost_call_out() -> None:
    text = ".loc 1 40 5\n.loc 2 12 3, function_name $L__info_string0, inlined_at 1 40 5\nret;\n"
    files = '\n.file 1 "a/kernel.cu"\n.file 2 "b/device.cuh"\n'
    parsed = parse_kernel(f"{HEADER}.visible .entry k()\n{{\n{text}}}\n{files}", "k")
    assert parsed.instructions[0].place.source == (("device.cuh", 12), ("kernel.cu", 40))
    assert str(parsed.instructions[0].place) == "device.cuh:12 in kernel.cu:40 (PTX line 8)"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (".reg .tf32 %h1; ret;", "line 6: registers of type .tf32"),
        ("bra NOWHERE;", "line 6: no label NOWHERE"),
        ("@%p9 bra L; L: ret;", "line 6: guard %p9 is not declared"),
        (".reg .b32 %r1; @%r1 bra L; L: ret;", "line 6: guard %r1 is a register of type b32; a predicate is needed"),
        (
            ".reg .b32 %r1; selp.u32 %r1, 1, 2, !%r1; ret;",
            "line 6: '!%r1' negates a register of type b32, and no predicate",
        ),
        (".maxreg 4; ret;", "line 6: directive"),
        ("ret", "no semicolon"),
    ],
)
def test_what_the_reader_does_not_know_is_refused_with_its_line(body: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        kernel(body)


@pytest.mark.parametrize(
    "line",
    [
        "add.cc.u32 %r0, %r0, %r0",
        "mul24.lo.u32 %r0, %r0, %r0",
        "createpolicy.whole.L2::evict_last.b64 %rd0",
    ],
)
def test_unknown_form_is_refused_when_it_is_translated(line: str) -> None:
    parsed = kernel(f".reg .f32 %f<1>; .reg .b32 %r<1>; .reg .b64 %rd<1>;\n{line};\nret;")
    with pytest.raises(EmulationError, match=r"PTX line 7: .* is not modelled"):
        Program(parsed).translate_all()


def test_missing_entry_is_refused_with_what_there_is() -> None:
    with pytest.raises(EmulationError, match=r"no \.entry other; it has k"):
        parse_kernel(f"{HEADER}.visible .entry k()\n{{\nret;\n}}\n", "other")
