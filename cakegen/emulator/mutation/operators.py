"""The mutation operators: what can go wrong with one instruction of a program.

An operator is a name and a function from an instruction to the texts that may stand in its place. They are mechanical:
an operator knows an instruction's form and nothing of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cakegen.emulator.mutation.statements import Statement

# (what was done, in few words; the text that stands in place of the instruction, without a semicolon)
Change = tuple[str, str]
Rewrite = Callable[[Statement], Iterator[Change]]

_BARRIER_BYTES = 8
_TX_BYTES = 16
# A box's start in shared memory is a multiple of this (PTX ISA 9.7.9.25); others of 16.
_BOX_BYTES, _GRANULE_BYTES = 128, 16
_WARP_THREADS = 32
# Descriptor fields of wgmma and tcgen05: start address, and the stride between 8-row groups, in 16-byte units.
_DESCRIPTOR_FIELDS = (("start", 0), ("stride", 32))
# Fields of the instruction descriptor of tcgen05.mma (PTX ISA 9.7.16.4.2): N / 8, M / 16, type of A, type of B.
_INSTRUCTION_FIELDS = (("N", 17), ("M", 24), ("A type", 7), ("B type", 10))
# Tensor memory addresses: the lane is in the upper half, a quadrant is 32 lanes (PTX ISA 9.7.16.1).
_QUADRANT = 32 << 16
_COLUMNS = 8
_NARROWER = {"cluster": "cta", "gpu": "cta", "sys": "cta"}


def _dropped(statement: Statement) -> Iterator[Change]:
    yield "dropped", ""


def _is_fence(statement: Statement) -> bool:
    parts = statement.parts
    return parts[0] in ("fence", "membar") or (parts[0] in ("wgmma", "tcgen05") and parts[1].startswith("fence"))


def drop_fence(statement: Statement) -> Iterator[Change]:
    """Memory, proxy, mbarrier-init, wgmma and tcgen05 fences."""
    if _is_fence(statement):
        yield from _dropped(statement)


def drop_commit(statement: Statement) -> Iterator[Change]:
    """The end of a group of asynchronous operations."""
    parts = statement.parts
    if parts[1] == "commit" or "commit_group" in parts:
        yield from _dropped(statement)


def drop_wait(statement: Statement) -> Iterator[Change]:
    """Waits of every kind; a `try_wait` succeeds at once."""
    parts = statement.parts
    if parts[0] == "mbarrier" and parts[1] in ("try_wait", "test_wait"):
        yield "succeeds at once", f"{statement.guard}setp.eq.u32 {statement.operands[0]}, 1, 1"
    elif (
        parts[:2] in (("bar", "sync"), ("bar", "warp"), ("griddepcontrol", "wait"))
        or parts[:3] == ("barrier", "cluster", "wait")
        or (parts[0] == "tcgen05" and parts[1].startswith("wait"))
        or "wait_group" in parts
    ):
        yield from _dropped(statement)


def drop_arrival(statement: Statement) -> Iterator[Change]:
    """Arrivals, initialisations, triggers; a counter is read where it was raised."""
    parts = statement.parts
    if (parts[0] == "mbarrier" and parts[1] in ("init", "arrive", "expect_tx")) or (
        parts[:2] in (("bar", "arrive"), ("griddepcontrol", "launch_dependents"))
        or parts[:3] == ("barrier", "cluster", "arrive")
    ):
        yield from _dropped(statement)
    elif parts[0] == "atom" and "global" in parts and parts[-2] in ("inc", "add"):
        target, address = statement.operands[:2]
        yield "only reads", f"{statement.guard}ld.relaxed.gpu.global.{parts[-1]} {target}, {address}"


def drop_copy(statement: Statement) -> Iterator[Change]:
    """Asynchronous copies and stores."""
    parts = statement.parts
    if _is_copy(statement) or parts[:2] in (("st", "async"), ("tcgen05", "cp")):
        yield from _dropped(statement)


def drop_store(statement: Statement) -> Iterator[Change]:
    """Stores to shared, global and tensor memory."""
    parts = statement.parts
    if (parts[0] in ("st", "stmatrix", "red") and parts[1] != "async") or parts[:2] == ("tcgen05", "st"):
        yield from _dropped(statement)


def drop_product(statement: Statement) -> Iterator[Change]:
    """Matrix products."""
    if statement.parts[:2] in (("wgmma", "mma_async"), ("tcgen05", "mma")):
        yield from _dropped(statement)


def leak(statement: Statement) -> Iterator[Change]:
    """Tensor memory that is never freed."""
    if statement.parts[:2] == ("tcgen05", "dealloc"):
        yield from _dropped(statement)


def _is_copy(statement: Statement) -> bool:
    parts = statement.parts
    return parts[:3] == ("cp", "async", "bulk") and not {"commit_group", "wait_group", "prefetch"} & set(parts)


def _goes_to_shared(statement: Statement) -> bool:
    """Whether a copy's destination, the state space that is named first, is shared memory."""
    return next(part for part in statement.parts if part in ("global", "shared::cta", "shared::cluster")) != "global"


