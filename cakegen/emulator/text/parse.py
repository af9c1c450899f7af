"""PTX text -> `Kernel`.

Reads what NVRTC 13.0 prints, and inline assembly as it was written: nested scopes with their own registers and labels,
several instructions a line, comments. What it does not know is an EmulationError with its line, never skipped.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from cakegen.emulator.text.declarations import (
    MOST_REGISTERS,
    check_shared,
    module_variables,
    parse_parameters,
    parse_shared,
)
from cakegen.emulator.text.operand_text import parse_number, split_operands, symbols_of
from cakegen.emulator.text.ptx import (
    BANK_BYTES,
    MALFORMED,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Label,
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
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_NAME = re.compile(r"[A-Za-z_$][\w$]*")
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
_ADDRESS = re.compile(r"([%\w$.]+)\s*(?:\+\s*(-?\w+))?$")


def parse_kernel(text: str, symbol: str) -> Kernel:
    """The entry `symbol` of a PTX module.

    Raises
    ------
    EmulationError
        No such entry, or a construct that this reader does not know; the message holds the line.
    """
    clean = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    for entry in _ENTRY.finditer(clean):
        if entry.group(1) == symbol:
            break
    else:
        raise EmulationError(f"PTX: no .entry {symbol}; it has {', '.join(_ENTRY.findall(clean)) or 'none'}")
    line = clean.count("\n", 0, entry.start()) + 1
    try:
        return _parse_entry(clean, entry, line)
    except MALFORMED as error:
        raise PtxError(f"PTX line {line}: .entry {symbol} can't be read ({type(error).__name__}: {error})") from None


def _parse_entry(clean: str, entry: re.Match[str], line: int) -> Kernel:
    symbol = entry.group(1)
    files = {int(number): path.rsplit("/", 1)[-1] for number, path in _FILE.findall(clean)}
    target = re.search(r"\.target\s+(\w+)", clean)
    close = clean.find(")", entry.end())
    brace = clean.find("{", close)
    if close < 0 or brace < 0:
        part = "list of parameters never ends" if close < 0 else "body is missing"
        raise PtxError(f"PTX line {line}: .entry {symbol}: its {part}")
    parameters = parse_parameters(clean[entry.end() : close], line)
    end = _closing_brace(clean, brace)
    head, header = clean[: entry.start()], clean[close + 1 : brace]
    body = _Body(clean, files)
    body.read(brace + 1, end)
    shared = module_variables(head, _NAME.findall(clean, brace, end)) + tuple(body.shared)
    check_shared(shared, symbol)
    return Kernel(
        name=symbol,
        target=target.group(1) if target else "",
        parameters=parameters,
        banks=tuple(body.banks),
        instructions=body.resolved({each.name for each in parameters} | {each.name for each in shared}, head),
        labels=frozenset(body.label_places()),
        shared=shared,
        max_threads=_triple(header, "maxntid") or (),
        cluster=_triple(header, "reqnctapercluster"),
        files=files,
    )


def _closing_brace(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    raise PtxError(f"PTX line {text.count(chr(10), 0, start) + 1}: a brace that nothing closes")


def _triple(header: str, directive: str) -> tuple[int, int, int] | None:
    match = re.search(rf"\.{directive}\s+(\d+(?:\s*,\s*\d+)*)", header)
    if not match:
        return None
    numbers = [int(number) for number in match.group(1).split(",")]
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


@dataclass
class _Scope:
    """Names declared between two braces; lookups go outwards."""

    outer: _Scope | None
    registers: dict[str, Register] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)

    def register(self, name: str) -> Register | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.registers:
                return scope.registers[name]
            scope = scope.outer
        return None

    def label(self, name: str) -> int | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.outer
        return None


class _Body:
    """Reads the statements between the braces of an entry."""

    def __init__(self, text: str, files: dict[int, str]) -> None:
        self._text = text
        self._files = files
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._scope = _Scope(None)
        self._scopes = [self._scope]
        self._depth = 1
        self._source: tuple[tuple[str, int], ...] = ()
        self._calls: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        self._instructions: list[tuple[Instruction, _Scope]] = []
        self.banks: list[str] = []
        self.shared: list[SharedVariable] = []

    def read(self, position: int, end: int) -> None:
        text = self._text
        while position < end:
            character = text[position]
            if character.isspace() or character == ";":
                position += 1
            elif character == "{":
                self._scope = _Scope(self._scope)
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
        operands = tuple(self._operand(part, position) for part in split_operands(rest))
        if opcode.startswith("bra") and len(operands) == 1 and isinstance(operands[0], Symbol):
            operands = (Label(operands[0].name),)
        # comments were blanked out character by character, so that positions are those of the text
        place = Place(self._line(position), self._source, (position, position + len(text)))
        one_line = " ".join(text.split())
        parts = tuple(opcode.split("."))
        instruction = Instruction(parts, operands, register, bool(negated), one_line, place)
        self._instructions.append((instruction, self._scope))

    def _directive(self, text: str, position: int) -> None:
        if match := _REG.match(text):
            bank = _BANKS.get(match.group(1), match.group(1))
            if bank not in BANK_BYTES:
                raise self._unknown(position, f"registers of type .{match.group(1)} are not modelled: {text!r}")
            for name in match.group(2).split(","):
                self._declare(name.strip(), bank, position)
        elif variable := parse_shared(text, self._line(position)):
            self.shared.append(variable)
        elif not text.startswith(".pragma"):
            raise self._unknown(position, f"directive {text!r} is not modelled")

    def _declare(self, name: str, bank: str, position: int) -> None:
        match = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
        count = int(match.group(2)) if match else 1
        if count + len(self.banks) > MOST_REGISTERS:
            raise self._error(position, f"{count + len(self.banks)} registers; at most {MOST_REGISTERS} are kept apart")
        names = [f"{match.group(1)}{index}" for index in range(count)] if match else [name]
        for each in names:
            self._scope.registers[each] = Register(len(self.banks), each, bank)
            self.banks.append(bank)

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
            return Symbol(text)
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

    def resolved(self, variables: Container[str], head: str) -> tuple[Instruction, ...]:
        """The instructions, with every label turned into an index.

        Parameters
        ----------
        variables
            Names of parameters and shared variables.
        head
            The module up to the entry, where other variables may be declared.
        """
        done = []
        for instruction, scope in self._instructions:
            for name in symbols_of(instruction.operands):
                if name not in variables:
                    raise _unknown_symbol(name, instruction.place.ptx_line, head)
            if instruction.operands and isinstance(instruction.operands[0], Label):
                name = instruction.operands[0].name
                target = scope.label(name)
                if target is None:
                    raise PtxError(f"PTX line {instruction.place.ptx_line}: no label {name}")
                instruction = dataclasses.replace(instruction, operands=(Label(name, target),))
            done.append(instruction)
        return tuple(done)

    def label_places(self) -> Iterator[int]:
        for scope in self._scopes:
            yield from scope.labels.values()

    def _line(self, position: int) -> int:
        return bisect.bisect_left(self._newlines, position) + 1

    def _error(self, position: int, what: str) -> PtxError:
        return PtxError(f"PTX line {self._line(position)}: {what}")

    def _unknown(self, position: int, what: str) -> EmulationError:
        return EmulationError(f"PTX line {self._line(position)}: {what}")


def _unknown_symbol(name: str, line: int, head: str) -> EmulationError:
    if re.search(rf"\.(?:global|const)\s[^;{{}}]*(?<![\w$]){re.escape(name)}(?![\w$])", head):
        return EmulationError(f"PTX line {line}: variable {name} of the module's .global or .const is not modelled")
    return PtxError(f"PTX line {line}: nothing is called {name}: no parameter, and no shared variable")
