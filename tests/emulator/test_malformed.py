"""What no assembler takes is refused with its line, within bounds; what one does take is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cakegen.cli.emulate_files import BAD_INPUT, FAULT, GIVEN_UP, NOT_MODELLED
from cakegen.cli.main import main
from cakegen.emulator.launches.arrays import HostBuffer, fill_array, read_array, scalar_bytes
from cakegen.emulator.launches.launch import Options, program_of
from cakegen.emulator.launches.sequence import BufferArgument, KernelLaunch, run_sequence
from cakegen.emulator.machine.machine import MOST_POLLS
from cakegen.emulator.machine.residency import LaunchShape
from cakegen.errors import EmulationError, LaunchError, LimitError, PtxError, SpecError
from cakegen.spec.launch_file import parse_launch_file

pytestmark = pytest.mark.emulator

KERNELS = Path(__file__).parent / "kernels"
HEAD = ".version 8.8\n.target {target}\n.address_size 64\n"


def module(body: str, parameters: str = ".param .u64 p", head: str = "", target: str = "sm_100a") -> str:
    return f"{HEAD.format(target=target)}{head}\n.visible .entry k({parameters})\n{{\n{body}\n}}\n"


def word_of(text: str, entry: str = "k", dynamic: int = 1024) -> int:
    """The word that a kernel of one CTA writes to its parameter."""
    out = HostBuffer("o", "update", "u32", np.zeros(4, np.uint32))
    shape = LaunchShape((1, 1, 1), (1, 1, 1), dynamic_smem_bytes=dynamic)
    run_sequence({entry: program_of(text, entry)}, [KernelLaunch(entry, shape, (BufferArgument("o"),))], {"o": out})
    return int(out.array[0])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (".reg .b32 %r<262145>;", r"line 7: 262145 registers; at most 262144 are kept apart"),
        (f".reg .b32 %r<{'9' * 5000}>;", r"line 7: '\.reg .*' can't be read \(ValueError: Exceeds"),
        (".shared .align 3 .b8 s[4];", r"line 7: \.align 3; it must be a power of two, 1 to 1024"),
        (f".shared .b8 s[{'9' * 25}];", r"line 7: a number of 25 digits; no size has more than 19"),
        (
            ".shared .b8 s[200000]; .shared .b8 t[200000]; ret;",
            "PTX, k: 400000 bytes of shared variables; a CTA has at",
        ),
        (".shared .b8 s[512][512]; ret;", r"line 7: s has 262144 bytes; a CTA has at most 232448"),
        ("mov.u32 %r1, 0; ret;", r"line 7: register %r1 is not declared"),
        (
            ".reg .b32 %r1; mov.u32 %r1, 99999999999999999999; ret;",
            "line 7: '99999999999999999999' does not fit 64 bits",
        ),
        (
            ".reg .b64 %r1; ld.global.u32 %r1, [%r1 + 99999999999]; ret;",
            "line 7: address .* or an offset beyond 32 bits",
        ),
        (".reg .b32 %r1; mov.b64 {%r1, {%r1}}, %r1; ret;", "is no vector of registers and numbers"),
        ("{" * 70 + "}" * 70, "line 7: braces more than 64 deep"),
        ("}", "k: control runs past the last instruction"),
        ("ret", "line 7: no semicolon after 'ret'"),
        ("8;", "line 7: not an instruction: '8'"),
        (".reg .b32 %r1; add.u32 %r1, 5; ret;", r"line 7: 'add\.u32 %r1, 5': add has 3 operands"),
        (".reg .b32 %r1; mov.u32 %r1, 5, 6; ret;", "mov has 2 operands"),
        (".reg .b32 %r1; add.u32 5, %r1, %r1; ret;", "line 7: Immediate.* can't be written"),
        (".reg .b32 %r1; vote.sync; ret;", r"line 7: 'vote\.sync' is no form of vote\.sync: its operands"),
        (
            ".reg .b32 %r1; st.global.u32 [%r1]; ret;",
            r"line 7: 'st\.global\.u32 \[%r1\]' is no form of st\.global\.u32",
        ),
        (".reg .pred %p1; L: @%p1 bra L; M: bra M;", "line 7: from '@%p1 bra L' on no ret, exit or trap can be"),
        (".reg .b32 %r1; mov.u32 %r1, 1;", "line 7: k: control runs past the last instruction; end with ret"),
    ],
)
def test_malformed_text_is_refused_with_its_line(body: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        program_of(module(body), "k")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (".param .u64", r"line 5: '\.param \.u64' is no parameter; a '\)' ends their list"),
        (".param .b8 s[32765]", "line 5: 32765 bytes of parameters; a kernel has at most 32764"),
        (".param .align 0 .b8 s[4]", r"line 5: \.align 0; it must be a power of two"),
    ],
)
def test_malformed_parameters_are_refused_with_their_line(parameters: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        program_of(module("ret;", parameters), "k")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".visible .entry k(.param .u64 p\n{ret;", r"line 1: \.entry k: its list of parameters never ends"),
        (".visible .entry k(.param .u64 p)", r"line 1: \.entry k: its body is missing"),
        (".visible .entry k(.param .u64 p)\n{ret;", "line 2: a brace that nothing closes"),
    ],
)
def test_entry_that_does_not_end_is_refused(text: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        program_of(text, "k")


def test_malformed_instruction_that_runs_outside_of_blocks_is_refused_with_its_line() -> None:
    """Its operands are read when it is executed."""
    text = module(".reg .b32 %r1; mov.u32 %r1, 1024; atom.global.add.u32 %r1; ret;")
    with pytest.raises(PtxError, match=r"(?s)PTX line 7: 'atom\.global.*' is no form of .*\n  at CTA 0 warp 0 lanes 0"):
        word_of(text)


def test_variable_of_the_module_that_is_not_modelled_is_no_malformed_text() -> None:
    text = module(".reg .b64 %r1; mov.u64 %r1, table; ret;", head=".global .align 8 .u64 table[2] = {0, other};")
    with pytest.raises(EmulationError, match=r"table starts with 'other'; only numbers are modelled") as caught:
        program_of(text, "k")
    assert not isinstance(caught.value, PtxError)


STORE = "st.global.u32 [%rd1], %r1; ret;"
SHARED = ".reg .b32 %r<2>; .reg .b64 %rd<2>; ld.param.u64 %rd1, [p]; mov.u32 %r1, dyn; "
DYN = ".extern .shared .align 16 .b8 dyn[];"
OTHER = ".visible .entry other(.param .u64 p)\n{\n.shared .align 8 .b8 mine[384];\nret;\n}\n"


@pytest.mark.parametrize(
    ("head", "body", "address"),
    [
        (DYN + OTHER, "", 0x400),
        (f"{DYN}\n.shared .align 4 .b8 tile[64];", "", 0x400),
        (f"{DYN}\n.shared .align 4 .b8 tile[64];", "mov.u32 %r0, tile;", 0x440),
        (DYN, ".shared .b8 own[32];", 0x420),
        (DYN + OTHER, ".shared .b8 own[2][8];", 0x410),
    ],
)
def test_dynamic_shared_memory_begins_behind_the_variables_of_this_kernel_alone(
    head: str, body: str, address: int
) -> None:
    assert word_of(module(SHARED + body + STORE, head=head)) == address


FLOATS = ".reg .f32 %f<5>; .reg .b64 %rd<2>; ld.param.u64 %rd1, [p]; mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f40000000; "
FLOATS += "mov.f32 %f3, 0f40400000; "


@pytest.mark.parametrize(
    ("form", "value"),
    [
        ("max.f32 %f4, %f1, %f2, %f3", 3.0),
        ("max.f32 %f4, %f3, %f1, %f2", 3.0),
        ("min.f32 %f4, %f3, %f2, %f1", 1.0),
        ("min.ftz.f32 %f4, %f2, %f1, %f3", 1.0),
        ("max.f32 %f4, %f1, %f2", 2.0),
    ],
)
def test_minimum_and_maximum_of_two_and_three_values(form: str, value: float) -> None:
    text = module(f"{FLOATS}{form}; st.global.f32 [%rd1], %f4; ret;")
    assert np.uint32(word_of(text)).view(np.float32) == value


@pytest.mark.parametrize(("target", "kind"), [("sm_90a", "f32"), ("sm_100a", "s32")])
def test_three_values_are_for_f32_on_blackwell(target: str, kind: str) -> None:
    text = module(f".reg .b32 %f<5>; max.{kind} %f4, %f1, %f2, %f3; ret;", target=target)
    with pytest.raises(PtxError, match=f"three inputs are for f32 on sm_100 and later; the target is {target}"):
        program_of(text, "k")


def run_cuda(entry: str, tmp_path: Path, *options: str, source: str | None = None, grid: int = 2) -> Result:
    text = (KERNELS / "observed.cu").read_text() if source is None else source
    (tmp_path / "k.cu").write_text(text)
    names = ("counter", "data", "out") if entry == "obs" else ("counter", "out")
    elements = {"counter": "u32", "data": "f32", "out": "f32"}
    buffers = ", ".join(
        f'"{name}": {{"role": "update", "element": "{elements[name]}", "shape": [4], "fill": 0}}' for name in names
    )
    arguments = ", ".join(f'{{"kind": "buffer", "name": "{name}"}}' for name in names)
    launch = f'{{"entry": "{entry}", "grid": [{grid}], "block": [32], "cooperative": true, "arguments": [{arguments}]}}'
    (tmp_path / "k.json").write_text(f'{{"version": 1, "buffers": {{{buffers}}}, "launches": [{launch}]}}')
    files = ("--cuda", tmp_path / "k.cu", "--launch", tmp_path / "k.json", "--out", tmp_path)
    return CliRunner().invoke(main, ["emulate", *map(str, files), "--arch", "sm_100a", *options])


@pytest.mark.parametrize("options", [("--seeds", "4"), ("--schedule", "early"), ("--schedule", "late")])
def test_store_behind_the_read_that_found_a_write_is_ordered_behind_it(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    result = run_cuda("obs", tmp_path, *options)
    assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "out.npy")[0] == 1
    assert np.load(tmp_path / "counter.npy")[0] == 0


FENCE = 'asm volatile("fence.acq_rel.gpu;" ::: "memory");'


@pytest.mark.parametrize(("times", "why"), [(1, "the reader's"), (2, "both")])
def test_read_that_found_a_write_orders_nothing_else(times: int, why: str, tmp_path: Path) -> None:
    """Without the fence of the reader, the data behind the flag is not seen."""
    text = (KERNELS / "observed.cu").read_text()
    head, fence, tail = text.rpartition(FENCE)
    assert fence
    text = head + tail if times == 1 else text.replace(FENCE, "")
    result = run_cuda("obs", tmp_path, "--seeds", "3", source=text)
    assert result.exit_code == FAULT
    assert "race: read of data + 0" in result.output


def test_store_without_a_read_that_found_the_write_races_with_it(tmp_path: Path) -> None:
    text = (KERNELS / "observed.cu").read_text().replace("while (v == 0)", "while (false)")
    result = run_cuda("obs", tmp_path, "--schedule", "late", source=text)
    assert result.exit_code == FAULT
    assert "race: " in result.output


def test_loop_that_gives_up_polling_gives_up(tmp_path: Path) -> None:
    result = run_cuda("patience", tmp_path, "--seeds", "2", grid=1)
    assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "out.npy")[0] == 2


def test_loop_that_never_gives_up_is_a_deadlock_still(tmp_path: Path) -> None:
    text = (KERNELS / "observed.cu").read_text().replace("i < 64 && v == 0", "v == 0")
    result = run_cuda("patience", tmp_path, source=text, grid=1)
    assert result.exit_code == FAULT
    assert "deadlock: no warp can go on" in result.output
    assert "waits for a change of counter + 0 from 0" in result.output
    assert MOST_POLLS >= 512


COUNTING = (
    ".reg .b32 %r1; .reg .pred %p1; mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra L; ret;"
)


def emulate_text(text: str, tmp_path: Path, *options: str) -> Result:
    (tmp_path / "k.ptx").write_text(text)
    launch = '{"grid": [1], "block": [32], "arguments": [{"kind": "buffer", "name": "o"}]}'
    buffers = '{"o": {"role": "update", "element": "u32", "shape": [1], "fill": 0}}'
    (tmp_path / "k.json").write_text(f'{{"version": 1, "buffers": {buffers}, "launches": [{launch}]}}')
    files = ("--ptx", tmp_path / "k.ptx", "--launch", tmp_path / "k.json", "--entry", "k")
    return CliRunner().invoke(main, ["emulate", *map(str, files), *options])


def test_launch_beyond_the_limit_of_instructions_is_a_fault(tmp_path: Path) -> None:
    result = emulate_text(module(COUNTING), tmp_path, "--limit-instructions", "5000")
    assert result.exit_code == FAULT
    assert "deadlock: the launch still runs after" in result.output


def test_run_beyond_the_limit_of_seconds_is_given_up_without_a_verdict(tmp_path: Path) -> None:
    """So short that no machine makes it."""
    result = emulate_text(module(COUNTING), tmp_path, "--limit-seconds", "1e-9")
    assert result.exit_code == GIVEN_UP
    assert (
        "given up after 1e-09 s (--limit-seconds), neither clean nor at fault; 0 warp-instructions ran" in result.output
    )


def test_limit_of_seconds_is_an_option_of_a_sequence() -> None:
    out = HostBuffer("o", "update", "u32", np.zeros(4, np.uint32))
    launch = KernelLaunch("k", LaunchShape((1, 1, 1), (32, 1, 1)), (BufferArgument("o"),))
    with pytest.raises(LimitError):
        run_sequence({"k": program_of(module("ret;"), "k")}, [launch], {"o": out}, Options(seconds_limit=0.0))


@pytest.mark.parametrize(
    ("body", "status"), [("bogus", BAD_INPUT), (".reg .b32 %r1; mul24.lo.u32 %r1, %r1, %r1; ret;", NOT_MODELLED)]
)
def test_malformed_text_and_unknown_forms_have_statuses_of_their_own(body: str, status: int, tmp_path: Path) -> None:
    result = emulate_text(module(body), tmp_path)
    assert (result.exit_code, "PTX line 7" in result.output) == (status, True)


def test_text_of_absurd_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cakegen.cli.emulate_files.MOST_TEXT_BYTES", 50)
    result = emulate_text(module("ret;"), tmp_path)
    assert result.exit_code == BAD_INPUT
    assert "bytes; a PTX or a CUDA file of at most 50 is read" in result.output


def test_launch_file_of_absurd_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cakegen.spec.launch_file.MOST_FILE_BYTES", 100)
    (tmp_path / "k.json").write_text("{" + " " * 100)
    with pytest.raises(SpecError, match="101 bytes; a launch file of at most 100 is read"):
        parse_launch_file(tmp_path / "k.json")


def test_buffers_of_absurd_size_are_refused_before_they_are_made(tmp_path: Path) -> None:
    shape = [2**31 - 1] * 8
    buffers = (
        f'{{"o": {{"role": "write", "element": "f64", "shape": {shape}}}, "p": {{"role": "write", "element": "u8", '
    )
    buffers += '"shape": [4]}}'
    launches = '[{"grid": [1], "block": [1]}]'
    (tmp_path / "k.json").write_text(f'{{"version": 1, "buffers": {buffers}, "launches": {launches}}}')
    with pytest.raises(
        SpecError, match=r"k\.json: buffers: \d+ bytes together, o alone \d+; at most 268435456 are made"
    ):
        parse_launch_file(tmp_path / "k.json")


@pytest.mark.parametrize(
    ("element", "value"), [("f32", 1e39), ("f32", 10**400), ("f16", 1e6), ("bf16", 1e39), ("f64", 10**400), ("u8", 256)]
)
def test_scalar_out_of_range_is_refused(element: str, value: float) -> None:
    with pytest.raises(LaunchError, match=f"a scalar of type {element} must be"):
        scalar_bytes(element, value)
    assert len(scalar_bytes("bf16", float("inf"))) == 2


def header(text: str, version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text.encode()


F4 = "{'descr': '<f4', 'fortran_order': %s, 'shape': %s, }"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is no whole .npy file: "),
        (b"PK\x03\x04" + bytes(40), "is no whole .npy file: the magic string is not correct"),
        (header("{'descr': "), "is no whole .npy file: "),
        (
            header("{'descr': 'O', 'fortran_order': False, 'shape': (1,), }"),
            r"holds object \[1\]; elements of type f32",
        ),
        (header(F4 % (False, "(2, 3)")) + bytes(20), r"its header says \[2, 3\] of float32, and 20 bytes follow"),
        (header(F4 % (False, "(99999999999, 99999999999)")), "and 0 bytes follow"),
        (header(F4 % (False, "(-1,)")), r"its header says \[-1\]"),
        (header(F4 % (False, "(0,)")), r"holds float32 \[0\]"),
        (header("(" * 9000), "is no whole .npy file: "),
        (header(F4 % (False, "(1,)"), b"\x03\x00"), r"its format is \(3, 0\); \(1, 0\) and \(2, 0\) are read"),
    ],
)
def test_damaged_array_is_refused_before_memory_is_taken_for_it(raw: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(raw)
    with pytest.raises(LaunchError, match=message):
        read_array("x", "f32", tmp_path / "x.npy")


@pytest.mark.parametrize("make", [np.ascontiguousarray, np.asfortranarray])
def test_whole_array_is_read_in_its_order(make: Callable[..., Any], tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.save(tmp_path / "x.npy", make(values))
    found = read_array("x", "f32", tmp_path / "x.npy")
    assert (found == values).all()
    assert found.flags.c_contiguous


def test_parts_of_a_fill_are_those_of_one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {fill: fill_array("f32", (7, 3), fill, "x") for fill in ("index", "normal")}
    monkeypatch.setattr("cakegen.emulator.launches.arrays._PART_ELEMS", 4)
    for fill, values in whole.items():
        assert (fill_array("f32", (7, 3), fill, "x") == values).all()
    assert (whole["index"].ravel() == np.arange(21)).all()
