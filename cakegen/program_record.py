"""One generated program as the runtime, the emulator and the generator share it. Imports nothing of cakegen."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchRecord:
    """Launch attributes as the export decided them.

    Parameters
    ----------
    block, cluster
        Threads of a CTA, CTAs of a cluster.
    cooperative
        CTAs of the whole grid wait for each other.
    programmatic
        Launched with the attribute of programmatic stream serialization: the program waits for the launch before it.
    overlap
        The program reads nothing but weights before it waits for the launch before it, so that a caller whose launches
        write no weights may have it launched programmatically too.
    dynamic_smem_bytes
        Dynamic shared memory of a CTA.
    """

    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    cooperative: bool
    programmatic: bool
    overlap: bool
    dynamic_smem_bytes: int


@dataclass(frozen=True)
class TensorMapEntry:
    """How a `tma_buffer` argument is viewed by the tensor memory accelerator.

    An operand is a row-major `[rows, cols]` bf16 matrix with a row pitch.

    `chunks`: dims (64, rows, cols / 64), strides (pitch, 128 bytes): a box is a number of K chunks.
    `columns`: dims (cols, rows, 1): a box may run over the last column, and arrives there as zeros.

    `box` is (columns, rows, chunks) in elements. All maps use the 128-byte swizzle and fill with zeros.

    `token_parts`: the rows are tokens, and a box is only as high as one of so many equal parts of a request's tokens.
    0: it always has its own height.
    """

    name: str
    operand: str
    view: str
    box: tuple[int, int, int]
    token_parts: int = 0

    def for_tokens(self, num_tokens: int) -> TensorMapEntry:
        """The entry of a request of so many tokens; its kernel derives the same box from `num_tokens`.

        Notes
        -----
        Rows of a box outside of its tensor are filled with zeros more slowly than rows are loaded. A clipped box is of
        one chunk: the next would land behind the last token, not where the kernel reads it.
        """
        columns, rows, _ = self.box
        part = -(-num_tokens // self.token_parts) if self.token_parts else rows
        return self if part >= rows else dataclasses.replace(self, box=(columns, part, 1))


@dataclass(frozen=True)
class Program:
    """One generated program. `arg_plan` lists (kind, name) in the kernel's parameter order.

    Kinds: `tma_buffer` (a 128-byte tensor map by value, made from `tensor_maps[name]`), `buffer` (a device pointer),
    `parameter` (an i32), `grid` (no kernel parameter: a grid extent of the binding's entry).
    `barriers` lists (name, count) in shared-memory order, so that a report of a stuck wait can name what it waited for.
    `headers` lists all that the kernel includes, directly or not, and `digests` the sha256 of these files.
    """

    name: str
    role: str
    headers: tuple[str, ...]
    arches: tuple[str, ...]
    flags: tuple[str, ...]
    ffi_entry: str
    arg_plan: tuple[tuple[str, str], ...]
    tensor_maps: tuple[TensorMapEntry, ...]
    barriers: tuple[tuple[str, int], ...]
    launch: LaunchRecord
    digests: tuple[tuple[str, str], ...]

    @property
    def kernel_symbol(self) -> str:
        """The `extern "C"` name of the kernel."""
        return f"kernel_{self.name}"

    @property
    def kernel_source(self) -> str:
        """File name of the device half."""
        return f"{self.name}_kernel.cu"

    @property
    def binding_source(self) -> str:
        """File name of the host half."""
        return f"{self.name}_binding.cu"

    @property
    def sources(self) -> tuple[str, str]:
        """Both halves, the kernel first."""
        return self.kernel_source, self.binding_source

    @property
    def closure_digest(self) -> tuple[tuple[str, str], ...]:
        """(target, identity of what a compiler reads) for each target."""
        files = dict(self.digests)
        closure = [(name, files[name]) for name in (self.kernel_source, *self.headers)]
        return tuple((arch, closure_digest(arch, closure, self.flags)) for arch in sorted(self.arches))


def closure_digest(arch: str, closure: Sequence[tuple[str, str]], flags: Sequence[str]) -> str:
    """Identity of what a compiler reads: architecture, file names with digests in order, and flags.

    The number of files stands in front, and each part is preceded by its length, so that no two different records give
    one stream of bytes.
    """
    parts = [str(len(closure)), arch, *(part for pair in closure for part in pair), *flags]
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        digest.update(f"{len(raw)}:".encode() + raw)
    return digest.hexdigest()
