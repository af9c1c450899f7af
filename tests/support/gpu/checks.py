"""Whole checks that decode and prefill share: values, equal bits, lone bad rows, replays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable

import torch
from support.gpu.cases import BF16_TOLERANCE, Case, Checks, FrontCase, TailCase, run_twice

from cakegen.plan.records import DecodeForm, GemmForm, Launch
from cakegen.runtime.prepared import Runner

Values = tuple[torch.Tensor, ...]


def copies(runner: Runner) -> Values:
    """Run, and keep the outputs."""
    return tuple(value.clone() for value in runner())


def same_bits_group(runner: Runner) -> Hashable:
    """Calls of one group give a row the same bits, whatever T: they add it up in the same order.

    That is decode of up to 192 tokens, where two CTAs of a tile take K or the tokens, or where one takes all; else one
    program, and where it cuts tiles, also the same cut, which follows from the number of row tiles.
    """
    assert runner.plan is not None
    return tuple(_bits_of(launch) for launch in runner.plan.launches)


def _bits_of(launch: Launch) -> Hashable:
    form = launch.form
    if isinstance(form, DecodeForm) and form.n_pad <= 192:
        return form.cluster_ctas * form.token_parts
    if isinstance(form, GemmForm) and dict(launch.parameters)["sk_total"]:
        return launch.key, launch.parameters
    return launch.key


def check_front(checks: Checks, case: FrontCase, tokens: Iterable[int], label: str) -> None:
    """Values, guards and relaunch, largest T first: a row has the bits that it had in a larger call of its group."""
    counts = sorted(tokens, reverse=True)
    expected = case.expected(slice(counts[0]))
    largest: dict[Hashable, Values] = {}
    for count in counts:
        runner = case.prepare(count)
        values = run_twice(checks, case, runner, count, f"{label} T {count}")
        rows = largest.setdefault(same_bits_group(runner), values)
        for name, value, exact, row, tolerance in zip(case.names, values, expected, rows, case.tolerances, strict=True):
            checks.close(f"{label} T {count} {name}", value, exact[:count], tolerance)
            checks.equal(f"{label} T {count} {name} rows", value, row[:count])


def check_tail(checks: Checks, case: TailCase, tokens: Iterable[int], label: str) -> None:
    """As `check_front`; `y` is equal bit for bit."""
    counts = sorted(tokens, reverse=True)
    y, out = case.expected(slice(counts[0]))
    largest: dict[Hashable, Values] = {}
    for count in counts:
        runner = case.prepare(count)
        values = run_twice(checks, case, runner, count, f"{label} T {count}")
        rows = largest.setdefault(same_bits_group(runner), values)
        checks.equal(f"{label} T {count} y", values[0], y[:count])
        checks.close(f"{label} T {count} out", values[1], out[:count], BF16_TOLERANCE)
        checks.equal(f"{label} T {count} out rows", values[1], rows[1][:count])


def check_sum_over_ranks(checks: Checks, front: list[FrontCase], tail: list[TailCase], tokens: int, label: str) -> None:
    """All ranks together against the first case of each list, which is TP 1.

    Every rank's `out` is rounded to bf16 before the sum; those errors add like noise, so twice the tolerance.
    """
    rows = slice(tokens)
    total = torch.zeros_like(tail[0].prepare(tokens)()[1], dtype=torch.float64)
    for case in tail[1:]:
        total += case.prepare(tokens)()[1].double()
    checks.close(f"{label} T {tokens} out", total, tail[0].expected(rows)[1], 2 * BF16_TOLERANCE)
    shared = torch.cat([case.prepare(tokens)()[2] for case in front[1:]], dim=1)
    checks.close(f"{label} T {tokens} shared_act", shared, front[0].expected(rows)[2], BF16_TOLERANCE)


def check_front_bad_row(checks: Checks, case: FrontCase, tokens: int, row: int, bad: float, label: str) -> None:
    """A bad value of x reaches its own row only, and the outputs that it must reach."""
    good = copies(case.prepare(tokens))
    x = case.x.clone()
    x[row, 3] = bad
    check_only_row(checks, case, good, copies(case.prepare(tokens, x=x)), row, label, changed=(0, 1))


def check_tail_bad_row(checks: Checks, case: TailCase, tokens: int, row: int, bad: float, label: str) -> None:
    """A bad value of the last partial, then one of shared_act as well."""
    good = copies(case.prepare(tokens))
    routed, shared_act = case.routed.clone(), case.shared_act.clone()
    routed[-1, row, -1] = bad
    poisoned = copies(case.prepare(tokens, routed=routed))
    check_only_row(checks, case, good, poisoned, row, f"{label} routed", changed=(0, 1))
    shared_act[row, 0] = bad
    poisoned = copies(case.prepare(tokens, shared_act=shared_act))
    check_only_row(checks, case, good, poisoned, row, f"{label} shared_act", changed=(1,))


def check_only_row(
    checks: Checks, case: Case, good: Values, poisoned: Values, row: int, label: str, *, changed: tuple[int, ...]
) -> None:
    """All rows but one keep their bits; that one holds a non-finite value in the outputs named by `changed`."""
    for index, (name, before, after) in enumerate(zip(case.names, good, poisoned, strict=True)):
        keep = torch.arange(before.shape[0], device=before.device) != row
        checks.equal(f"{label} {name} other rows", after[keep], before[keep])
        if index in changed:
            checks.zero(f"{label} {name} bad row", after[row].isfinite().all().long())


def check_replay(
    checks: Checks,
    case: Case,
    runner: Runner,
    changes: list[tuple[torch.Tensor, torch.Tensor]],
    mode: str,
    label: str,
) -> None:
    """Capture; replay; change the inputs in place; replay twice; compare with plain launches on the same values."""
    before = copies(runner)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        runner()
    originals = [buffer.clone() for buffer, _ in changes]
    case.poison()
    graph.replay()
    for name, value, expected in zip(case.names, runner.outputs, before, strict=True):
        checks.equal(f"{label} {name} replay", value, expected)
    for buffer, values in changes:
        buffer.copy_(values)
    expected_after = copies(runner)
    for turn in (1, 2):
        case.poison()
        graph.replay()
        for name, value, expected in zip(case.names, runner.outputs, expected_after, strict=True):
            checks.equal(f"{label} {name} new values {turn}", value, expected)
    assert not any(torch.equal(*pair) for pair in zip(before, expected_after, strict=True)), f"{label}: stale inputs"
    for (buffer, _), original in zip(changes, originals, strict=True):
        buffer.copy_(original)


def check_chunks(checks: Checks, case: Case, values: Values, label: str, rows_per_chunk: int = 1 << 15) -> None:
    """Every row of a call too large for one fp64 reference."""
    tolerances = case.tolerances if isinstance(case, FrontCase) else (0.0, BF16_TOLERANCE)
    for first in range(0, values[0].shape[0], rows_per_chunk):
        rows = slice(first, min(first + rows_per_chunk, values[0].shape[0]))
        for name, value, exact, tolerance in zip(case.names, values, case.expected(rows), tolerances, strict=True):
            where = f"{label} rows {first} … {name}"
            if tolerance:
                checks.close(where, value[rows], exact, tolerance)
            else:
                checks.equal(where, value[rows], exact)


def capture_beside(runner: Runner, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one call, captured in global mode while another thread works; what that raises is raised here."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread, graph = threading.Thread(target=guarded, daemon=True), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        runner()
        thread.start()
        thread.join(60)
    assert not thread.is_alive(), "the other thread still works after 60 s"
    if failures:
        raise failures[0]
    return graph
