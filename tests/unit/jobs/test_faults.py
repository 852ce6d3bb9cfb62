"""The benchmark of random failures: what is drawn, how goodput is counted, what is judged. Nothing is measured."""

from argparse import Namespace
from dataclasses import replace

import pytest

from jobs.benchmarks import faults
from jobs.drills.cells import of_faults
from jobs.drills.goodput import down, goodput_of
from jobs.drills.loop import Process
from jobs.drills.scene import Seen
from ray_lowcomm.core.fault import Fault

OPTIONS = Namespace(
    replicas=4,
    rounds=200,
    inner_steps=24,
    step_s=0.25,
    rate=1 / 30,
    hang_s=20.0,
    driver_kills=3,
    seed=0,
    address="local",
)


def seen(*, schedule=(), at=(), out=(), stalls=()):
    """Two replicas, a step a second, ten rounds of four steps; `out`: rounds without replica 1;
    `stalls`: seconds that a round takes longer."""
    run, now, times = Seen(of_faults(schedule, 10)), 0.0, {0: [], 1: []}
    for number in range(1, 11):
        members = [0] if number in out else [0, 1]
        for member in members:
            times[member] += [now + step for step in range(4)]
        now += 4.0 + dict(stalls).get(number, 0.0)
        run.records.append({"round": number, "members": members, "steps": [4] * len(members)})
        run.rounds_at.append(now)
    run.processes = [Process(index, index, tuple(steps)) for index, steps in times.items()]
    run.faults_at = dict(enumerate(at))
    return run


def test_nothing_is_lost_where_nothing_happens():
    good = goodput_of(seen(), 2)
    assert (good.wall_s, good.step_s, good.all, good.survivors, good.down_s) == (40.0, 1.0, 1.0, 1.0, ())


def test_who_has_failed_is_left_out_of_the_survivors_goodput():
    killed = seen(schedule=[Fault("kill", 1, 3)], at=[8.0], out=(3, 4))
    good = goodput_of(killed, 2)
    assert down(killed) == {1: [(8.0, 20.0)]}  # back in round 5, which is committed at 20 s
    assert good.all == pytest.approx(72 / 80)
    assert good.survivors == pytest.approx((72 - 4) / (80 - 12))  # its own steps of round 5 are left out, too
    assert good.down_s == (12.0,)


def test_a_wait_of_the_others_lowers_both():
    good = goodput_of(seen(schedule=[Fault("kill", 1, 3)], at=[8.0], out=(3, 4), stalls={3: 10.0}), 2)
    assert good.all == pytest.approx(72 / 100)
    assert good.survivors == pytest.approx((72 - 4) / (100 - 22))


def test_who_hangs_is_out_until_it_takes_part_after_that():
    hangs = Fault("hang", 1, 3, seconds=9.0)
    assert down(seen(schedule=[hangs], at=[8.0], out=(3, 4)))[1] == [(8.0, 20.0)]
    twice = seen(schedule=[hangs, Fault("kill", 1, 4)], at=[8.0, 13.0], out=(3, 4))
    assert down(twice)[1] == [(8.0, 20.0)]
    driver = seen(schedule=[Fault("kill", 1, 3, whom="driver")], at=[8.0])
    assert goodput_of(driver, 2).down_s == ()


def test_faults_are_drawn_and_spread():
    drawn = faults._faults(OPTIONS)
    assert drawn == faults._faults(OPTIONS)
    assert 10 < len(drawn) < 50  # 26.7 are expected
    assert {fault.do for fault in drawn} == {"kill", "hang"}
    assert {fault.replica for fault in drawn} == {0, 1, 2, 3}
    assert all(1 < fault.round < 200 for fault in drawn)
    assert {fault.seconds for fault in drawn if fault.do == "hang"} == {20.0}
    kills = faults._driver_kills(OPTIONS, ())
    assert [(kill.round, kill.whom) for kill in kills] == [(50, "driver"), (100, "driver"), (150, "driver")]


def test_a_driver_is_not_killed_at_the_moment_of_a_replica_that_is_away():
    hits = [Fault("kill", 0, 45), Fault("hang", 1, 50), Fault("kill", 2, 95)]
    kills = faults._driver_kills(OPTIONS, hits)
    assert [kill.round for kill in kills] == [50, 100, 150]
    assert kills[0].replica in (2, 3)
    assert kills[1].replica != 2


GOOD = {
    "run": "faults",
    "problems": [],
    "goodput": {"all": 0.92, "survivors": 0.99},
    "val_loss": 1.001,
    "fired": 3,
    "driver_restarts": 0,
    "driver_kills": 0,
}
WRONG = {
    "goodput of all 89.0%, not at least 90%": {"goodput": {"all": 0.89, "survivors": 0.99}},
    "goodput of survivors 97.0%, not at least 98%": {"goodput": {"all": 0.92, "survivors": 0.97}},
    "loss 1.0040, undisturbed 1.0000: more than 0.3% above": {"val_loss": 1.004},
    "no fault has happened": {"fired": 0},
    "the driver was started again 2 times, killed 3": {"driver_restarts": 2, "driver_kills": 3},
    "final states differ": {"problems": ["final states differ"]},
}


@pytest.mark.parametrize("said", WRONG)
def test_what_does_not_hold_is_said(said):
    undisturbed = {"run": "undisturbed", "problems": [], "val_loss": 1.0}
    assert faults.problems(undisturbed, undisturbed) == []
    assert faults.problems(GOOD, undisturbed) == []
    assert faults.problems(GOOD | WRONG[said], undisturbed) == [f"faults: {said}"]


def test_it_is_compared_with_a_run_of_as_many_steps():
    assert faults._steps_of_each({"reached": 4 * 24 * 181 + 40}, OPTIONS) == 181 * 24
    assert faults._steps_of_each({"reached": 3}, OPTIONS) == 24
    fewer = {"run": faults.AS_MANY, "problems": [], "val_loss": 9.0}
    assert faults.problems(fewer, {"run": "undisturbed", "problems": [], "val_loss": 1.0}) == []


def test_the_settings_are_those_of_a_run():
    config = faults._config(OPTIONS, "out").resolved()
    assert (config.inner.steps, config.strategy.inner_steps, config.strategy.overlap_steps) == (4800, 24, 6)
    assert faults._config(Namespace(**vars(OPTIONS) | {"replicas": 2}), "out").fleet.quorum == 1
    assert replace(config.fleet, quorum=None).max_replicas == 4
