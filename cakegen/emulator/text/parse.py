"""PTX text -> `Kernel`.

Reads what NVRTC 13.0 prints, and inline assembly as it was written: nested scopes with their own registers and labels,
several instructions a line, comments. What it does not know is an EmulationError with its line, never skipped.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from cakegen.emulator.text.ptx import (
    BANK_BYTES,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Label,
    Negated,
    Operand,
    Pair,
    Parameter,
    Place,
    Register,
    SharedVariable,
    Sink,
    Special,
    Symbol,
    Vector,
)
from cakegen.errors import EmulationError

_BANKS = {"u16": "b16", "s16": "b16", "u32": "b32", "s32": "b32", "u64": "b64", "s64": "b64"}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z])(\d+)\s+(?:\.ptr\s+(?:\.(?!align)\w+\s+)?(?:\.align\s+\d+\s+)?)?"
    r"([\w$]+)(?:\[(\d+)\])?"
)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)\s+([\w$]+)(?:\[(\d*)\])?")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_LABEL = re.compile(r"([$\w]+)\s*:(?!:)")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_NUMBER = re.compile(r"-?\d+$|-?0[xX][0-9a-fA-F]+U?$")
_ADDRESS = re.compile(r"([%\w$.]+)\s*(?:\+\s*(-?\w+))?$")


def parse_kernel(text: str, symbol: str) -> Kernel:
    """The entry `symbol` of a PTX module.

    Raises
    ------
    EmulationError
        No such entry, or a construct that this reader does not know; the message holds the line.
    """
    files = {int(number): path.rsplit("/", 1)[-1] for number, path in _FILE.findall(text)}
    clean = _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    target = re.search(r"\.target\s+(\w+)", clean)
    for entry in _ENTRY.finditer(clean):
        if entry.group(1) == symbol:
            break
    else:
        raise EmulationError(f"PTX: no .entry {symbol}; it has {', '.join(_ENTRY.findall(clean)) or 'none'}")
    close = clean.index(")", entry.end())
    brace = clean.index("{", close)
    end = _closing_brace(clean, brace)
    head, header = clean[: entry.start()], clean[close + 1 : brace]
    body = _Body(clean, files)
    body.read(brace + 1, end)
    return Kernel(
        name=symbol,
        target=target.group(1) if target else "",
        parameters=_parameters(clean[entry.end() : close]),
        banks=tuple(body.banks),
        instructions=body.resolved(),
        labels=frozenset(body.label_places()),
        shared=tuple(_shared_variables(head)) + tuple(body.shared),
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
    raise EmulationError(f"PTX line {text.count(chr(10), 0, start) + 1}: a brace that nothing closes")


def _parameters(text: str) -> tuple[Parameter, ...]:
    found, end = [], 0
    for align, kind, bits, name, count in _PARAMETER.findall(text):
        size = int(bits) // 8 * (int(count) if count else 1)
        step = int(align) if align else int(bits) // 8
        assert kind in "bsuf", kind
        end = -(-end // step) * step
        found.append(Parameter(name, end, size))
        end += size
    return tuple(found)


def _shared_variables(text: str) -> Iterator[SharedVariable]:
    for match in _SHARED.finditer(text):
        align, bits, name, count = match.groups()
        item = int(bits) // 8
        total = item if count is None else item * int(count or 0)
        yield SharedVariable(name, int(align) if align else item, total)


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
                position += 1
            elif character == "}":
                if self._scope.outer is None:
                    raise self._error(position, "a closing brace too many")
                self._scope = self._scope.outer
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
                self._statement(text[position:stop].strip(), position)
                position = stop + 1

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
                raise self._error(position, f"registers of type .{match.group(1)} are not modelled: {text!r}")
            for name in match.group(2).split(","):
                self._declare(name.strip(), bank)
        elif match := _SHARED.match(text):
            self.shared += _shared_variables(text)
        elif not text.startswith(".pragma"):
            raise self._error(position, f"directive {text!r} is not modelled")

    def _declare(self, name: str, bank: str) -> None:
        match = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
        names = [f"{match.group(1)}{index}" for index in range(int(match.group(2)))] if match else [name]
        for each in names:
            self._scope.registers[each] = Register(len(self.banks), each, bank)
            self.banks.append(bank)

    def _operand(self, text: str, position: int) -> Operand:
        if text == "_":
            return Sink()
        if text[0] == "{":
            return Vector(tuple(self._operand(part, position) for part in split_operands(text[1:-1])))
        if text[0] == "[":
            return self._address(text, position)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip(), position), self._operand(second.strip(), position))
        if text[0] == "!":
            inner = self._operand(text[1:].strip(), position)
            if not isinstance(inner, Register):
                raise self._error(position, f"{text!r} negates no register")
            return Negated(inner)
        return self._atom(text, position)

    def _atom(self, text: str, position: int) -> Register | Immediate | Special | Symbol:
        if register := self._scope.register(text):
            return register
        if text[0] == "%":
            return Special(text[1:])
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return Immediate(int(text[2:], 16), 4)
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return Immediate(int(text[2:], 16), 8)
        if _NUMBER.match(text):
            return Immediate(int(text.rstrip("U"), 0))
        if re.fullmatch(r"[$\w]+", text):
            return Symbol(text)
        raise self._error(position, f"operand {text!r} is not modelled")

    def _address(self, text: str, position: int) -> Address:
        base, *coordinates = split_operands(text[1:-1])
        match = _ADDRESS.match(base)
        if match is None or len(coordinates) > 1:
            raise self._error(position, f"address {text!r} is not modelled")
        where = self._atom(match.group(1), position)
        if isinstance(where, Special):
            raise self._error(position, f"address {text!r} starts at no register or symbol")
        vector = self._operand(coordinates[0], position) if coordinates else Vector(())
        assert isinstance(vector, Vector)
        return Address(where, int(match.group(2) or "0", 0), vector.items)

    def resolved(self) -> tuple[Instruction, ...]:
        """The instructions, with every label turned into an index."""
        done = []
        for instruction, scope in self._instructions:
            if instruction.operands and isinstance(instruction.operands[0], Label):
                name = instruction.operands[0].name
                target = scope.label(name)
                if target is None:
                    raise EmulationError(f"PTX line {instruction.place.ptx_line}: no label {name}")
                instruction = dataclasses.replace(instruction, operands=(Label(name, target),))
            done.append(instruction)
        return tuple(done)

    def label_places(self) -> Iterator[int]:
        for scope in self._scopes:
            yield from scope.labels.values()

    def _line(self, position: int) -> int:
        return bisect.bisect_left(self._newlines, position) + 1

    def _error(self, position: int, what: str) -> EmulationError:
        return EmulationError(f"PTX line {self._line(position)}: {what}")


def split_operands(text: str) -> list[str]:
    """Cut at commas outside of brackets and braces."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]
