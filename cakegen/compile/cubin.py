"""Reads what a cubin says of its kernels: symbols, registers, shared memory, stack. Imports only errors.

A cubin is a 64-bit little-endian ELF file. Reading it directly needs no toolkit program, and lets a cached cubin be
reported as fully as a fresh one.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from cakegen.errors import CompileError

_SECTION_SYMTAB = 2
_SYMBOL_FUNC = 2
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
# .nv.info entries are (format, attribute, 16-bit value or size); the "sized" format is followed by that many bytes.
_FORMAT_SIZED = 4
_ATTRIBUTE_FRAME_BYTES = 0x11
_ATTRIBUTE_STACK_BYTES = 0x12
_ATTRIBUTE_PARAMETER = 0x17
_ATTRIBUTE_REGISTERS = 0x2F
# An instruction is 16 bytes; its low 9 bits tell loads of local memory (LDL) from stores (STL), bits 73 to 75 the bytes
# that each moves. Read off nvdisasm's listings of sm_90a, sm_100a and sm_103a; the sums are those of ptxas's log.
_INSTRUCTION = struct.Struct("<QQ")
_LOCAL_ACCESSES = {0x183, 0x187}
_ACCESS_BYTES = (1, 1, 2, 2, 4, 8, 16, 16)
# Since compute capability 9.0 a kernel's shared section begins with the kilobyte that the system keeps in every CTA.
_SYSTEM_SMEM_BYTES = 1024


@dataclass(frozen=True)
class KernelResources:
    """What one kernel of a cubin takes.

    Parameters
    ----------
    registers
        Registers of a thread.
    static_smem_bytes
        Statically declared shared memory of a CTA, without the system's kilobyte.
    stack_bytes
        Least stack (local memory) of a thread, callees included: spills and indexed local arrays.
    parameter_bytes
        Size of the kernel's parameter block, from the first parameter to the end of the last.
    """

    registers: int
    static_smem_bytes: int
    stack_bytes: int
    parameter_bytes: int


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


class CubinReader:
    """The sections and symbols of one cubin.

    Raises
    ------
    CompileError
        The bytes are not a cubin, or are cut short.
    """

    def __init__(self, cubin: bytes, where: str) -> None:
        self._cubin = cubin
        self._where = where
        if cubin[:6] != b"\x7fELF\x02\x01":
            raise CompileError(
                f"{where}: not a cubin: {len(cubin)} bytes that begin {cubin[:4]!r}, not a 64-bit ELF file"
            )
        with self._damage_reported():
            self._sections = self._read_sections()
            self._symbols = self._read_symbols()

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the defined functions, kernels among them, in symbol-table order."""
        return tuple(name for name, kind, section in self._symbols if kind == _SYMBOL_FUNC and section != 0)

    def resources(self, kernel: str) -> KernelResources:
        """What `kernel` takes.

        Raises
        ------
        CompileError
            The cubin does not define that symbol exactly once, or holds no register count for it.
        """
        defined = self.functions
        if defined.count(kernel) != 1:
            listed = ", ".join(defined) or "none"
            raise CompileError(
                f'{self._where}: needs exactly one definition of {kernel}, which must be extern "C"; '
                f"found {defined.count(kernel)}. The cubin defines: {listed}"
            )
        with self._damage_reported():
            totals = self._per_function(".nv.info", self._symbol_index(kernel))
            parameter_bytes = self._parameter_bytes(f".nv.info.{kernel}")
        if _ATTRIBUTE_REGISTERS not in totals:
            raise CompileError(f"{self._where}: the cubin holds no register count for {kernel}")
        shared_bytes = sum(s.size for s in self._sections if s.name == f".nv.shared.{kernel}")
        return KernelResources(
            registers=totals[_ATTRIBUTE_REGISTERS],
            static_smem_bytes=max(0, shared_bytes - _SYSTEM_SMEM_BYTES),
            stack_bytes=max(totals.get(_ATTRIBUTE_STACK_BYTES, 0), totals.get(_ATTRIBUTE_FRAME_BYTES, 0)),
            parameter_bytes=parameter_bytes,
        )

    @property
    def functions_code(self) -> tuple[bytes, ...]:
        """Machine code of each function, in section order: the `.text` sections, padding included."""
        with self._damage_reported():
            return tuple(self._bytes(s) for s in self._sections if s.name.startswith(".text."))

    @property
    def local_access_bytes(self) -> int:
        """Bytes that the loads and stores of local memory of all functions move, each instruction counted once."""
        code = self.functions_code
        with self._damage_reported():
            words = [word for body in code for word in _INSTRUCTION.iter_unpack(body)]
        return sum(_ACCESS_BYTES[high >> 9 & 7] for low, high in words if low & 0x1FF in _LOCAL_ACCESSES)

    @contextlib.contextmanager
    def _damage_reported(self) -> Iterator[None]:
        try:
            yield
        except (struct.error, ValueError, IndexError, OverflowError) as error:
            raise CompileError(f"{self._where}: damaged cubin of {len(self._cubin)} bytes ({error})") from None

    def _bytes(self, section: _Section) -> bytes:
        found = self._cubin[section.offset : section.offset + section.size]
        if len(found) != section.size:
            raise ValueError(f"section {section.name or '?'} ends at byte {section.offset + section.size}")
        return found

    def _read_sections(self) -> tuple[_Section, ...]:
        header = _HEADER.unpack_from(self._cubin)
        table, entry_bytes, count, names_index = header[6], header[11], header[12], header[13]
        raw = [_SECTION.unpack_from(self._cubin, table + i * entry_bytes) for i in range(count)]
        names = self._bytes(_Section("names", 0, raw[names_index][4], raw[names_index][5], 0))
        return tuple(_Section(_text(names, r[0]), r[1], r[4], r[5], r[6]) for r in raw)

    def _read_symbols(self) -> tuple[tuple[str, int, int], ...]:
        tables = [s for s in self._sections if s.kind == _SECTION_SYMTAB]
        if len(tables) != 1:
            raise ValueError(f"{len(tables)} symbol tables, not 1")
        names = self._bytes(self._sections[tables[0].link])
        entries = _SYMBOL.iter_unpack(self._bytes(tables[0]))
        return tuple((_text(names, name), kind & 15, section) for name, kind, _, section, _, _ in entries)

    def _symbol_index(self, name: str) -> int:
        return next(i for i, (found, kind, section) in enumerate(self._symbols) if found == name and section != 0)

    def _per_function(self, section: str, symbol: int) -> dict[int, int]:
        """Attributes whose payload is (symbol index, value), for one symbol."""
        pairs = (
            (code, *struct.unpack("<II", payload))
            for code, _, payload in self._attributes(section)
            if len(payload) == 8
        )
        return {code: value for code, owner, value in pairs if owner == symbol}

    def _parameter_bytes(self, section: str) -> int:
        """From the first parameter to the end of the last.

        A record is (index, ordinal, offset, flags), with the size from bit 18 of the flags. Offsets count from the
        bank's parameter area; on sm_90 that is no multiple of 64, so a tensor map that comes first stands at 48.
        """
        records = [
            struct.unpack("<IHHI", payload)
            for code, _, payload in self._attributes(section)
            if code == _ATTRIBUTE_PARAMETER
        ]
        first = min((offset for _, _, offset, _ in records), default=0)
        return max((offset + (flags >> 18) for _, _, offset, flags in records), default=0) - first

    def _attributes(self, section: str) -> list[tuple[int, int, bytes]]:
        found: list[tuple[int, int, bytes]] = []
        for body in (self._bytes(s) for s in self._sections if s.name == section):
            at = 0
            while at + 4 <= len(body):
                form, code, value = struct.unpack_from("<BBH", body, at)
                payload_bytes = value if form == _FORMAT_SIZED else 0
                found.append((code, value, body[at + 4 : at + 4 + payload_bytes]))
                at += 4 + payload_bytes
        return found


def _text(table: bytes, start: int) -> str:
    return table[start : table.index(b"\0", start)].decode()
