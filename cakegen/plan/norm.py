"""Plans the stand-alone norm launch. Imports arch, the model and the plan's records."""

from __future__ import annotations

from cakegen.arch import architecture
from cakegen.model import DeviceFacts
from cakegen.plan.records import Launch, NormForm


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