def count(statement: Statement) -> Iterator[Change]:
    """Arrivals, threads and groups, one more or one fewer."""
    parts = statement.parts
    if parts[0] == "mbarrier" and parts[1] == "init":
        yield from _plus_minus(statement, 1, 1)
    elif parts[:2] in (("bar", "sync"), ("bar", "arrive")) and len(statement.operands) == 2:
        yield from _plus_minus(statement, 1, _WARP_THREADS)
    elif "wait_group" in parts:
        # one fewer only waits longer
        yield "+1", statement.with_operand(0, str(int(statement.operands[0]) + 1))
    elif parts[0] == "atom" and parts[-2] in ("inc", "add"):
        yield from _plus_minus(statement, 2, 1)


def _plus_minus(statement: Statement, operand: int, amount: int) -> Iterator[Change]:
    for sign in (1, -1):
        yield f"{sign * amount:+d}", statement.with_computed(operand, "add.s32", sign * amount, 32)


def transaction_bytes(statement: Statement) -> Iterator[Change]:
    """Expected bytes, and the size of a bulk copy, one granule more or less."""
    parts = statement.parts
    if parts[0] == "mbarrier" and "expect_tx" in parts:
        yield from _plus_minus(statement, len(statement.operands) - 1, _TX_BYTES)
    elif _is_copy(statement) and "tensor" not in parts and len(statement.operands) == 4:
        yield from _plus_minus(statement, 2, _TX_BYTES)


def parity(statement: Statement) -> Iterator[Change]:
    """The other parity of a wait."""
    if statement.parts[0] == "mbarrier" and "parity" in statement.parts:
        yield "flipped", statement.with_computed(2, "xor.b32", 1, 32)


def neighbour(statement: Statement) -> Iterator[Change]:
    """The barrier beside the right one: the next stage of a ring, or another ring."""
    number = _barrier_operand(statement)
    if number is not None:
        for sign in (1, -1):
            yield f"{sign * _BARRIER_BYTES:+d} bytes", statement.with_moved_address(number, sign * _BARRIER_BYTES)


def _barrier_operand(statement: Statement) -> int | None:
    parts = statement.parts
    if parts[0] == "mbarrier":
        return 0 if parts[1] in ("init", "expect_tx", "inval") else 1
    if parts[:2] == ("st", "async"):
        return 2
    if _is_copy(statement) and "mbarrier::complete_tx::bytes" in parts:
        return 2 if "tensor" in parts else 3
    return 0 if parts[:2] == ("tcgen05", "commit") else None


def descriptor(statement: Statement) -> Iterator[Change]:
    """Fields of operand and instruction descriptors, one more or one less."""
    parts = statement.parts
    if parts[:2] == ("wgmma", "mma_async"):
        for operand, name in ((1, "a"), (2, "b")):
            yield from _fields(statement, operand, name, _DESCRIPTOR_FIELDS, 64)
    elif parts[:2] == ("tcgen05", "mma"):
        for operand, name in ((1, "a"), (2, "b")):
            if not statement.operands[operand].startswith("["):
                yield from _fields(statement, operand, name, _DESCRIPTOR_FIELDS, 64)
        yield from _fields(statement, 3, "instruction", _INSTRUCTION_FIELDS, 32)
    elif parts[:2] == ("tcgen05", "cp"):
        yield from _fields(statement, 1, "source", _DESCRIPTOR_FIELDS, 64)


def _fields(
    statement: Statement, operand: int, name: str, fields: tuple[tuple[str, int], ...], bits: int
) -> Iterator[Change]:
    for field, shift in fields:
        for sign in (1, -1):
            changed = statement.with_computed(operand, f"add.s{bits}", sign << shift, bits)
            yield f"{name} {field} {sign:+d}", changed


def swap_operands(statement: Statement) -> Iterator[Change]:
    """A and B of a product exchanged."""
    if statement.parts[:2] in (("wgmma", "mma_async"), ("tcgen05", "mma")):
        d, a, b, *rest = statement.operands
        if a != b and not a.startswith("["):
            yield "a and b", statement.text(operands=[d, b, a, *rest])


def accumulate(statement: Statement) -> Iterator[Change]:
    """A product that adds to the accumulator where it should start anew, or the other way round."""
    if statement.parts[:2] == ("tcgen05", "mma"):
        number = 5 if statement.operands[4].startswith("{") else 4
        old = statement.operands[number]
        yield "inverted", statement.with_operand(number, old[1:] if old.startswith("!") else f"!{old}")
    elif statement.parts[:2] == ("wgmma", "mma_async") and statement.operands[3] in ("0", "1"):
        yield "inverted", statement.with_operand(3, "10"[int(statement.operands[3])])


def allocation(statement: Statement) -> Iterator[Change]:
    """Half and twice the columns of tensor memory, where it is allocated or freed."""
    if statement.parts[:2] in (("tcgen05", "alloc"), ("tcgen05", "dealloc")):
        for change, operation in (("twice", "shl.b32"), ("half", "shr.b32")):
            yield change, statement.with_computed(1, operation, 1, 32)


