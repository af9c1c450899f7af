"""The family with wgmma: H20, H100 and H200. Imports `family`, the prefill planner and its layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from cakegen.model import DeviceFacts, Model
from cakegen.plan.family import Family, WarpRoles, no_rules
from cakegen.plan.gemm import PAIR_TOKENS, Launches
from cakegen.plan.gemm_layout import HOPPER_THREADS, hopper_gemm_smem
from cakegen.plan.prefill_sm90 import plan_prefill_sm90
from cakegen.plan.records import DecodeForm, GemmForm
from cakegen.rules import DecodeRules, HopperRules, HopperTile


class Hopper(Family):
    """The warps that multiply keep the sums in their registers.

    Its boxes of tokens are clipped: a box's rows outside of its tensor are filled more slowly than rows are loaded. On
    an H200 the front of TP 8 took 33.0 us with 96 of 128 rows there, 29.0 with all.
    """

    name = "sm90"
    rules_name = "hopper"
    rules_record = HopperRules
    bodies: ClassVar = {
        "decode_front": "kernels/decode_front_sm90.cuh",
        "decode_tail": "kernels/decode_tail_sm90.cuh",
        "tail_norm": "kernels/tail_norm.cuh",
        "tail_sum": "kernels/tail_sum.cuh",
        "front_gemm": "kernels/front_gemm_sm90.cuh",
        "tail_gemm": "kernels/tail_gemm_sm90.cuh",
    }
    token_tiles = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384)
    max_cta_tokens = 192
    why_token_tiles = "two MMAs of 192 tokens take 192 of a thread's 255 registers; above that two CTAs split a tile"
    clips_tokens = True
    min_stages = 2
    """The MMA warps free a stage when they have issued the next one: with a single stage neither side could move."""
    gemm_threads = HOPPER_THREADS
    gemm_grid = "persistent_grid"
    sums_in_tensor_memory = False

    def rules(self, model: Model) -> HopperRules:
        """See `Family.rules`."""
        if model.hopper is None:
            raise no_rules(model, self.name)
        return model.hopper

    def plan_prefill(
        self, model: Model, stage: str, tp: int, tokens: int, partials: int, device: DeviceFacts
    ) -> Launches:
        """See `Family.plan_prefill`."""
        return plan_prefill_sm90(model, self.rules(model), stage, tp, tokens, partials, device)

    def prefill_starts(self, model: Model) -> set[int]:
        """Pair rows."""
        return set(range(1, model.max_tokens, PAIR_TOKENS))

    def tiles(self, model: Model) -> tuple[HopperTile, ...]:
        """See `Family.tiles`."""
        return self.rules(model).prefill.tiles

    def warp_roles(self, form: DecodeForm) -> WarpRoles:
        """Three more normalise: with 8 warps a thread may have 255 registers, with 9 only 168, and no row fits."""
        norm = 3 if form.fused_norm else 0
        roles = f"four MMA warps, {'three norm warps, ' if norm else ''}the producer warp"
        return WarpRoles(4 + norm + 1, 4 + norm, 3, "MMA warps", "MMA warps", "norm warps", roles)

    def gemm_smem_bytes(self, form: GemmForm) -> int:
        """See `Family.gemm_smem_bytes`."""
        return hopper_gemm_smem(form).total_bytes

    def refused_rules(self, rules: DecodeRules) -> Iterator[tuple[str, str]]:
        """None: its kernels follow every rule."""
        return iter(())
