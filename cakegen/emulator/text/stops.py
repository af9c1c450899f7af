"""Which instructions a block stops at, and which want their whole warp."""

from __future__ import annotations

from cakegen.emulator.text.ptx import Instruction

# Executed by `synchronise`: warps meet here, or asynchronous work begins.
STOPS = {"bar", "barrier", "mbarrier", "cp", "st.async", "atom", "red", "trap", "tcgen05", "griddepcontrol"}
STOPS |= {"clusterlaunchcontrol.try_cancel"}
# Their last operand names the lanes that must be there.
MEMBER_MASKED = {"shfl", "vote", "elect", "match", "redux"}
_STRONG = {"acquire", "release", "relaxed"}


def is_stop(instruction: Instruction) -> bool:
    """Whether an instruction ends a block and is executed by `synchronise`."""
    parts = instruction.parts
    if parts[0] == "bar" and parts[1:2] == ("warp",):
        return False
    strong = parts[0] in ("ld", "st") and bool(_STRONG & set(parts))
    return parts[0] in STOPS or ".".join(parts[:2]) in STOPS or strong


def needs_convergence(instruction: Instruction) -> bool:
    """Whether all lanes of the warp (or of its member mask) must be at this instruction together."""
    parts = instruction.parts
    return "sync" in parts or "aligned" in parts or parts[0] in ("bar", "barrier")
