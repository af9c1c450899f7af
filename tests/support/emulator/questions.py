"""What a Hopper device can settle, asked by kernels of `gpu/questions`; each question gives an answer for JSON.

A question takes `run` (`question_backends.py`) and a dictionary for the arrays that are worth keeping as they came.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from support.emulator.question_backends import Kernel, Mapped, Run
from support.emulator.sum_models import Draw, SumCase, bits_of, candidate_models, judge, sum_cases

Arrays = dict[str, np.ndarray]
Question = Callable[[Run, Arrays], dict[str, Any]]

# ---- mbarrier ----

ARRIVE, EXPECT, COMPLETE, ARRIVE_EXPECT = 1, 2, 3, 4
SCRIPTS: dict[str, tuple[int, tuple[tuple[int, int], ...]]] = {
    "arrive": (1, ((ARRIVE, 0), (ARRIVE, 0))),
    "expect, arrive, bytes": (1, ((EXPECT, 64), (ARRIVE, 0), (COMPLETE, 64))),
    "bytes, arrive with expect": (1, ((COMPLETE, 64), (ARRIVE_EXPECT, 64))),
    "bytes, expect, arrive": (1, ((COMPLETE, 64), (EXPECT, 64), (ARRIVE, 0))),
    "bytes, arrive, expect": (1, ((COMPLETE, 64), (ARRIVE, 0), (EXPECT, 64), (EXPECT, 16), (COMPLETE, 16))),
    "bytes of a later phase": (1, ((ARRIVE, 0), (COMPLETE, 32), (ARRIVE_EXPECT, 32))),
    "two arrivals, bytes between": (2, ((ARRIVE_EXPECT, 48), (COMPLETE, 48), (ARRIVE, 0))),
}
_STEPS = Kernel("barriers", "steps", smem_bytes=1024)


def ask_barrier(run: Run, arrays: Arrays) -> dict[str, Any]:
    """After each step of each script, the parities that count as complete; the first entry is the fresh barrier."""
    longest = max(len(steps) for _, steps in SCRIPTS.values())
    steps = np.zeros((len(SCRIPTS), longest, 2), np.uint32)
    for number, (_, script) in enumerate(SCRIPTS.values()):
        steps[number, : len(script)] = script
    counts = np.array([count for count, _ in SCRIPTS.values()], np.uint32)
    seen = np.zeros((len(SCRIPTS), longest + 1), np.uint32)
    run(_STEPS, len(SCRIPTS), steps, counts, seen, longest)
    return {
        name: [[parity for parity in (0, 1) if word >> parity & 1] for word in row[: len(script) + 1].tolist()]
        for (name, (_, script)), row in zip(SCRIPTS.items(), seen, strict=True)
    }


# ---- boxes ----

REGION_BYTES = 4096
BOX_ROWS = 16
BOX_BYTES = BOX_ROWS * 128
ROWS, COLS, PITCH = 40, 200, 208
CORNERS = {
    "inside": (64, 8, 0),
    "right edge": (192, 8, 0),
    "bottom edge": (64, 32, 0),
    "corner": (192, 32, 0),
    "right of it": (256, 0, 0),
    "below it": (0, 48, 0),
    "behind it": (0, 0, 1),
    "left edge": (-8, 8, 0),
    "top edge": (64, -4, 0),
    "left of it": (-64, 0, 0),
}
SWIZZLE_ROWS = {"none": 128, "32B": 32, "64B": 64, "128B": 128}
"""Bytes of a row of the boxes here."""
_BOX = Kernel("barriers", "box", smem_bytes=1024 + REGION_BYTES)


def source_matrix() -> np.ndarray:
    """`[ROWS, PITCH]` u16 that tell every element's place."""
    return (1 + np.arange(ROWS * PITCH, dtype=np.uint16)).reshape(ROWS, PITCH)


