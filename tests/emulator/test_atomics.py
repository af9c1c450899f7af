"""`atom` and `red` of all types, in global and shared memory (PTX ISA 9.7.13.5, 9.7.13.6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cakegen.emulator.faults import Fault
from cakegen.emulator.machine.adversary import Adversary
from cakegen.emulator.machine.machine import Machine
from cakegen.errors import EmulationError

pytestmark = pytest.mark.emulator

Launch = Callable[..., Machine]
Make = Callable[..., np.ndarray]
SCHEDULES = [("early", 0), ("late", 0), ("random", 1)]

# kind -> (numpy's type, letter of a register's constraint, its C++ type)
KINDS = {
    "u32": ("u4", "r", "u32"),
    "s32": ("i4", "r", "u32"),
    "b32": ("u4", "r", "u32"),
    "u64": ("u8", "l", "unsigned long long"),
    "s64": ("i8", "l", "unsigned long long"),
    "b64": ("u8", "l", "unsigned long long"),
    "f32": ("f4", "f", "float"),
    "f64": ("f8", "d", "double"),
    "b16": ("u2", "h", "u16"),
    "f16": ("f2", "h", "u16"),
}
SPACES = ["global", "shared", "shared::cta", "shared::cluster", ""]


def atomic(opcode: str, kind: str, space: str, every: int, operands: int) -> str:
    """Lane t works on word `t / every`; what it found goes to `found`, the words at the end to `words`."""
    _, letter, cpp = KINDS[kind]
    inside = space.startswith("shared") or space == ""
    address = f'"{"r" if space.startswith("shared") else "l"}"(at)'
    at = {
        "": "(unsigned long long)__cvta_shared_to_generic(smem) + W * (t / EVERY)",
        "global": "words + t / EVERY",
    }.get(space, "smem + W * (t / EVERY)")
    at = at.replace("EVERY", str(every)).replace("W", f"(u32)sizeof({cpp})")
    values = "".join(f', "{letter}"(given[{i} * 32 + t])' for i in range(operands))
    names = ", ".join(f"%{2 + i}" for i in range(operands))
    bits = 8 * int(KINDS[kind][0][1:])
    here = f"smem + (u32)sizeof({cpp}) * t"
    move = f'ASM("ld.shared.b{bits} %0, [%1];" : "={letter}"(word) : "r"({here}) : "memory");'
    fill = f'ASM("st.shared.b{bits} [%0], %1;" :: "r"({here}), "{letter}"(words[t]) : "memory");'
    return f"""
    #define ASM(...) asm volatile(__VA_ARGS__)
    extern "C" __global__ void kernel_test({cpp}* found, {cpp}* words, const {cpp}* given) {{
        const u32 t = threadIdx.x, smem = smem_base();
        {fill if inside else ""}
        __syncwarp();
        const auto at = {at};
        {cpp} old;
        ASM("{opcode} %0, [%1], {names};" : "={letter}"(old) : {address}{values} : "memory");
        found[t] = old;
        __syncwarp();
        {f"{cpp} word; {move} words[t] = word;" if inside else ""}
    }}"""


def expected(change: Callable[..., Any], words: np.ndarray, given: np.ndarray, every: int) -> tuple[list, list]:
    """(what each lane finds, the words at the end) of lanes one after the other."""
    words = words.copy()
    found = []
    for lane in range(32):
        found.append(words[lane // every])
        words[lane // every] = change(words[lane // every], *(row[lane] for row in given))
    return np.array(found, words.dtype).tolist(), words.tolist()


OPERATIONS: list[tuple[str, str, Callable[..., Any]]] = [
    ("add", "u32", lambda old, b: old + b),
    ("add", "s32", lambda old, b: old + b),
    ("add", "u64", lambda old, b: old + b),
    ("add", "f32", lambda old, b: np.float32(old + b)),
    ("add", "f64", lambda old, b: old + b),
    ("min", "s32", min),
    ("max", "u32", max),
    ("min", "u64", min),
    ("max", "s64", max),
    ("inc", "u32", lambda old, b: 0 if old >= b else old + 1),
    ("dec", "u32", lambda old, b: b if old == 0 or old > b else old - 1),
    ("and", "b32", lambda old, b: old & b),
    ("or", "b64", lambda old, b: old | b),
    ("xor", "b32", lambda old, b: old ^ b),
    ("exch", "b32", lambda old, b: b),
    ("exch", "b64", lambda old, b: b),
    ("cas", "b32", lambda old, b, c: c if old == b else old),
    ("cas", "b64", lambda old, b, c: c if old == b else old),
    ("cas", "b16", lambda old, b, c: c if old == b else old),
    ("add.noftz", "f16", lambda old, b: np.float16(old + b)),
]


def operands(kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(5)
    dtype = KINDS[kind][0]
    count = 2 if name == "cas" else 1
    if dtype[0] == "f":
        return (draw.standard_normal(32)).astype(dtype), draw.standard_normal((1, 32)).astype(dtype)
    low = -6 if dtype[0] == "i" else 0
    return draw.integers(low, 7, 32).astype(dtype), draw.integers(low, 7, (count, 32)).astype(dtype)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("name", "kind", "change"), OPERATIONS, ids=[f"{n}.{k}" for n, k, _ in OPERATIONS])
def test_atomic_finds_and_changes_words(
    launch: Launch, array: Make, name: str, kind: str, change: Callable[..., Any], space: str, every: int
) -> None:
    words, given = operands(kind, name)
    with np.errstate(over="ignore"):
        found, after = expected(change, words, given, every)
    out, memory = array(np.zeros_like(words)), array(words)
    opcode = f"atom.{space}.{name}.{kind}"
    launch(atomic(opcode, kind, space, every, len(given)), out, memory, array(given), smem=1024)
    assert out.tolist() == found
    assert memory.tolist() == after


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("order", ["", ".relaxed.cta", ".acq_rel.gpu", ".release.cluster"])
def test_atomic_of_each_space_and_order(launch: Launch, array: Make, space: str, order: str) -> None:
    words, given = operands("u32", "add")
    found, after = expected(lambda old, b: old + b, words, given, 2)
    out, memory = array(np.zeros_like(words)), array(words)
    opcode = f"atom{order}{'.' + space if space else ''}.add.u32"
    launch(atomic(opcode, "u32", space, 2, 1), out, memory, array(given), smem=1024)
    assert (out.tolist(), memory.tolist()) == (found, after)


VECTOR = """
#define ASM(...) asm volatile(__VA_ARGS__)
extern "C" __global__ void kernel_test(u32* found, u32* words, const u32* given) {
    const u32 t = threadIdx.x;
    ASM("{ .reg .b32 a, b, c, d; .reg .b16 h<8>; BODY }" :: "l"(words + 4 * (t / 2)), "l"(given + 4 * t),
        "l"(found + 4 * t) : "memory");
}"""


def halves(start: int, count: int) -> str:
    return ", ".join(f"h{start + i}" for i in range(count))


VECTORS = [
    ("v4.f32", "f32", 4, "a, b, c, d"),
    ("v2.f32", "f32", 2, "a, b"),
    ("v2.f16x2", "f16", 4, "a, b"),
    ("v4.bf16x2", "bf16", 8, "a, b, c, d"),
    ("v4.f16", "f16", 4, halves(0, 4)),
    ("v8.bf16", "bf16", 8, halves(0, 8)),
]


@pytest.mark.parametrize("root", ["atom", "red"])
@pytest.mark.parametrize(
    ("name", "form", "kind", "count", "names"),
    [(name, *case) for case in VECTORS for name in ("add", "min", "max") if name == "add" or case[1] != "f32"],
)
def test_vector_of_floats(
    launch: Launch, array: Make, root: str, name: str, form: str, kind: str, count: int, names: str
) -> None:
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    size = 4 * count // (1 if kind == "f32" else 2)
    draw = torch.manual_seed(3)
    words = torch.randn((32, 16 // dtype.itemsize), generator=draw).to(dtype)
    given = torch.randn((32, 16 // dtype.itemsize), generator=draw).to(dtype)
    after, seen = words.clone(), torch.zeros_like(words)
    combine = {"add": torch.add, "min": torch.minimum, "max": torch.maximum}[name]
    for lane in range(32):
        row = slice(lane // 2, lane // 2 + 1), slice(0, count)
        seen[lane, :count] = after[row][0]
        after[row] = combine(after[row], given[lane : lane + 1, :count])
    registers = names.split(", ")
    step = size // len(registers)
    load = "; ".join(f"ld.global.b{8 * step} {each}, [%1 + {i * step}]" for i, each in enumerate(registers))
    keep = "; ".join(f"st.global.b{8 * step} [%2 + {i * step}], {each}" for i, each in enumerate(registers))
    suffix = ".noftz" if name == "add" and kind != "f32" else ""
    target = f"{{{names}}}, " if root == "atom" else ""
    body = f"{load}; {root}.global.{name}{suffix}.{form} {target}[%0], {{{names}}}; {keep if root == 'atom' else ''};"
    memory, out = array(words.view(torch.uint8).numpy()), array(np.zeros((32, 16)), np.uint8)
    launch(VECTOR.replace("BODY", body.replace("; ;", ";")), out, memory, array(given.view(torch.uint8).numpy()))
    assert memory.tolist() == after.view(torch.uint8).tolist()
    if root == "atom":
        assert out[:, :size].tolist() == seen.view(torch.uint8)[:, :size].tolist()


def test_wide_exchange_and_comparison(launch: Launch, array: Make) -> None:
    body = """.reg .b128 w, n, o; .reg .b64 x, y; ld.global.v2.b64 {x, y}, [%1]; mov.b128 w, {x, y};
        atom.global.exch.b128 o, [%0], w; mov.b128 {x, y}, o; st.global.v2.b64 [%2], {x, y};
        mov.b64 x, 7; mov.b64 y, 8; mov.b128 n, {x, y}; atom.global.cas.b128 o, [%0], w, n;"""
    body = " ".join(body.split())
    words, given = array(np.arange(64), np.uint64), array(np.arange(64) + 100, np.uint64)
    out = array(np.zeros(64), np.uint64)
    source = VECTOR.replace("BODY", body).replace("t / 2", "t")
    launch(source, out, words, given)
    assert out.tolist() == list(range(64))
    assert words.tolist() == [7, 8] * 32


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda value: f"{value[0]}{value[1]}")
def test_counter_in_shared_memory_hands_over(launch: Launch, array: Make, schedule: tuple[str, int]) -> None:
    """The last warp to come reads what the others stored: release, acquire."""
    source = """
    #define ASM(...) asm volatile(__VA_ARGS__)
    extern "C" __global__ void kernel_test(u32* out) {
        const u32 t = threadIdx.x, smem = smem_base(), warp = t / 32;
        if (t == 0) ASM("st.shared.u32 [%0], 0;" :: "r"(smem) : "memory");
        __syncthreads();
        ASM("st.shared.u32 [%0], %1;" :: "r"(smem + 16 + 4 * t), "r"(t) : "memory");
        __syncwarp();
        u32 before = 0;
        if (t % 32 == 0) ASM("atom.acq_rel.cta.shared.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(smem) : "memory");
        __syncwarp();
        before = __shfl_sync(~0u, before, 0);
        if (before == 3) for (u32 i = 0; i < 4; ++i) {
            u32 word;
            ASM("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(smem + 16 + 4 * (32 * i + t % 32)) : "memory");
            out[32 * i + t % 32] = word;
        }
    }"""
    out = array(np.zeros(128), np.uint32)
    launch(source, out, block=128, smem=1024, adversary=Adversary(*schedule))
    assert out.tolist() == list(range(128))
    with pytest.raises(Fault, match=r"^race"):
        launch(source.replace("acq_rel", "relaxed"), out, block=128, smem=1024, adversary=Adversary(*schedule))


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [("atom.global.add.s64", "s64"), ("atom.global.max.f32", "f32"), ("atom.shared.inc.u64", "u64")],
)
def test_form_that_the_isa_lacks_is_refused(launch: Launch, array: Make, opcode: str, kind: str) -> None:
    words, given = operands(kind, "add")
    source = atomic(opcode, kind, opcode.split(".")[1], 1, 1)
    with pytest.raises(EmulationError, match="opcode form unknown"):
        launch(source, array(np.zeros_like(words)), array(words), array(given), smem=1024)
