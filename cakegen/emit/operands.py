"""The arguments of a body's call: kernel parameters, grouped into the structs of `templates/kernels/`. Pure."""

from __future__ import annotations

from cakegen.emit.program import Operand

FRONT_MAPS = Operand(("gate_weight_map", "down_weight_map", "shared_gate_up_weight_map", "x_map"), "FrontMaps")
FRONT_OUTPUTS = Operand(
    ("logits", "latent", "shared_act", "logits_pitch", "latent_pitch", "shared_act_pitch"), "FrontOutputs"
)
TAIL_MAPS = Operand(("shared_down_weight_map", "up_weight_map", "shared_act_map", "y_workspace_map"), "TailMaps")
RESIDENT_TAIL_MAPS = Operand(TAIL_MAPS.parameters[:-1], "ResidentTailMaps")
TAIL_OUTPUT = Operand(("out", "out_pitch"), "TailOutput")
MAPPED_OUTPUT = Operand(("out_map", "out", "out_pitch"), "MappedOutput")
NORM_OPERANDS = Operand(
    (
        *("routed", "norm_weight", "y_workspace", "routed_pitch", "y_pitch"),
        *("num_partials", "routed_partial_stride", "counters"),
    ),
    "NormOperands",
)
"""Of staged rows the last three are left out, of a resident y the last: nothing reads them."""
ONE_PARTIAL_NORM = Operand(
    ("routed", "norm_weight", "y_workspace", "routed_pitch", "y_pitch", "norm_first_rows"), "OnePartialNorm"
)
NO_NORM = Operand((), "NoNorm")
SPLIT = Operand(("num_items", "full_items", "sk_ipc", "sk_max_seg", "sk_total"), "Split")
PARTIALS = Operand(("partials", "counters"), "Partials")


def plain(*names: str) -> tuple[Operand, ...]:
    """Parameters that are passed as they are."""
    return tuple(Operand((name,)) for name in names)
