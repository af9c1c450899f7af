"""The machine: memory, warps, CTAs, and the schedule that an adversary makes."""
