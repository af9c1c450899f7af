"""The family with tensor memory: B200, B300 and their kin. Imports `family`, the prefill planner and its layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from cakegen.model import DeviceFacts, Model
from cakegen.plan.family import Family, WarpRoles, no_rules
from cakegen.plan.gemm import PAIR_TOKENS, Launches
from cakegen.plan.gemm_layout import BLACKWELL_THREADS, blackwell_gemm_smem
from cakegen.plan.prefill import plan_prefill
from cakegen.plan.records import DecodeForm, GemmForm
from cakegen.rules import BlackwellRules, DecodeRules, HopperTile


class Blackwell(Family):
    """One thread issues every product, sums lie in tensor memory, and four epilogue warps also normalise.

    Its boxes of tokens stay whole: what filling their rows outside of a tensor costs is not measured.
    """

    name = "sm100"
    rules_name = "blackwell"
    rules_record = BlackwellRules
    bodies: ClassVar = {
        "decode_front": "kernels/decode_front_sm100.cuh",
        "decode_tail": "kernels/decode_tail_sm100.cuh",
        "tail_norm": "kernels/tail_norm.cuh",
        "tail_sum": "kernels/tail_sum.cuh",
        "front_gemm": "kernels/front_gemm_sm100.cuh",
        "tail_gemm": "kernels/tail_gemm_sm100.cuh",
    }
    token_tiles = (8, 16, 32, 64, 128)
    max_cta_tokens = 128
    why_token_tiles = "the widest token tile of a kernel has 128 rows"
    clips_tokens = False
    min_stages = 1
    gemm_threads = BLACKWELL_THREADS
    gemm_grid = "pair_grid"
    sums_in_tensor_memory = True

    def rules(self, model: Model) -> BlackwellRules:
        """See `Family.rules`."""
        if model.blackwell is None:
            raise no_rules(model, self.name)
        return model.blackwell

    def plan_prefill(
        self, model: Model, stage: str, tp: int, tokens: int, partials: int, device: DeviceFacts
    ) -> Launches:
        """See `Family.plan_prefill`."""
        return plan_prefill(model, self.rules(model), stage, tp, tokens, partials, device)

    def prefill_starts(self, model: Model) -> set[int]:
        """Pair rows, and what the tail's instances are chosen by."""
        rules, starts = self.rules(model).prefill, set(range(1, model.max_tokens, PAIR_TOKENS))
        if rules.short_ring is not None:
            starts.add(rules.short_ring.max_tokens + 1)
        if rules.narrow is not None:
            starts |= {rules.narrow.tokens, rules.narrow.tokens + 1}
        return starts

    def tiles(self, model: Model) -> tuple[HopperTile, ...]:
        """None: the tile follows from the request."""
        return ()

    def warp_roles(self, form: DecodeForm) -> WarpRoles:
        """The same for every form."""
        roles = "four epilogue warps, the producer warp, the MMA warp"
        return WarpRoles(6, 4, 4, "epilogue warps", "MMA warp", "epilogue warps", roles)

    def gemm_smem_bytes(self, form: GemmForm) -> int:
        """See `Family.gemm_smem_bytes`."""
        return blackwell_gemm_smem(form).total_bytes

    def refused_rules(self, rules: DecodeRules) -> Iterator[tuple[str, str]]:
        """What only Hopper's kernels do."""
        found = {
            "front.narrow": (rules.front.narrow, "Blackwell's MMA has 128 rows, all of one tile"),
            "front.split_tokens": (rules.front.split_tokens, "no kernel of Blackwell's splits the tokens"),
            "tail.split_tokens": (rules.tail.split_tokens, "no kernel of Blackwell's splits the tokens"),
            "tail.depth2_min_stages": (rules.tail.depth2_min_stages, "a stage of Blackwell's tail is one chunk"),
        }
        return ((field, why) for field, (value, why) in found.items() if value is not None)
