"""A PTX kernel as records. `parse` makes them; nothing here knows what an instruction does.

Registers are flat: every declaration, in whatever scope, has its own index, so that shadowed names stay apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cakegen.errors import PtxError

# What Python raises where an instruction has other operands, types or modifiers than its form takes.
MALFORMED = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

# Bytes of the register banks by their declared type. A bank says how a register is kept, not what an instruction
# makes of it: `f32` operations on `b32` registers are legal.
BANK_BYTES = {"pred": 1, "b8": 1, "b16": 2, "b32": 4, "f32": 4, "b64": 8, "f64": 8, "b128": 16}


@dataclass(frozen=True)
class Register:
    """One register: its flat index, its name as written, and its bank."""

    index: int
    name: str
    bank: str


@dataclass(frozen=True)
class Immediate:
    """A number. A float immediate (`0f…`, `0d…`) holds its bits and `float_bytes` 4 or 8; an integer has 0."""

    value: int
    float_bytes: int = 0


@dataclass(frozen=True)
class Special:
    """A special register, without the percent sign: `tid.x`, `laneid`."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A named variable or parameter."""

    name: str


@dataclass(frozen=True)
class Label:
    """A branch target; `target` is an instruction index, filled in once the whole body is known."""

    name: str
    target: int = -1


@dataclass(frozen=True)
class Negated:
    """`!%p`."""

    register: Register


@dataclass(frozen=True)
class Sink:
    """`_`: a result that nobody wants."""


@dataclass(frozen=True)
class Vector:
    """`{a, b, …}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """`%r1|%p1`: two results."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Address:
    """`[base + offset]`, or `[base, {coordinates}]` of a tensor."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


Operand = Register | Immediate | Special | Symbol | Label | Negated | Sink | Vector | Pair | Address


@dataclass(frozen=True)
class Place:
    """Where an instruction comes from: the PTX line, and (file, line) pairs from the innermost inlined call out.

    `span` is where its text starts and ends in the PTX, without the semicolon.
    """

    ptx_line: int
    source: tuple[tuple[str, int], ...] = ()
    span: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        """`device_common.cuh:265 in kernel.cu:327 (PTX line 732)`."""
        if not self.source:
            return f"PTX line {self.ptx_line}"
        calls = " in ".join(f"{file}:{line}" for file, line in self.source)
        return f"{calls} (PTX line {self.ptx_line})"


@dataclass(frozen=True)
class Instruction:
    """One instruction. `parts` is the opcode cut at its dots: `("ld", "shared", "v4", "b32")`."""

    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    guard_negated: bool
    text: str
    place: Place

    @property
    def root(self) -> str:
        """First part of the opcode."""
        return self.parts[0]

    @property
    def opcode(self) -> str:
        """The opcode as written."""
        return ".".join(self.parts)


def malformed(instruction: Instruction, error: BaseException) -> PtxError:
    """The error for an instruction that is no form of its opcode.

    Parameters
    ----------
    error
        One of `MALFORMED`.
    """
    text = instruction.text if len(instruction.text) <= 120 else f"{instruction.text[:117]}..."
    return PtxError(
        f"{instruction.place}: {text!r} is no form of {instruction.opcode}: its operands, types or modifiers do not "
        f"fit ({type(error).__name__}: {error})"
    )


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter and its place in the parameter block."""

    name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class SharedVariable:
    """A variable in shared memory; `num_bytes` 0: the dynamic part."""

    name: str
    align: int
    num_bytes: int


@dataclass(frozen=True)
class LocalVariable:
    """A variable in each thread's own memory: a depot of the compiler, or a `.param` of a call."""

    name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class ModuleVariable:
    """A variable of the module in global or constant memory.

    Parameters
    ----------
    module
        A digest of the module's text: the same variable for all kernels of one module.
    content
        Its bytes when the module is loaded.
    """

    name: str
    module: str
    constant: bool
    content: bytes


@dataclass(frozen=True)
class Kernel:
    """One entry of a module, ready to be translated.

    Parameters
    ----------
    banks
        Bank of every register, by index.
    labels
        Instruction indices that something branches to, or that a label names.
    cluster
        CTAs of a cluster as the text demands it, or None where the launch decides.
    """

    name: str
    target: str
    parameters: tuple[Parameter, ...]
    banks: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    labels: frozenset[int]
    shared: tuple[SharedVariable, ...]
    max_threads: tuple[int, ...] = ()
    cluster: tuple[int, int, int] | None = None
    files: dict[int, str] = field(default_factory=dict)
    local: tuple[LocalVariable, ...] = ()
    variables: tuple[ModuleVariable, ...] = ()

    @property
    def local_bytes(self) -> int:
        """Bytes of a thread's own memory."""
        return max((each.offset + each.num_bytes for each in self.local), default=0)

    def parameter(self, name: str) -> Parameter | None:
        """The parameter of that name."""
        return next((p for p in self.parameters if p.name == name), None)

    def opcodes(self) -> frozenset[str]:
        """Every opcode form of the kernel."""
        return frozenset(instruction.opcode for instruction in self.instructions)
