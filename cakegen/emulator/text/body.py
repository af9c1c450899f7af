"""The statements of a kernel's body -> instructions, with functions that it calls in place of their calls.

A call's `.param` variables are variables of the caller's local memory, which the function's parameters name. A
`brx.idx` is a chain of comparisons and branches.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from cakegen.emulator.text.declarations import MOST_REGISTERS, parse_local, parse_shared
from cakegen.emulator.text.functions import branch_targets, find_function, parse_call
from cakegen.emulator.text.operand_text import parse_number, split_operands, symbols_of
from cakegen.emulator.text.ptx import (
    BANK_BYTES,
    MALFORMED,
    Address,
    Immediate,
    Instruction,
    Label,
    LocalVariable,
    Negated,
    Operand,
    Pair,
    Place,
    Register,
    SharedVariable,
    Sink,
    Special,
    Symbol,
    Vector,
)
from cakegen.errors import EmulationError, PtxError

_BANKS = {"u8": "b8", "s8": "b8", "u16": "b16", "s16": "b16", "u32": "b32", "s32": "b32", "u64": "b64", "s64": "b64"}
_BANKS |= {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_LABEL = re.compile(r"([$\w]+)\s*:(?!:)")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
# Special registers (PTX ISA 10); which of them are modelled is known when one is read.
SPECIAL = re.compile(
    r"(?:tid|ntid|ctaid|nctaid|cluster_ctaid|cluster_nctaid|clusterid|nclusterid)\.[xyz]|laneid|warpid|nwarpid|smid|nsmid"
    r"|gridid|cluster_ctarank|cluster_nctarank|is_explicit_cluster|lanemask_(?:eq|le|lt|ge|gt)|clock(?:_hi|64)?"
    r"|globaltimer(?:_lo|_hi)?|pm[0-7](?:_64)?|envreg\d{1,2}|(?:total|dynamic|aggr)_smem_size"
    r"|reserved_smem_offset_(?:begin|end|cap|[01])|current_graph_exec"
)
_MOST_DEPTH = 64
# The label behind a call in the scope of the function's body, which no text can name.
_RETURN = "%return"
# No variable in local memory starts at 0, which is no address.
_LOCAL_START = 16
_ADDRESS = re.compile(r"([%\w$.]+)\s*(?:\+\s*(-?\w+))?$")


@dataclass
class Scope:
    """Names declared between two braces; lookups go outwards."""

    outer: Scope | None
    registers: dict[str, Register] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)

    def register(self, name: str) -> Register | None:
        """The register of that name; None: none is declared."""
        return next((scope.registers[name] for scope in self._outwards() if name in scope.registers), None)

    def variable(self, name: str) -> str:
        """What a variable is called by the kernel: one in local memory has a name of its own in each scope."""
        return next((scope.variables[name] for scope in self._outwards() if name in scope.variables), name)

    def label(self, name: str) -> int | None:
        """The instruction behind a label; None: there is no such label."""
        return next((scope.labels[name] for scope in self._outwards() if name in scope.labels), None)

    def _outwards(self) -> Iterator[Scope]:
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer


class Body:
    """Reads the statements between the braces of an entry."""

    def __init__(self, text: str, files: dict[int, str]) -> None:
        self._text = text
        self._files = files
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._scope = Scope(None)
        self._scopes = [self._scope]
        self._depth = 1
        self._source: tuple[tuple[str, int], ...] = ()
        self._calls: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        self._instructions: list[tuple[Instruction, Scope]] = []
        self._template: Instruction
        self.banks: list[str] = []
        self.shared: list[SharedVariable] = []
        self.local: list[LocalVariable] = []
        # where the statements stand that are read, and the functions that they are of, the innermost last
        self._region = (0, 0)
        self._inlined: list[str] = []

    def read(self, position: int, end: int) -> None:
        """Read the statements between two places."""
        text, self._region = self._text, (position, end)
        while position < end:
            character = text[position]
            if character.isspace() or character == ";":
                position += 1
            elif character == "{":
                self._scope = Scope(self._scope)
                self._scopes.append(self._scope)
                self._depth += 1
                if self._depth > _MOST_DEPTH:
                    raise self._error(position, f"braces more than {_MOST_DEPTH} deep")
                position += 1
            elif character == "}":
                if self._scope.outer is None:
                    raise self._error(position, "a closing brace too many")
                self._scope = self._scope.outer
                self._depth -= 1
                position += 1
            elif text.startswith((".loc\t", ".loc "), position):
                stop = text.index("\n", position)
                self._locate(text[position:stop])
                position = stop
            elif match := _LABEL.match(text, position, end):
                self._scope.labels[match.group(1)] = len(self._instructions)
                position = match.end()
            else:
                stop = text.find(";", position, end)
                if stop < 0:
                    raise self._error(position, f"no semicolon after {text[position:end].strip()!r}")
                self._read_statement(text[position:stop].strip(), position)
                position = stop + 1

    def _read_statement(self, text: str, position: int) -> None:
        try:
            self._statement(text, position)
        except MALFORMED as error:
            shown = " ".join(text.split())[:120]
            raise self._error(position, f"{shown!r} can't be read ({type(error).__name__}: {error})") from None

    def _locate(self, line: str) -> None:
        match = _LOC.match(line)
        if match is None:
            return
        file, row, column, *outer = (int(group) if group else 0 for group in match.groups())
        place = (file, row, column)
        if outer[0]:
            self._calls[place] = (outer[0], outer[1], outer[2])
        chain = [place]
        while outer[0] and chain[-1] in self._calls and len(chain) < 8:
            chain.append(self._calls[chain[-1]])
        if row:
            self._source = tuple((self._files.get(f, f"file {f}"), r) for f, r, _ in chain)

    def _statement(self, text: str, position: int) -> None:
        if text.startswith("."):
            self._directive(text, position)
            return
        match = _INSTRUCTION.match(text)
        if match is None:
            raise self._error(position, f"not an instruction: {text!r}")
        negated, guard, opcode, rest = match.groups()
        register = self._scope.register(guard) if guard else None
        if guard and register is None:
            raise self._error(position, f"guard {guard} is not declared")
        if register is not None and register.bank != "pred":
            raise self._error(position, f"guard {guard} is a register of type {register.bank}; a predicate is needed")
        # comments were blanked out character by character, so that positions are those of the text
        place = Place(self._line(position), self._source, (position, position + len(text)))
        self._template = Instruction((), (), register, bool(negated), " ".join(text.split()), place)
        parts = tuple(opcode.split("."))
        if parts[0] == "call":
            self._call(text[match.start(3) + len("call") :], position)
        elif parts[:2] == ("brx", "idx"):
            self._branch_by_index(rest, position)
        elif parts[0] == "ret" and self._inlined:
            self._add(("bra",), (Label(_RETURN),))
        elif parts[0] == "bra":
            self._add(parts, (Label(rest.strip()),))
        else:
            self._add(parts, tuple(self._operand(part, position) for part in split_operands(rest)))

    def _add(self, parts: tuple[str, ...], operands: tuple[Operand, ...], **changes: Any) -> None:
        """An instruction of the statement that is read."""
        made = dataclasses.replace(self._template, parts=parts, operands=operands, **changes)
        self._instructions.append((made, self._scope))

    def _branch_by_index(self, rest: str, position: int) -> None:
        """`brx.idx`: the last target takes what the ISA leaves undefined."""
        index, table = split_operands(rest)
        if self._template.guard is not None:
            raise self._unknown(position, "a guarded brx.idx is not modelled")
        targets = branch_targets(self._text, *self._region, table)
        if not targets:
            raise self._error(position, f"no .branchtargets list {table}")
        chosen = self._declare(f"brx#{len(self._instructions)}", "pred", position)
        for number, target in enumerate(targets[:-1]):
            self._add(("setp", "eq", "u32"), (chosen, self._operand(index, position), Immediate(number)))
            self._add(("bra",), (Label(target),), guard=chosen)
        self._add(("bra",), (Label(targets[-1]),))

    def _call(self, text: str, position: int) -> None:
        """A function's body in place of its call; of those that have none, what CUDA's own do."""
        call = parse_call(text)
        if call.indirect:
            raise self._unknown(position, f"an indirect call is not modelled: {call.name}")
        results, arguments = (
            [self._scope.variable(name) for name in names] for names in (call.results, call.arguments)
        )
        local = {each.name for each in self.local}
        if not {*results, *arguments} <= local:
            raise self._unknown(position, f"a call of {call.name} with other than .param variables is not modelled")
        function = find_function(self._text, call.name)
        if function is None:
            self._call_outside(call.name, results, arguments, position)
            return
        if call.name in self._inlined:
            raise self._unknown(position, f"{call.name} calls itself, which is not modelled")
        names = (*function.results, *function.parameters)
        if len(names) != len(results) + len(arguments):
            raise self._error(position, f"{call.name} has {len(names)} results and parameters; the call names others")
        around, source, region = self._scope, self._source, self._region
        inner = Scope(None, variables=dict(zip(names, (*results, *arguments), strict=True)))
        self._scopes.append(inner)
        self._inlined.append(call.name)
        self._scope = inner
        if self._template.guard is not None:
            self._add(("bra",), (Label(_RETURN),), guard_negated=not self._template.guard_negated)
        self.read(function.start, function.end)
        self._inlined.pop()
        inner.labels[_RETURN] = len(self._instructions)
        self._scope, self._source, self._region = around, source, region

    def _call_outside(self, name: str, results: list[str], arguments: list[str], position: int) -> None:
        """`vprintf` prints nothing and gives 0; `__assertfail` is a fault."""
        if name == "vprintf" and len(results) == 1:
            self._add(("st", "param", "b32"), (Address(Symbol(results[0])), Immediate(0)))
        elif name == "__assertfail" and len(arguments) == 5:
            self._add(("call", name), tuple(Symbol(each) for each in arguments))
        else:
            raise self._unknown(position, f"{name} is called, which the module does not define, and is not modelled")

    def _directive(self, text: str, position: int) -> None:
        if match := _REG.match(text):
            bank = _BANKS.get(match.group(1), match.group(1))
            if bank not in BANK_BYTES:
                raise self._unknown(position, f"registers of type .{match.group(1)} are not modelled: {text!r}")
            for name in match.group(2).split(","):
                self._declare(name.strip(), bank, position)
        elif variable := parse_shared(text, self._line(position)):
            self.shared.append(variable)
        elif local := parse_local(text, self._line(position)):
            self._declare_local(*local)
        elif not text.startswith((".pragma", ".branchtargets", ".callprototype")):
            raise self._unknown(position, f"directive {text!r} is not modelled")

    def _declare_local(self, name: str, align: int, num_bytes: int) -> None:
        end = max((each.offset + each.num_bytes for each in self.local), default=_LOCAL_START)
        unique = f"{name}#{len(self.local)}"
        self.local.append(LocalVariable(unique, -(-end // align) * align, num_bytes))
        self._scope.variables[name] = unique

    def _declare(self, name: str, bank: str, position: int) -> Register:
        match = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
        count = int(match.group(2)) if match else 1
        if count + len(self.banks) > MOST_REGISTERS:
            raise self._error(position, f"{count + len(self.banks)} registers; at most {MOST_REGISTERS} are kept apart")
        names = [f"{match.group(1)}{index}" for index in range(count)] if match else [name]
        for each in names:
            self._scope.registers[each] = Register(len(self.banks), each, bank)
            self.banks.append(bank)
        return self._scope.registers[names[0]] if names else Register(-1, name, bank)

    def _operand(self, text: str, position: int) -> Operand:
        if text == "_":
            return Sink()
        if text[0] == "{":
            parts = split_operands(text[1:-1])
            if text[-1] != "}" or any(part[0] in "{[" for part in parts):
                raise self._error(position, f"{text!r} is no vector of registers and numbers")
            return Vector(tuple(self._operand(part, position) for part in parts))
        if text[0] == "[":
            return self._address(text, position)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip(), position), self._operand(second.strip(), position))
        if text[0] == "!":
            inner = self._operand(text[1:].strip(), position)
            if not isinstance(inner, Register):
                raise self._error(position, f"{text!r} negates no register")
            if inner.bank != "pred":
                raise self._error(position, f"{text!r} negates a register of type {inner.bank}, and no predicate")
            return Negated(inner)
        return self._atom(text, position)

    def _atom(self, text: str, position: int) -> Register | Immediate | Special | Symbol:
        if register := self._scope.register(text):
            return register
        if text[0] == "%":
            if not SPECIAL.fullmatch(text[1:]):
                raise self._error(position, f"register {text} is not declared")
            return Special(text[1:])
        try:
            number = parse_number(text)
        except OverflowError as error:
            raise self._error(position, str(error)) from None
        if number is not None:
            return number
        if re.fullmatch(r"[$\w]+", text):
            return Symbol(self._scope.variable(text))
        raise self._unknown(position, f"operand {text!r} is not modelled")

    def _address(self, text: str, position: int) -> Address:
        base, *coordinates = split_operands(text[1:-1])
        match = _ADDRESS.match(base)
        if match is None or len(coordinates) > 1:
            raise self._unknown(position, f"address {text!r} is not modelled")
        where = self._atom(match.group(1), position)
        if isinstance(where, Special):
            raise self._error(position, f"address {text!r} starts at no register or symbol")
        vector = self._operand(coordinates[0], position) if coordinates else Vector(())
        offset = int(match.group(2) or "0", 0)
        if not isinstance(vector, Vector) or not -(1 << 31) <= offset < 1 << 32:
            raise self._error(position, f"address {text!r} has no vector of coordinates, or an offset beyond 32 bits")
        return Address(where, offset, vector.items)

    def symbols(self) -> set[str]:
        """Names of all variables that instructions name."""
        return {name for instruction, _ in self._instructions for name in symbols_of(instruction.operands)}

    def resolved(self, variables: Container[str]) -> tuple[Instruction, ...]:
        """The instructions, with every label turned into an index.

        Parameters
        ----------
        variables
            Names of parameters and variables.
        """
        done = []
        for instruction, scope in self._instructions:
            for name in symbols_of(instruction.operands):
                if name not in variables:
                    line = instruction.place.ptx_line
                    raise PtxError(f"PTX line {line}: nothing is called {name}: no parameter, and no variable")
            if instruction.operands and isinstance(instruction.operands[0], Label):
                name = instruction.operands[0].name
                target = scope.label(name)
                if target is None:
                    raise PtxError(f"PTX line {instruction.place.ptx_line}: no label {name}")
                instruction = dataclasses.replace(instruction, operands=(Label(name, target),))
            done.append(instruction)
        return tuple(done)

    def label_places(self) -> Iterator[int]:
        """The instructions behind labels, of every scope."""
        for scope in self._scopes:
            yield from scope.labels.values()

    def _line(self, position: int) -> int:
        return bisect.bisect_left(self._newlines, position) + 1

    def _error(self, position: int, what: str) -> PtxError:
        return PtxError(f"PTX line {self._line(position)}: {what}")

    def _unknown(self, position: int, what: str) -> EmulationError:
        return EmulationError(f"PTX line {self._line(position)}: {what}")
