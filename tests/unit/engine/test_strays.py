"""Members whose sockets grow are given a group of their own anew, and it is said with the number."""

import pytest

from ray_lowcomm.engine.transport import STRAYS
from tests.unit.engine.desk import Desk


@pytest.mark.parametrize(("strays", "anew"), [(0, False), (STRAYS, False), (STRAYS + 1, True), (9_000, True)])
def test_a_group_with_too_many_sockets_is_formed_anew_with_the_next_round(strays, anew):
    desk = Desk(2)
    desk.begin()
    desk.arrive(0, 1)
    desk.take(0, 1)
    desk.vote(0)
    desk.vote(1, strays=strays)
    desk.take(0, 1)
    assert desk.coordinator.round == 1  # what was exchanged counts
    said = [event.data for event in desk.events if event.kind == "notice" and "sockets" in event.data]
    assert [f"replica 1 holds {strays} sockets more" in text and f"limit {STRAYS}" in text for text in said] == [
        True
    ] * anew
    desk.arrive(0, 1)
    desk.take(0, 1)
    assert {plan.generation for plan in desk.plans.values()} == {2 if anew else 1}
    assert desk.summary["rounds_retried"] == 0
    desk.vote(0, 1)
    desk.take(0, 1)
    desk.arrive(0, 1)
    assert {plan.generation for plan in desk.plans.values()} == {2 if anew else 1}  # and not once more