def sources_only(statement: Statement) -> Iterator[Change]:
    """A wait for bulk stores that is only one for their sources."""
    if statement.parts[:4] == ("cp", "async", "bulk", "wait_group") and "read" not in statement.parts:
        yield "wait_group.read", statement.text(f"{statement.opcode}.read")


def place(statement: Statement) -> Iterator[Change]:
    """A copy's coordinates and its destination in shared memory, one step further."""
    parts = statement.parts
    if (_is_copy(statement) and _goes_to_shared(statement)) or parts[:2] == ("st", "async"):
        step = _BOX_BYTES if "tensor" in parts else _GRANULE_BYTES
        yield f"destination +{step}", statement.with_moved_address(0, step)
    if _is_copy(statement) and "tensor" in parts:
        source = 1 if _goes_to_shared(statement) else 0
        rank = next(int(part[0]) for part in parts if part in ("1d", "2d", "3d", "4d", "5d"))
        for axis in range(rank):
            yield f"coordinate {axis} +1", statement.with_computed(source, "add.s32", 1, 32, inner=axis)


def multicast(statement: Statement) -> Iterator[Change]:
    """One CTA more or fewer in a multicast's mask."""
    if "multicast::cluster" in statement.parts:
        number = len(statement.operands) - 1
        for bit in (1, 2):
            yield f"mask ^ {bit}", statement.with_computed(number, "xor.b16", bit, 16)


def other_rank(statement: Statement) -> Iterator[Change]:
    """The address of another CTA of the cluster."""
    if statement.parts[0] == "mapa":
        yield "rank ^ 1", statement.with_computed(2, "xor.b32", 1, 32)


def scope(statement: Statement) -> Iterator[Change]:
    """A scope too small, or a proxy fence for the other state space."""
    parts = statement.parts
    if parts[:3] == ("fence", "proxy", "async") and len(parts) == 4:
        other = "global" if parts[3].startswith("shared") else "shared::cta"
        yield f"{parts[3]} -> {other}", statement.text(".".join((*parts[:3], other)))
        return
    first = 2 if parts[0] == "barrier" else 1
    for number, part in enumerate(parts[first:], first):
        if part in _NARROWER and parts[:2] != ("fence", "mbarrier_init"):
            narrow = (*parts[:number], _NARROWER[part], *parts[number + 1 :])
            yield f"{part} -> {_NARROWER[part]}", statement.text(".".join(narrow))


def order(statement: Statement) -> Iterator[Change]:
    """An acquire or release that orders nothing."""
    parts = statement.parts
    # a cluster barrier's wait always acquires (PTX ISA 9.7.13.3)
    if _is_fence(statement) or parts[:3] == ("barrier", "cluster", "wait"):
        return
    for part in ("acq_rel", "acquire", "release"):
        if part in parts:
            yield f"{part} -> relaxed", statement.text(statement.opcode.replace(part, "relaxed"))


def column(statement: Statement) -> Iterator[Change]:
    """Columns of tensor memory beside the right ones."""
    number = _tensor_address(statement)
    if number is not None:
        for sign in (1, -1):
            yield f"{sign * _COLUMNS:+d}", statement.with_moved_address(number, sign * _COLUMNS)


def quadrant(statement: Statement) -> Iterator[Change]:
    """Lanes of tensor memory that belong to the next warp."""
    number = _tensor_address(statement)
    if number is not None and statement.parts[1] in ("ld", "st"):
        yield "+32 lanes", statement.with_moved_address(number, _QUADRANT)


def _tensor_address(statement: Statement) -> int | None:
    """The operand of tcgen05 that is an address in tensor memory."""
    parts = statement.parts
    if parts[0] != "tcgen05" or parts[1] not in ("ld", "st", "mma", "cp"):
        return None
    return 1 if parts[1] == "ld" else 0


@dataclass(frozen=True)
class Operator:
    """A name, what it breaks in words, and its rewrite."""

    name: str
    rewrite: Rewrite

    @property
    def description(self) -> str:
        """The first line of its function's documentation."""
        return (self.rewrite.__doc__ or "").splitlines()[0]


OPERATORS = tuple(
    Operator(name, rewrite)
    for name, rewrite in {
        "drop-fence": drop_fence,
        "drop-commit": drop_commit,
        "drop-wait": drop_wait,
        "drop-arrival": drop_arrival,
        "drop-copy": drop_copy,
        "drop-store": drop_store,
        "drop-product": drop_product,
        "leak": leak,
        "count": count,
        "bytes": transaction_bytes,
        "parity": parity,
        "neighbour": neighbour,
        "descriptor": descriptor,
        "swap": swap_operands,
        "accumulate": accumulate,
        "allocation": allocation,
        "sources-only": sources_only,
        "place": place,
        "multicast": multicast,
        "rank": other_rank,
        "scope": scope,
        "order": order,
        "column": column,
        "quadrant": quadrant,
    }.items()
)
