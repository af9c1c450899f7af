"""Local memory, functions, variables of a module, tables of branches, and parameters through registers."""

from __future__ import annotations

import numpy as np
import pytest
from support.emulator.unit_kernels import run_text

from cakegen.emulator.faults import Fault
from cakegen.emulator.launches.launch import program_of
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.emulator.machine.memory import Buffer, GlobalMemory
from cakegen.emulator.machine.residency import LaunchShape
from cakegen.errors import EmulationError

pytestmark = pytest.mark.emulator

HEAD = """.version 9.0
.target sm_100a
.address_size 64
{module}
.visible .entry unit(.param .u64 results, .param .u64 values)
{{
.reg .b64 %rd<20>;
.reg .b32 %r<20>;
.reg .b16 %rs<8>;
.reg .pred %p<8>;
ld.param.u64 %rd1, [results];
ld.param.u64 %rd2, [values];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 16;
add.u64 %rd1, %rd1, %rd3;
add.u64 %rd2, %rd2, %rd3;
ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd2];
"""


def run(body: str, module: str = "", *, threads: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Results and values, four words a thread; `%r1` is its number, `%r4` to `%r7` are its values."""
    values = np.random.default_rng(1).integers(0, 1 << 32, (threads, 4)).astype(np.uint32)
    results = np.zeros((threads, 4), np.uint32)
    run_text(HEAD.format(module=module) + body + "\nret;\n}\n", results, values, threads)
    return results, values


DEPOT = """
.local .align 16 .b8 __local_depot0[64];
.reg .b64 %SP;
.reg .b64 %SPL;
mov.b64 %SPL, __local_depot0;
cvta.local.u64 %SP, %SPL;
"""


def test_local_memory_is_each_threads_own() -> None:
    """Indexed by a thread's own number, through its window and through generic addresses."""
    results, values = run(
        f"""{DEPOT}
        st.local.v4.b32 [%SPL+16], {{%r4, %r5, %r6, %r7}};
        and.b32 %r8, %r1, 3;
        mul.wide.u32 %rd4, %r8, 4;
        add.u64 %rd5, %SPL, %rd4;
        ld.local.u32 %r9, [%rd5+16];
        add.u64 %rd6, %SP, %rd4;
        st.u32 [%rd6+32], %r9;
        ld.u32 %r10, [%rd6+32];
        ld.local.b32 %r11, [%rd5+32];
        ld.local.s8 %r12, [%SPL+16];
        isspacep.local %p1, %SP;
        isspacep.global %p2, %rd1;
        isspacep.shared %p3, %SP;
        selp.b32 %r12, %r12, 0, %p1;
        selp.b32 %r12, %r12, 0, %p2;
        selp.b32 %r12, 0, %r12, %p3;
        st.global.v4.b32 [%rd1], {{%r9, %r10, %r11, %r12}};
        """,
        threads=64,
    )
    chosen = values[np.arange(64), np.arange(64) % 4]
    assert (results[:, :3] == chosen[:, None]).all()
    assert (results[:, 3] == values.view(np.int8)[:, 0].astype(np.int32).view(np.uint32)).all()


@pytest.mark.parametrize(
    ("line", "message"),
    [("ld.local.b32 %r9, [%SPL+64]", "a thread has"), ("ld.local.b32 %r9, [%SPL+2]", "not aligned")],
)
def test_local_access_that_is_outside_or_askew_is_a_fault(line: str, message: str) -> None:
    with pytest.raises(Fault, match=message) as found:
        run(f"{DEPOT} {line};")
    assert found.value.kind == "out-of-bounds"


FUNCTIONS = """
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 vprintf_param_0, .param .b64 vprintf_param_1);
.func (.param .b32 func_retval0) twice(.param .b32 twice_param_0);
.func (.param .align 8 .b8 func_retval0[8]) sum_and_product(.param .b32 a, .param .b32 b)
{
.reg .b32 %r<8>;
.reg .b64 %rd1;
.reg .pred %p1;
ld.param.b32 %r1, [a];
ld.param.b32 %r2, [b];
setp.gt.u32 %p1, %r1, %r2;
@%p1 bra LARGER;
add.u32 %r3, %r1, %r2;
mul.lo.u32 %r4, %r1, %r2;
st.param.v2.b32 [func_retval0+0], {%r3, %r4};
ret;
LARGER:
{
.param .b32 param0;
st.param.b32 [param0+0], %r1;
.param .b32 retval0;
call.uni (retval0), twice, (param0);
ld.param.b32 %r5, [retval0+0];
}
st.param.b32 [func_retval0], %r5;
st.param.b32 [func_retval0+4], %r2;
ret;
}
.func (.param .b32 func_retval0) twice(.param .b32 twice_param_0)
{
.reg .b32 %r<4>;
.local .align 4 .b8 depot[4];
ld.param.b32 %r1, [twice_param_0];
st.local.b32 [depot], %r1;
ld.local.b32 %r2, [depot];
add.u32 %r3, %r1, %r2;
st.param.b32 [func_retval0], %r3;
ret;
}
"""


def test_functions_run_in_place_of_their_calls() -> None:
    results, values = run(
        """
        mov.u32 %r8, 0;
        mov.u32 %r9, 0;
        setp.lt.u32 %p1, %r1, 20;
        {
        .param .b32 param0;
        .param .b32 param1;
        .param .align 8 .b8 retval0[8];
        st.param.b32 [param0], %r4;
        st.param.b32 [param1], %r5;
        st.param.v2.b32 [retval0], {%r8, %r9};
        @%p1 call (retval0), sum_and_product, (param0, param1);
        ld.param.v2.b32 {%r8, %r9}, [retval0];
        }
        { // callseq 1, 0
        .param .b32 param0;
        st.param.b32 [param0], %r8;
        .param .b32 retval0;
        call.uni (retval0),
        twice,
        (
        param0
        );
        ld.param.b32 %r10, [retval0];
        }
        { .param .b64 param0; .param .b64 param1; .param .b32 retval0;
        st.param.b64 [param0], %rd1; st.param.b64 [param1], 0;
        call.uni (retval0), vprintf, (param0, param1); ld.param.b32 %r11, [retval0]; }
        st.global.v4.b32 [%rd1], {%r8, %r9, %r10, %r11};
        """,
        FUNCTIONS,
    )
    a, b = values[:, 0], values[:, 1]
    first = np.where(a > b, 2 * a, a + b)
    second = np.where(a > b, b, a * b)
    called = np.arange(32) < 20
    first, second = np.where(called, first, 0).astype(np.uint32), np.where(called, second, 0).astype(np.uint32)
    assert (results == np.stack([first, second, 2 * first, 0 * first], 1)).all()


CONSTANT_TEXTS = """
.global .align 1 .b8 __unnamed_1[5] = {117, 110, 105, 116};
.global .align 1 .b8 $str[6] = {120, 32, 60, 32, 51};
.global .align 1 .b8 $str$1[5] = {97, 46, 99, 117};
.extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
"""


def test_assertion_that_fails_is_a_fault_in_its_own_words() -> None:
    body = """
        mov.b64 %rd4, $str; cvta.global.u64 %rd4, %rd4;
        mov.b64 %rd5, $str$1; cvta.global.u64 %rd5, %rd5;
        mov.b64 %rd6, __unnamed_1; cvta.global.u64 %rd6, %rd6;
        setp.lt.u32 %p1, %r1, LIMIT;
        @%p1 bra FINE;
        { .param .b64 param0; .param .b64 param1; .param .b32 param2; .param .b64 param3; .param .b64 param4;
        st.param.b64 [param0], %rd4; st.param.b64 [param1], %rd5; st.param.b32 [param2], 77;
        st.param.b64 [param3], %rd6; st.param.b64 [param4], 1;
        call.uni __assertfail, (param0, param1, param2, param3, param4); }
        trap;
        FINE:
        st.global.v4.b32 [%rd1], {%r4, %r5, %r6, %r7};
        """
    results, values = run(body.replace("LIMIT", "32"), CONSTANT_TEXTS)
    assert (results == values).all()
    with pytest.raises(Fault, match=r"assertion `x < 3` failed at a\.cu:77 in unit") as found:
        run(body.replace("LIMIT", "3"), CONSTANT_TEXTS)
    assert found.value.kind == "assert"


VARIABLES = """
.visible .global .align 4 .u32 counter = 7;
.const .align 8 .f32 table[4] = {0f3F800000, 2.5, -3.0};
.global .align 2 .b16 grid[2][2] = {{1, 2}, {3, -1}};
.global .align 8 .u64 unused = generic(counter);
"""


def test_variables_start_as_the_module_says() -> None:
    results, _ = run(
        """
        mov.u64 %rd4, table;
        and.b32 %r8, %r1, 3;
        mul.wide.u32 %rd5, %r8, 4;
        add.u64 %rd6, %rd4, %rd5;
        ld.const.b32 %r9, [%rd6];
        ld.const.b32 %r10, [table+4];
        mul.wide.u32 %rd5, %r8, 2;
        mov.u64 %rd4, grid;
        cvta.global.u64 %rd4, %rd4;
        add.u64 %rd6, %rd4, %rd5;
        ld.s16 %r11, [%rd6];
        ld.global.u32 %r12, [counter];
        st.global.v4.b32 [%rd1], {%r9, %r10, %r11, %r12};
        """,
        VARIABLES,
    )
    table = np.array([1, 2.5, -3, 0], np.float32)
    lane = np.arange(32) % 4
    assert (results[:, 0] == table[lane].view(np.uint32)).all()
    assert (results[:, 1].view(np.float32) == 2.5).all()
    assert results[:, 2].view(np.int32).tolist() == [[1, 2, 3, -1][i] for i in lane]
    assert (results[:, 3] == 7).all()


def launch_twice(memory: list[Buffer], results: np.ndarray) -> None:
    body = "atom.global.add.u32 %r8, [counter], 1;\nst.global.b32 [%rd1], %r8;\nret;\n}\n"
    program = program_of(HEAD.format(module=VARIABLES) + body, "unit")
    shape = LaunchShape((1, 1, 1), (32, 1, 1), (1, 1, 1), 0, False)
    for number in range(2):
        Machine(program, GlobalMemory(memory, number), shape, [1 << 32, 2 << 32], Adversary("early")).run()


def test_variables_keep_their_value_from_launch_to_launch_and_start_anew_in_each_run() -> None:
    for _ in range(2):
        results, values = np.zeros((32, 4), np.uint32), np.zeros((32, 4), np.uint32)
        memory = [
            Buffer("results", 1 << 32, results.nbytes, host=results.ctypes.data),
            Buffer("values", 2 << 32, values.nbytes, read_only=True, host=values.ctypes.data),
        ]
        launch_twice(memory, results)
        assert sorted(results[:, 0].tolist()) == list(range(39, 71))


def test_store_to_a_constant_is_a_fault() -> None:
    with pytest.raises(Fault, match="is written; it is an input"):
        run("mov.u64 %rd4, table; st.global.b32 [%rd4], %r4;", VARIABLES)


def test_branch_by_index_takes_the_target_of_each_lane() -> None:
    results, _ = run(
        """
        and.b32 %r8, %r1, 3;
        mov.u32 %r9, 0;
        $L_table:
        .branchtargets
        ONE, TWO, ONE,
        THREE;
        brx.idx %r8, $L_table;
        ONE: add.u32 %r9, %r9, 1; bra DONE;
        TWO: add.u32 %r9, %r9, 20; bra DONE;
        THREE: add.u32 %r9, %r9, 300;
        DONE:
        st.global.b32 [%rd1], %r9;
        """
    )
    assert results[:, 0].tolist() == [[1, 20, 1, 300][lane % 4] for lane in range(32)]


STRUCTS = """.version 9.0
.target sm_100a
.address_size 64
.visible .entry unit(.param .u64 results, .param .align 8 .b8 values[64])
{
.reg .b64 %rd<20>;
.reg .b32 %r<20>;
ld.param.u64 %rd1, [results];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 16;
add.u64 %rd1, %rd1, %rd3;
mov.b64 %rd4, values;
and.b32 %r2, %r1, 3;
mul.wide.u32 %rd5, %r2, 16;
add.u64 %rd6, %rd4, %rd5;
ld.param.v2.b32 {%r4, %r5}, [%rd6];
ld.param.b32 %r6, [%rd6+12];
cvta.param.u64 %rd7, %rd6;
ld.u32 %r7, [%rd7+8];
st.global.v4.b32 [%rd1], {%r4, %r5, %r7, %r6};
ret;
}
"""


def test_arrays_of_structs_in_parameters_are_read_through_registers() -> None:
    values = np.arange(100, 116, dtype=np.uint32)
    results = np.zeros((32, 4), np.uint32)
    memory = GlobalMemory([Buffer("results", 1 << 32, results.nbytes, output=True, host=results.ctypes.data)])
    shape = LaunchShape((1, 1, 1), (32, 1, 1), (1, 1, 1), 0, False)
    Machine(program_of(STRUCTS, "unit"), memory, shape, [1 << 32, values.tobytes()], Adversary("early")).run()
    assert (results == values.reshape(4, 4)[np.arange(32) % 4]).all()


@pytest.mark.parametrize(
    ("body", "module", "message"),
    [
        ("call.uni missing, ();", "", "missing is called, which the module does not define"),
        ("call.uni again, ();", ".func again() { call.uni again, (); ret; }", "again calls itself"),
        ("call (%r4), %rd4, (%r5), proto;", "", "an indirect call is not modelled"),
        (
            "call (%r4), one, (%r5);",
            ".func (.reg .b32 x) one(.reg .b32 y) { ret; }",
            "with other than .param variables",
        ),
        ("call.uni one, ();", ".func one(.param .b32 a) { ret; }", "one has 1 results and parameters"),
        ("@%p1 brx.idx %r4, T; T: .branchtargets T;", "", "a guarded brx.idx is not modelled"),
        ("brx.idx %r4, MISSING;", "", "no .branchtargets list MISSING"),
        ("mov.u64 %rd4, unused;", VARIABLES, "only numbers are modelled"),
        ("mov.u64 %rd4, many;", ".global .align 4 .b32 many[2] = {1, 2, 3};", "many has 8 bytes"),
        (".local .align 4 .b8 big[600000];", "", "a thread has at most"),
        ("mov.u64 %rd4, nobody;", "", "nothing is called nobody"),
        ("call.uni (;", "", "a call is"),
    ],
)
def test_what_a_module_can_not_have_is_refused_with_its_line(body: str, module: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message) as found:
        run(body, module)
    assert "PTX line" in str(found.value)