def map_over(source: np.ndarray, swizzle: str, offset: int = 0) -> Mapped:
    """Boxes of 16 rows as wide as the swizzle."""
    dims = (COLS - offset // 2, ROWS, 1)
    box = (SWIZZLE_ROWS[swizzle] // 2, BOX_ROWS, 1)
    return Mapped(source, dims, (PITCH * 2, PITCH * 2 * ROWS), box, swizzle, offset)


def copy_boxes(
    run: Run, mapped: Mapped, requests: list[tuple[int, int, int, int, int]]
) -> tuple[np.ndarray, np.ndarray, int]:
    """(whether each phase completed, the regions, their shared address) of (x, y, z, offset, bytes to expect)."""
    done = np.zeros(len(requests), np.uint32)
    dump = np.zeros((len(requests), REGION_BYTES), np.uint8)
    base = np.zeros(1, np.uint32)
    run(_BOX, len(requests), mapped, np.array(requests, np.int32), done, dump, base)
    return done, dump, int(base[0])


def expected_region(
    source: np.ndarray, swizzle: str, corner: tuple[int, int, int], start: int, base: int, offset: int = 0
) -> np.ndarray:
    """The region after a box landed `start` bytes into it, swizzled by absolute address bits from `base`; `[4096]`."""
    x, y, z = corner
    width = SWIZZLE_ROWS[swizzle] // 2
    box = np.zeros((BOX_ROWS, width), np.uint16)
    for row in range(BOX_ROWS):
        for col in range(width):
            if z == 0 and 0 <= y + row < ROWS and 0 <= x + col < COLS - offset // 2:
                box[row, col] = source[y + row, x + col + offset // 2]
    region = np.full(REGION_BYTES, 0xEE, np.uint8)
    address = base + start + np.arange(box.nbytes)
    mask = SWIZZLE_ROWS[swizzle] // 16 - 1 if swizzle != "none" else 0
    region[(address ^ ((address >> 7 & mask) << 4)) - base] = box.view(np.uint8).reshape(-1)
    return region


def ask_box_bytes(run: Run, arrays: Arrays) -> dict[str, Any]:
    """For boxes partly or wholly outside: which expectations complete the phase, of every multiple of 16 bytes."""
    source, tried = source_matrix(), range(0, BOX_BYTES + 512, 16)
    answer: dict[str, Any] = {}
    for swizzle in ("128B", "none"):
        for name, corner in CORNERS.items():
            done, dump, base = copy_boxes(run, map_over(source, swizzle), [(*corner, 0, e) for e in tried])
            expected = expected_region(source, swizzle, corner, 0, base)
            answer[f"{name}, {swizzle}"] = {
                "completes with": [e for e, d in zip(tried, done, strict=True) if d],
                "regions as modelled": int((dump == expected).all(axis=1).sum()),
                "regions": len(tried),
            }
    return answer


def ask_box_alignment(run: Run, arrays: Arrays) -> dict[str, Any]:
    """Boxes at multiples of 128 bytes: whether bits of the absolute address, or of the offset in the box, swizzle."""
    source, corner = source_matrix(), CORNERS["inside"]
    answer: dict[str, Any] = {}
    for swizzle, row_bytes in SWIZZLE_ROWS.items():
        starts = range(0, 1024, 128)
        requests = [(*corner, start, row_bytes * BOX_ROWS) for start in starts]
        done, dump, base = copy_boxes(run, map_over(source, swizzle), requests)
        absolute, relative = [], []
        for start, region in zip(starts, dump, strict=True):
            absolute.append(bool((region == expected_region(source, swizzle, corner, start, base)).all()))
            shifted = np.roll(expected_region(source, swizzle, corner, 0, 0), start)
            relative.append(bool((region == shifted).all()))
        answer[swizzle] = {
            "region's address": base,
            "completes": [bool(d) for d in done],
            "absolute": absolute,
            "relative": relative,
        }
    return answer


def ask_global_alignment(run: Run, arrays: Arrays) -> dict[str, Any]:
    """Tensors that start at 16, 32, 64 bytes from a multiple of 128: whether swizzled boxes of them come right."""
    source, corner = source_matrix(), CORNERS["inside"]
    answer: dict[str, Any] = {}
    for offset in (0, 64, 32, 16):
        for swizzle, row_bytes in SWIZZLE_ROWS.items():
            mapped = map_over(source, swizzle, offset)
            done, dump, base = copy_boxes(run, mapped, [(*corner, 0, row_bytes * BOX_ROWS)])
            right = bool((dump[0] == expected_region(source, swizzle, corner, 0, base, offset)).all())
            answer[f"{swizzle} at {offset}"] = {"completes": bool(done[0]), "right": right}
    return answer


# ---- lanes, addresses, clocks, approximations ----

MASKS = (0xFFFFFFFF, 0xFFFF0000, 0x80000000, 0xAAAAAAAA, 0x00F0F000, 0xFFFFFFFE, 0x7FFFFFFF, 0x00000010, 0xC0000003)


def ask_elect(run: Run, arrays: Arrays) -> dict[str, Any]:
    """The elected lane of each mask in two warps, and whether the predicate was true on that lane alone."""
    masks = np.array(MASKS, np.uint32)
    elected, leaders = np.full((len(MASKS), 2), 99, np.uint32), np.zeros((len(MASKS), 2), np.uint32)
    run(Kernel("lanes", "elect", 64), len(MASKS), masks, elected, leaders)
    return {
        f"{mask:#010x}": {"lanes": row.tolist(), "one leader": [1 << int(lane) for lane in row] == bits.tolist()}
        for mask, row, bits in zip(MASKS, elected, leaders, strict=True)
    }


def ask_window(run: Run, arrays: Arrays) -> dict[str, Any]:
    """Where dynamic shared memory starts, and how `mapa` names it in the CTAs of a cluster of 4."""
    seen = np.zeros((4, 6), np.uint32)
    run(Kernel("lanes", "window", 32, 2048, cluster=4), 4, seen)
    rows = sorted(seen.tolist())
    return {f"rank {rank}": {"own": hex(own), "mapa": [hex(m) for m in mapped]} for rank, own, *mapped in rows}


def ask_clock(run: Run, arrays: Arrays) -> dict[str, Any]:
    """Steps of `%globaltimer` in ns."""
    times = np.zeros(4096, np.uint64)
    run(Kernel("lanes", "clock", 32), 1, times, len(times))
    steps = np.diff(times).astype(np.int64)
    changes = steps[steps != 0]
    return {
        "readings": len(times),
        "changes": len(changes),
        "smallest step": int(changes.min()) if len(changes) else 0,
        "largest step": int(changes.max()) if len(changes) else 0,
        "span": int(times[-1] - times[0]),
    }


FUNCTIONS: dict[str, tuple[int, Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "ex2.approx": (0, lambda x, y: np.exp2(x)),
    "rcp.approx": (1, lambda x, y: 1 / x),
    "tanh.approx": (2, lambda x, y: np.tanh(x)),
    "sqrt.rn": (3, lambda x, y: np.sqrt(np.abs(x))),
    "div.rn": (4, lambda x, y: x / y),
}
KEPT_VALUES = 4096


def ask_functions(run: Run, arrays: Arrays) -> dict[str, Any]:
    """Distance in ulp from fp64 rounded to fp32, as a histogram; and the first values as they came."""
    count = 1 << 18
    answer: dict[str, Any] = {}
    for name, (number, exact) in FUNCTIONS.items():
        draw = Draw(500 + number)
        x = draw.fp32(-12, 4, count)
        x = np.abs(x) if name == "sqrt.rn" else x
        y, out = draw.fp32(-12, 4, count), np.zeros(count, np.float32)
        run(Kernel("lanes", "functions", 256), count // 256, x, y, out, count, number)
        rounded = exact(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
        ulps = out.view(np.int32).astype(np.int64) - rounded.view(np.int32)
        near = np.clip(ulps, -5, 5)
        answer[name] = {
            "ulp": {str(step): int((near == step).sum()) for step in range(-5, 6) if (near == step).any()},
            "largest relative": float(np.abs(out.astype(np.float64) / rounded - 1).max()),
        }
        arrays[f"function {name}"] = out[:KEPT_VALUES]
    return answer


# ---- wgmma ----


def swizzled_image(bits: np.ndarray) -> np.ndarray:
    """`[B, rows, k]` bf16 bits -> `[B, rows, 64]` as they lie in shared memory from a multiple of 1024 on."""
    batches, rows, k = bits.shape
    wide = np.zeros((batches, rows, 64), np.uint16)
    wide[:, :, :k] = bits
    chunks = wide.reshape(batches, rows, 8, 8)
    places = np.arange(8)[None, :] ^ (np.arange(rows) % 8)[:, None]
    return np.ascontiguousarray(chunks[:, np.arange(rows)[:, None], places].reshape(batches, rows, 64))


def compute_sum(run: Run, kernel: str, case: SumCase) -> np.ndarray:
    """`d [B, 64, n]` fp32 of a case."""
    batches, n = case.a.shape[0], case.b.shape[1]
    out = np.zeros((batches, 64, n), np.float32)
    smem_bytes = (64 + n) * 128
    launch = Kernel("products", kernel, 128, smem_bytes)
    run(launch, batches, swizzled_image(case.a), swizzled_image(case.b), np.ascontiguousarray(case.c), out)
    return out


def ask_sums(run: Run, arrays: Arrays) -> dict[str, Any]:
    """The sums of every case, and `judge_sums` of them."""
    for kernel, case in sum_cases():
        arrays[f"sum {case.name}"] = compute_sum(run, kernel, case)
    return judge_sums(arrays)


def judge_sums(arrays: Arrays) -> dict[str, Any]:
    """How many bits each model has right, of each case and of all; the best models first."""
    models = candidate_models()
    total, shares, cases = 0, dict.fromkeys(map(str, models), 0), {}
    for _, case in sum_cases():
        row = {}
        for model in models:
            row[str(model)], judged = judge(case, arrays[f"sum {case.name}"], model)
            shares[str(model)] += row[str(model)]
        total += judged
        cases[case.name] = {"judged": judged} | _best(row, 3)
    return {"cases": cases, "judged": total, "models": _best(shares, 8)}


def _best(equal: dict[str, int], count: int) -> dict[str, int]:
    return {name: equal[name] for name in sorted(equal, key=lambda name: -equal[name])[:count]}


_READ_B = Kernel("products", "read_b", 128, 64 * 128 + 8192)
_FIELD_SHIFT = 49 - 32


def base_offset_requests() -> list[tuple[int, int]]:
    """(bytes from a multiple of 1024, base offset field): every row of an atom, every field, two places in K."""
    return [(128 * row + 32 * k, field) for k in (0, 2) for field in range(8) for row in range(8)]


def read_b(run: Run, requests: list[tuple[int, int]]) -> np.ndarray:
    """`[requests, 16 n, 16 k]`: which bf16 element behind the multiple of 1024 was read as element (n, k)."""
    identity = np.zeros((1, 64, 16))
    identity[0, :16] = np.eye(16)
    bits = [(start, field << _FIELD_SHIFT) for start, field in requests]
    a = swizzled_image(bits_of(identity))
    places = np.arange(4096)
    parts = []
    for digits in (places & 63, places >> 6):
        image, out = bits_of(digits.astype(np.float64)), np.zeros((len(requests), 64, 16), np.float32)
        run(_READ_B, len(requests), a, image, np.array(bits, np.uint32), out)
        parts.append(out[:, :16].transpose(0, 2, 1).astype(np.int32))
    return parts[0] + 64 * parts[1]


ROW_BITS: dict[str, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "address": lambda row, field, start: row,
    "address - field": lambda row, field, start: row - field,
    "address + field": lambda row, field, start: row + field,
    "address ^ field": lambda row, field, start: row ^ field,
    "offset": lambda row, field, start: row - start,
    "offset + field": lambda row, field, start: row - start + field,
}
"""What may be xored into bits 4 to 6: bits 7 to 9 of the address, the descriptor's field, and the start's own bits."""


def predicted_b(start: int, field: int, rule: str) -> np.ndarray:
    """`[16 n, 16 k]` elements by one of the rules."""
    n, k = np.arange(16)[:, None], np.arange(16)[None, :]
    linear = start + n % 8 * 128 + n // 8 * 1024 + k * 2
    row = ROW_BITS[rule](linear >> 7, field, start >> 7) & 7
    return (linear ^ row << 4) // 2


def ask_base_offset(run: Run, arrays: Arrays) -> dict[str, Any]:
    """Which rule says what was read, for each row that an operand starts in and each base offset."""
    requests = base_offset_requests()
    found = read_b(run, requests)
    arrays["base offset"] = found.astype(np.uint16)
    matches = {
        f"start {start} field {field}": [rule for rule in ROW_BITS if (predicted_b(start, field, rule) == got).all()]
        for (start, field), got in zip(requests, found, strict=True)
    }
    always = [rule for rule in ROW_BITS if all(rule in rules for rules in matches.values())]
    return {"rules that always hold": always, "rules that hold": matches}


def questions() -> Iterator[tuple[str, Question]]:
    """All of them, those that a device could answer with a fault last."""
    yield "barrier", ask_barrier
    yield "elect", ask_elect
    yield "window", ask_window
    yield "clock", ask_clock
    yield "functions", ask_functions
    yield "sums", ask_sums
    yield "box bytes", ask_box_bytes
    yield "box alignment", ask_box_alignment
    yield "base offset", ask_base_offset
    yield "global alignment", ask_global_alignment


def plain(value: Any) -> Any:
    """An answer without numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
