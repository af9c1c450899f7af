"""What the prefill planners of all architectures share: pair rows, and the parameters of a launch with their rules.

Imports errors, the model and the plan's records.
"""

from __future__ import annotations

from cakegen.errors import PlanError
from cakegen.model import DeviceFacts, Model
from cakegen.plan.records import GEMM_BLOCK_M, Launch, Rule
from cakegen.plan.stream_k import Split
from cakegen.plan.workspace import PAIR_CTAS

PAIR_TOKENS = PAIR_CTAS * GEMM_BLOCK_M
"""Tokens of a pair's tile."""
Launches = tuple[tuple[Launch, ...], tuple[Rule, ...]]


def refuse_no_pair(model: Model, stage: str, tokens: int, device: DeviceFacts) -> None:
    """Refuse a device on which no pair of CTAs can run.

    Raises
    ------
    PlanError
        It holds none.
    """
    if device.resident_pairs < 1:
        raise PlanError(
            f"{model.name} {stage}: T = {tokens}: a prefill GEMM runs in pairs of CTAs, and the device holds"
            f" {device.resident_pairs} resident pairs ({device.sm_count} SMs); it needs at least 1"
        )


def pair_rows_of(tokens: int) -> int:
    """Pairs of row tiles; the last may lack its second."""
    return -(-tokens // PAIR_TOKENS)


def gemm_parameters(m_tiles: int, split: Split) -> tuple[tuple[str, int], ...]:
    """Run-time parameters of a GEMM that the plan decides."""
    return (("m_tiles", m_tiles), *split.parameters)


def parameter_rules(m_tiles: int, rows: str, split: Split) -> tuple[Rule, ...]:
    """Why each of `gemm_parameters` has its value; `rows` says it of `m_tiles`."""
    return (Rule("m_tiles", m_tiles, rows), *(Rule(name, value, split.reason) for name, value in split.parameters))
