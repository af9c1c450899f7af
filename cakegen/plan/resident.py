"""Leaf module: a plan that a device's occupancy agrees with. Imports model and the plan's records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cakegen.model import DeviceFacts
from cakegen.plan.records import Plan


def plan_resident(
    facts: DeviceFacts, plan_of: Callable[[DeviceFacts], Plan], measure: Callable[[Plan], int | None]
) -> Plan:
    """A plan for no more resident pairs than its own launches can have.

    The first counts on those of `facts`. Only a loaded program can be asked how many of its clusters a device holds;
    where that is fewer, the request is planned again for so many. Each turn lowers the figure, so this ends.

    Parameters
    ----------
    plan_of
        The plan of the request for a device.
    measure
        Pairs of a plan's launches that can be resident at once, the fewest of them; None: it launches no pairs.

    Returns
    -------
    Plan
        Its `device` has the figure that it was planned with.
    """
    while True:
        plan = plan_of(facts)
        pairs = measure(plan)
        if pairs is None or pairs >= facts.resident_pairs:
            return plan
        facts = replace(facts, resident_pairs=pairs)
