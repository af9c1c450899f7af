"""A plan for no more pairs than a device holds, as a pure function of what is measured."""

from __future__ import annotations

from cakegen.model import DeviceFacts, Model
from cakegen.plan import Plan, plan_resident, plan_route


def planned(model: Model, measured: dict[int, int | None]) -> tuple[Plan, list[int]]:
    """A plan where launches planned for so many pairs turn out to have others, and the figures that were planned."""
    tried = []

    def plan_of(facts: DeviceFacts) -> Plan:
        tried.append(facts.resident_pairs)
        return plan_route(model, stage="tail", tp=8, tokens=8, partials=1, device=facts)

    def measure(plan: Plan) -> int | None:
        return measured[plan.device.resident_pairs]

    return plan_resident(DeviceFacts.nominal("sm_90a", 132), plan_of, measure), tried


def test_plan_that_fits_stays(kimi: Model) -> None:
    for pairs in (66, 70, None):
        plan, tried = planned(kimi, {66: pairs})
        assert tried == [66]
        assert plan.device.resident_pairs == 66


def test_fewer_pairs_are_planned_for_until_they_fit(kimi: Model) -> None:
    plan, tried = planned(kimi, {66: 40, 40: 39, 39: 39})
    assert tried == [66, 40, 39]
    assert plan.device == DeviceFacts("sm_90a", 132, 39, 232448)
    # another form's launches may have more pairs: the figure does not rise
    assert planned(kimi, {66: 40, 40: 66})[1] == [66, 40]
