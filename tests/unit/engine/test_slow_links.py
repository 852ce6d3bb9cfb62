"""A member whose messages are slow to come: the others do not wait for it, and it comes back with its work."""

import pytest

from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.membership import MemberState, in_the_way

from .desk import H, only
from .test_silence import assert_counted, begun, committed, state

EVERYBODY = (0, 1, 2, 3)


def slow_fleet(replicas=4, **more):
    """One that has exchanged twice, in a second each, and exchanges again."""
    desk = begun(replicas, **more)
    everybody = tuple(desk.answers)
    for _ in range(2):
        desk.arrive(*everybody)
        desk.take(*everybody)
        desk.wait(1)
        desk.vote(*everybody, exchange_s=1.0)
        desk.take(*everybody)
    desk.arrive(*everybody)
    only(desk.take(*everybody), m.Plan)
    return desk


def wait(desk, seconds, waits_for):
    """Let time pass while members say whom they wait for; whether the exchange is still on."""
    on = True
    for _ in range(seconds):
        generation = next(iter(desk.plans.values())).generation
        said = [desk.coordinator.exchange_is_on(generation, pair) for pair in waits_for.items()]
        on = all(said)
        desk.wait(1)
    return on


def absent(desk):
    return [index for index in desk.answers if state(desk, index) is MemberState.ABSENT]


ALL_WAIT_FOR_3 = {0: 3, 1: 3, 2: 3, 3: 0}


@pytest.mark.parametrize(
    ("waits_for", "chosen"),
    [
        ({}, set()),
        ({0: None, 1: None}, set()),
        (ALL_WAIT_FOR_3, {3}),
        ({0: 1, 1: 0, 2: 1, 3: 1}, {1}),
        ({0: 1}, {1}),
        ({0: 1, 1: 0}, {1}),
        ({0: 1, 1: 2, 2: 3, 3: 0}, {1, 3}),
        ({0: 3, 1: 4, 2: 3, 3: 4, 4: 3}, {3, 4}),
        ({0: 0, 1: None}, {0}),
    ],
)
def test_who_is_in_the_way(waits_for, chosen):
    assert in_the_way(waits_for) == chosen


def test_the_others_go_on_without_a_slow_one_and_its_work_arrives():
    desk = slow_fleet()
    assert wait(desk, 5, ALL_WAIT_FOR_3)
    assert absent(desk) == []
    assert not wait(desk, 2, ALL_WAIT_FOR_3)
    assert absent(desk) == [3]
    assert "round 3: goes on without replica 3 (the exchange has waited for its messages for 6 s) until it is back" in (
        desk.notices
    )
    desk.vote(0, 1, 2, 3, ok=False)
    assert [plan.members for plan in only(desk.take(0, 1, 2), m.Plan)] == [(0, 1, 2)] * 3
    desk.vote(0, 1, 2)
    assert [commit.keep for commit in only(desk.take(0, 1, 2), m.Commit)] == [True] * 3
    desk.keep(0, 1, 2)
    desk.take(0, 1, 2)
    (answer,) = only(desk.take(3), m.Return)  # a round takes less than it has waited: nobody waits for its fetching
    assert ([missed.round for missed in answer.missed], answer.again) == ([3], True)
    desk.wait(2)
    committed(desk, 0, 1, 2)
    assert absent(desk) == [3]
    desk.wait(20)
    desk.send(m.Back(3, 1, 3, {}))
    (answer,) = only(desk.take(3), m.Return)
    assert ([missed.round for missed in answer.missed], answer.again) == ([4], True)  # 22 s for one
    desk.send(m.Back(3, 1, 4, {}))
    (answer,) = only(desk.take(3), m.Return)
    assert (answer.missed, answer.again, answer.round) == ((), False, 4)
    assert_counted(desk, 2 * 4 * H + 2 * 3 * H)
    desk.arrive(0, 1, 2)
    desk.arrive(3, steps=2 * H)
    desk.drop_answers()
    desk.vote(*EVERYBODY)
    assert_counted(desk, 2 * 4 * H + 2 * 3 * H + 5 * H)
    assert desk.coordinator.members[3].pull_s is None


