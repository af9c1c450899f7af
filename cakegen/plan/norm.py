"""Plans the stand-alone norm launch. Imports arch, the model and the plan's records."""

from __future__ import annotations

from cakegen.arch import architecture
from cakegen.model import DeviceFacts, Model
from cakegen.plan.records import Launch, NormForm


def norm_grid_ctas(model: Model, tokens: int) -> int:
    """CTAs of the norm: a row a warp."""
    return -(-tokens // model.prefill.norm_rows_per_cta)


def norm_launch(model: Model, tokens: int, early_trigger: bool, device: DeviceFacts) -> Launch:
    """The norm over `[tokens, latent]` rows.

    Parameters
    ----------
    early_trigger
        Dependents are released at entry, else after the stores.
    """
    suffix = architecture(device.arch).key_suffix
    form = NormForm(model.prefill.norm_rows_per_cta, early_trigger)
    return Launch(f"tail_norm:e{int(early_trigger)}{suffix}", (norm_grid_ctas(model, tokens), 1, 1), (), form)
