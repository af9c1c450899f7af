"""Plans what prepares a tail's rows: the norm, the sum of partials. Imports arch, the model and the plan's records."""

from __future__ import annotations

from cakegen.arch import architecture
from cakegen.model import DeviceFacts
from cakegen.plan.records import Launch, NormForm, Rule


def norm_grid_ctas(rows_per_cta: int, tokens: int) -> int:
    """CTAs of the norm: a row a warp."""
    return -(-tokens // rows_per_cta)


def norm_launch(rows_per_cta: int, tokens: int, early_trigger: bool, device: DeviceFacts) -> Launch:
    """The norm over `[tokens, latent]` rows.

    Parameters
    ----------
    early_trigger
        Dependents are released at entry, else after the stores.
    """
    form = NormForm(rows_per_cta, early_trigger)
    key = f"tail_norm:e{int(early_trigger)}{architecture(device.arch).key_suffix}"
    return Launch(key, (norm_grid_ctas(rows_per_cta, tokens), 1, 1), (), form)


def sum_launches(rows_per_cta: int, tokens: int, partials: int, device: DeviceFacts) -> tuple[Launch, ...]:
    """What goes before a tail without a norm: the launch that adds partials up, and none for a single one.

    Its dependent is an ordinary launch, so it releases it behind its stores.
    """
    if partials == 1:
        return ()
    form = NormForm(rows_per_cta, early_trigger=False, normed=False)
    key = f"tail_sum:e0{architecture(device.arch).key_suffix}"
    return (Launch(key, (norm_grid_ctas(rows_per_cta, tokens), 1, 1), (), form),)


def sum_rule(partials: int) -> Rule:
    """Whether partials are added up before the tail, and why."""
    why = "one partial is multiplied as it is" if partials == 1 else f"{partials} partials are added up first"
    return Rule("sum_launch", partials > 1, f"the block has no norm: {why}")