def test_one_that_is_not_much_slower_takes_part_and_is_waited_for():
    desk = slow_fleet(grace_s=0.5)
    assert not wait(desk, 4, ALL_WAIT_FOR_3)
    assert absent(desk) == [3]
    desk.vote(*EVERYBODY, ok=False)
    desk.take(0, 1, 2)
    desk.vote(0, 1, 2, exchange_s=0.75)  # of three messages
    desk.take(0, 1, 2)
    desk.keep(0, 1, 2)
    desk.take(0, 1, 2)
    assert only(desk.take(3), m.Return)[0].again
    desk.wait(2)
    desk.send(m.Back(3, 1, 3, {}))
    (answer,) = only(desk.take(3), m.Return)
    assert (answer.missed, answer.again) == ((), False)
    desk.arrive(0, 1, 2)
    desk.arrive(3, steps=2 * H)
    assert {plan.members for plan in only(desk.take(*EVERYBODY), m.Plan)} == {EVERYBODY}
    assert wait(desk, 4, ALL_WAIT_FOR_3)  # twice as long as it fetches a round
    assert absent(desk) == []
    desk.vote(*EVERYBODY, exchange_s=4.0)
    only(desk.take(*EVERYBODY), m.Commit)
    assert desk.coordinator.members[3].pull_s == 2.0
    desk.arrive(*EVERYBODY)
    desk.take(*EVERYBODY)
    desk.vote(*EVERYBODY, exchange_s=1.0)
    only(desk.take(*EVERYBODY), m.Commit)
    assert desk.coordinator.members[3].pull_s is None


def test_where_all_are_slow_nobody_is_left_out():
    desk = slow_fleet()
    assert wait(desk, 40, {0: 1, 1: 2, 2: 3, 3: 0})
    assert wait(desk, 10, {0: 1, 1: None, 2: None, 3: None})
    assert absent(desk) == []


def test_an_exchange_of_many_bytes_may_take_long():
    desk = begun(4)
    desk.arrive(*EVERYBODY)
    desk.take(*EVERYBODY)
    desk.vote(*EVERYBODY, exchange_s=1.0)
    desk.take(*EVERYBODY)
    desk.arrive(*EVERYBODY, sizes=(m.PayloadSize("params@8", "mean", 40 * 10),))
    desk.take(*EVERYBODY)
    assert wait(desk, 20, ALL_WAIT_FOR_3)
    assert not wait(desk, 2, ALL_WAIT_FOR_3)


@pytest.mark.parametrize("replicas", [2, 4])
def test_at_the_deadline_fewer_words_will_do(replicas):
    desk = slow_fleet(replicas, deadline_s=20.0)
    waits_for = {0: replicas - 1, replicas - 1: 0}
    assert wait(desk, 20, waits_for)
    assert absent(desk) == []
    assert not wait(desk, 2, waits_for)
    assert absent(desk) == [replicas - 1]


@pytest.mark.parametrize("replicas", [2, 4])
def test_who_fails_at_the_deadline_tries_again_without_who_was_waited_for(replicas):
    desk = slow_fleet(replicas, deadline_s=20.0)
    rest = tuple(range(replicas - 1))
    wait(desk, 20, {0: replicas - 1, replicas - 1: 0})
    desk.now += 0.5
    desk.vote(*desk.answers, ok=False)
    assert [plan.members for plan in only(desk.take(*rest), m.Plan)] == [rest] * len(rest)
    assert state(desk, replicas - 1) is MemberState.RETURNING


def test_an_exchange_that_fails_before_is_tried_again_by_all():
    desk = slow_fleet()
    wait(desk, 3, ALL_WAIT_FOR_3)
    desk.vote(*EVERYBODY, ok=False)
    assert [plan.members for plan in only(desk.take(*EVERYBODY), m.Plan)] == [EVERYBODY] * 4


@pytest.mark.parametrize("says", [{3: 0}, {}])
def test_a_round_of_which_only_one_has_not_all_is_committed(says):
    desk = slow_fleet()
    desk.vote(0, 1, 2)
    assert wait(desk, 5, says)
    assert desk.silent(0, 1, 2)
    wait(desk, 2, says)
    only(desk.take(0, 1, 2), m.Commit)
    assert_counted(desk, 12 * H)  # the others have its message


def test_a_fleet_that_waits_for_stragglers_waits_for_slow_links_too():
    desk = slow_fleet(straggler="wait")
    assert wait(desk, 60, ALL_WAIT_FOR_3)
    assert absent(desk) == []


def test_who_comes_back_in_the_middle_of_a_round_takes_the_steps_that_are_left():
    desk = begun(total=20 * H)
    for _ in range(2):  # so that it is known how long a round's steps take
        desk.wait(8)
        desk.run_round()
    desk.wait(8)
    desk.hush(1)
    committed(desk, 0, 2)
    desk.wait(4)
    desk.arrive(1)
    (answer,) = only(desk.take(1), m.Return)
    assert (answer.round, answer.inner_steps, answer.launch) == (3, H // 2, 4 * H)
    desk.wait(30)
    desk.hush(1)
    committed(desk, 0, 2)
    desk.wait(60)
    desk.arrive(1)
    assert only(desk.take(1), m.Return)[0].inner_steps == 1
