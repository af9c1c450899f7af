"""Requests over whole ranges, planned once for all tests of the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.models import kimi_k3_model

from cakegen.model import DeviceFacts, Model
from cakegen.plan import Plan, plan_route

PlanAll = Callable[..., Iterator[Plan]]


@pytest.fixture(scope="session")
def kimi() -> Model:
    return kimi_k3_model()


@pytest.fixture(scope="session")
def b200() -> DeviceFacts:
    return DeviceFacts.nominal("sm_100a", 148)


@pytest.fixture(scope="session")
def h200() -> DeviceFacts:
    return DeviceFacts.nominal("sm_90a", 132)


@pytest.fixture(scope="session")
def plan_all() -> PlanAll:
    """Plans of both stages for every given token count; one partial and more than one."""

    def planned(
        model: Model, device: DeviceFacts, tps: tuple[int, ...], tokens: range, partials: tuple[int, ...] = (1, 2)
    ) -> Iterator[Plan]:
        for tp in tps:
            for count in tokens:
                yield plan_route(model, stage="front", tp=tp, tokens=count, partials=1, device=device)
                for parts in partials:
                    yield plan_route(model, stage="tail", tp=tp, tokens=count, partials=parts, device=device)

    return planned
