"""What a family of architectures decides, under one name a question: `Hopper` and `Blackwell` answer each.

`cakegen.plan.families` resolves a family once, from the architecture. Imports the model, rules and the plan's records.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from cakegen.errors import PlanError
from cakegen.model import DeviceFacts, Model
from cakegen.plan.gemm import Launches
from cakegen.plan.gemm_layout import WARP_THREADS
from cakegen.plan.records import DecodeForm, Form, GemmForm, LaunchShape, NormForm
from cakegen.plan.smem import decode_smem
from cakegen.plan.workspace import PAIR_CTAS
from cakegen.rules import BlackwellRules, DecodeRules, HopperRules, HopperTile


@dataclass(frozen=True)
class WarpRoles:
    """The warps of a decode CTA.

    Parameters
    ----------
    count
        Warps of the CTA.
    producer
        Index of the warp that issues the copies.
    norm
        Warps that normalise rows where the norm is fused.
    finishers, multiplier, normers
        What the four warps are called that finish and store the sums; who issues the products; and who normalises.
    comment
        The roles in warp order.
    """

    count: int
    producer: int
    norm: int
    finishers: str
    multiplier: str
    normers: str
    comment: str


class Family(ABC):
    """Architectures that share one program text.

    Parameters
    ----------
    name
        As `Architecture.family` has it.
    rules_name, rules_record
        What its rules are called in `Model`, in an export and as a file below `exports/rules`; and their dataclass.
    bodies
        Role of a program -> the header below `templates/` that declares its body.
    token_tiles, max_cta_tokens
        Token tiles that decode kernels are written for, and the widest that one CTA multiplies.
    why_token_tiles
        What those two come from.
    clips_tokens
        Whether a decode program's boxes of tokens are as high as the request has tokens, not as the MMA is wide.
    min_stages
        Fewest stages of a decode ring.
    gemm_threads
        Threads of a prefill GEMM's CTA.
    gemm_grid
        The function of the bindings that gives a prefill GEMM's grid.
    sums_in_tensor_memory
        Whether a decode program's sums lie in tensor memory, else in the registers of the warps that multiply.
    """

    name: ClassVar[str]
    rules_name: ClassVar[str]
    rules_record: ClassVar[type]
    bodies: ClassVar[Mapping[str, str]]
    token_tiles: ClassVar[tuple[int, ...]]
    max_cta_tokens: ClassVar[int]
    why_token_tiles: ClassVar[str]
    clips_tokens: ClassVar[bool]
    min_stages: ClassVar[int]
    gemm_threads: ClassVar[int]
    gemm_grid: ClassVar[str]
    sums_in_tensor_memory: ClassVar[bool]

    @abstractmethod
    def rules(self, model: Model) -> HopperRules | BlackwellRules:
        """A model's rules of this family.

        Raises
        ------
        PlanError
            It has none.
        """

    def decode(self, model: Model) -> DecodeRules:
        """A model's decode rules of this family; raises as `rules`."""
        return self.rules(model).decode

    @abstractmethod
    def plan_prefill(
        self, model: Model, stage: str, tp: int, tokens: int, partials: int, device: DeviceFacts
    ) -> Launches:
        """The launches of a stage that decode does not serve.

        Raises
        ------
        PlanError
            The device holds no pair or not a ring, or a dimension does not divide into tiles.
        """

    @abstractmethod
    def prefill_starts(self, model: Model) -> set[int]:
        """Token counts below `model.max_tokens` from which on a prefill plan may have other keys, beside the norm's."""

    @abstractmethod
    def tiles(self, model: Model) -> tuple[HopperTile, ...]:
        """Prefill tiles of which a plan takes the cheapest: which it is depends on how many pairs a device holds.

        Empty where no plan has such a choice. `Model.preferring` makes a plan take one.
        """

    @abstractmethod
    def warp_roles(self, form: DecodeForm) -> WarpRoles:
        """The roles of a decode form's warps."""

    @abstractmethod
    def gemm_smem_bytes(self, form: GemmForm) -> int:
        """Dynamic shared memory of a prefill GEMM's CTA."""

    @abstractmethod
    def refused_rules(self, rules: DecodeRules) -> Iterator[tuple[str, str]]:
        """Decode rules that no kernel of the family can follow: the field, and why."""

    def launch_shape(self, form: Form) -> LaunchShape:
        """Threads, cluster and shared memory of a form's CTAs."""
        if isinstance(form, NormForm):
            return LaunchShape(form.rows_per_cta * WARP_THREADS, 1, False, 0, programmatic=False, overlap=False)
        if isinstance(form, GemmForm):
            # CTAs of a fused norm wait for each other; else a tail overlaps its norm's launch
            apart, fused = form.stage == "tail" and form.normed and not form.fused_norm, form.fused_norm
            smem_bytes = self.gemm_smem_bytes(form)
            return LaunchShape(self.gemm_threads, PAIR_CTAS, fused, smem_bytes, programmatic=apart, overlap=fused)
        return LaunchShape(
            self.warp_roles(form).count * WARP_THREADS,
            form.cluster_ctas,
            form.needs_residency,
            decode_smem(form).total_bytes,
            programmatic=False,
            overlap=True,
        )

    def token_ranges(self, model: Model, last: int) -> Iterator[range]:
        """Ranges of token counts, from 1 to `last`, inside which all plans have the keys of both ends, if those agree.

        A decode plan depends on T only through the token tile and what the tail keeps in shared memory. Inside a pair
        row of prefill it does so only through the rows of the norm: whether it is fused, and whether it triggers
        early. Each of the two changes at most once as T grows.
        """
        starts = {1, last + 1} | {edge + 1 for edge in self.decode(model).token_edges} | self.prefill_starts(model)
        inside = sorted(start for start in starts if 1 <= start <= last + 1)
        for start, end in itertools.pairwise(inside):
            yield range(start, end)


def no_rules(model: Model, family: str) -> PlanError:
    """Of a model that has no target of a family."""
    served = ", ".join(target.arch for target in model.targets)
    return PlanError(
        f"{model.name} has no rules for {family}; it is exported for {served}. Add a target and export again"
    )
