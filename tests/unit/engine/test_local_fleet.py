"""Whole runs over the local transport: faults in every phase, bit for bit reproducible, and never for ever."""

import random

import pytest
import torch
from torch import nn

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import Fault
from ray_lowcomm.transport.local import LocalFleet

from .local_run import Setup, mlp
from .test_resume import VARIANTS

DCT = VARIANTS["dct"]


def run(tmp_path, strategy=DCT, **setup):
    return Setup(str(tmp_path), strategy, every=0, **setup).go()


def assert_whole(outcome, replicas=3, rounds=4):
    """The run has ended in order, with the same shared state everywhere."""
    assert not outcome.failure
    assert outcome.said("ended") == [True]
    summary = outcome.summary
    assert summary["rounds"] == rounds
    assert [record["round"] for record in outcome.records] == list(range(1, rounds + 1))
    assert len(summary["state_digests"]) == replicas
    assert len(set(summary["state_digests"].values())) == 1


# ---- without faults ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_step_and_token_is_counted_once(tmp_path, variant):
    outcome = run(tmp_path, VARIANTS[variant], replicas=2)
    summary = outcome.summary
    assert (summary["inner_steps"], summary["tokens"]) == (2 * 16, 2 * 16 * 8)
    for index in (0, 1):
        assert [line[0] for line in outcome.trace[index]] == list(range(16))


def test_the_loss_of_a_record_is_the_mean_over_steps_and_replicas(tmp_path):
    outcome = run(tmp_path, VARIANTS["diloco"], replicas=2)
    for number, record in enumerate(outcome.records):
        losses = [line[2] for trace in outcome.trace.values() for line in trace[4 * number : 4 * number + 4]]
        assert record["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_a_run_is_reproducible_to_the_bit_and_depends_on_the_seed(tmp_path):
    faults = (Fault("kill", 1, 2), Fault("kill", 2, 3, "exchange"))
    setups = [{"seed": 0}, {"seed": 0}, {"seed": 1}]
    first, again, other = (
        run(tmp_path / str(n), model=mlp(dropout=0.2), faults=faults, **setup) for n, setup in enumerate(setups)
    )
    assert first.records == again.records
    assert first.trace == again.trace
    assert [first.state(i) for i in range(3)] == [again.state(i) for i in range(3)]
    assert other.trace != first.trace


def test_replicas_have_random_state_of_their_own(tmp_path):
    """What a replica draws depends neither on the others nor on how many they are."""

    def draws(replicas):
        drawn = {}

        def train(context):
            model = nn.Linear(2, 1)
            replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
            mine = drawn[context.index] = []
            while not replica.finished:
                mine.append((torch.randn(1).item(), random.random()))
                for _ in range(context.index):
                    torch.randn(5)
                loss = model(torch.ones(2)).sum()
                loss.backward()
                replica.step(loss)

        setup = Setup(str(tmp_path), {"name": "ddp"}, replicas=replicas, steps=5, every=0)
        LocalFleet(*setup.plans(False), lambda event: None).run(train)
        return drawn

    three, two = draws(3), draws(2)
    assert {i: three[i] for i in two} == two
    assert len({value for mine in three.values() for pair in mine for value in pair}) == 3 * 5 * 2


def test_the_callers_random_state_and_threads_are_left_alone(tmp_path):
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    run(tmp_path, replicas=2, steps=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_two_fleets_one_inside_the_other_do_not_meet(tmp_path):
    alone = run(tmp_path / "alone", replicas=2)
    inner = {}

    def look(coordinator, record):
        if record["round"] == 2:
            inner["outcome"] = run(tmp_path / "inner", VARIANTS["diloco"], replicas=2)

    outer = Setup(str(tmp_path / "outer"), DCT, replicas=2, every=0).go(on_record=look)
    assert outer.records == alone.records
    assert_whole(inner["outcome"], replicas=2)


# ---- the fault schedule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("phase", ["inner", "exchange", "voted"])
@pytest.mark.parametrize("variant", ["dct", "ddp"])
def test_a_kill_in_any_phase(tmp_path, variant, phase, victim):
    faults = (Fault("kill", victim, 2, phase),)
    steps, rounds = (16, 4) if variant == "dct" else (6, 6)
    outcome = run(tmp_path, VARIANTS[variant], faults=faults, steps=steps, model=mlp(norm=True))
    assert_whole(outcome, rounds=rounds)
    summary, second = outcome.summary, outcome.records[1]
    assert summary["members_lost"] == 1
    assert summary["rounds_retried"] == (1 if phase == "exchange" else 0)
    assert (victim in second["members"]) == (phase == "voted")
    # the last to vote dies after the commit, and counts as one that had begun the next round
    begun = phase != "voted" or victim == 2
    assert summary["lost_inner_steps"] == (steps // rounds if begun else 0)
    assert summary["state_transfer_bytes"] > 0
    # it takes up the learning rate of the others
    rates = {}
    for trace in outcome.trace.values():
        for step, rate, _ in trace:
            assert rates.setdefault(step, rate) == rate
    states = [outcome.state(i) for i in range(3)]
    assert all(s["1.running_mean"] == states[0]["1.running_mean"] for s in states)


def test_the_same_replica_dies_in_three_rounds_in_a_row(tmp_path):
    faults = tuple(Fault("kill", 1, number) for number in (1, 2, 3))
    outcome = run(tmp_path, faults=faults)
    assert_whole(outcome)
    assert outcome.records[-1]["members"] == [0, 1, 2]


def test_three_kills_in_one_round(tmp_path):
    faults = (Fault("kill", 0, 2, "exchange"), Fault("kill", 2, 2, "exchange"), Fault("kill", 1, 2, "voted"))
    assert_whole(run(tmp_path, faults=faults, replicas=4), replicas=4)


@pytest.mark.parametrize("phase", ["inner", "exchange"])
def test_all_die_and_go_on_from_the_last_checkpoint(tmp_path, phase):
    whole = Setup(f"{tmp_path}/whole", DCT).go()
    setup = Setup(str(tmp_path), DCT, faults=tuple(Fault("kill", i, 3, phase) for i in range(3)))
    outcome = setup.go()
    assert not outcome.failure
    assert [record["round"] for record in outcome.records] == [1, 2, 3, 4]
    assert outcome.records[2:] == whole.records[2:]
    assert outcome.summary["members_lost"] == 3
    assert [outcome.state(i) for i in range(3)] == [whole.state(i) for i in range(3)]


def test_all_die_before_the_first_checkpoint(tmp_path):
    outcome = run(tmp_path, faults=tuple(Fault("kill", i, 2) for i in range(3)))
    assert not outcome.failure
    assert [record["round"] for record in outcome.records] == [1, 1, 2, 3, 4]
    assert len(set(outcome.summary["state_digests"].values())) == 1


def test_a_crash_loop_ends_the_run(tmp_path):
    def loop(context):
        model, replica = wrapped(context)
        while not replica.finished:
            if context.index == 1:
                context.host.die()
            loss = model(torch.ones(2)).sum()
            loss.backward()
            replica.step(loss)

    failure = failure_of(tmp_path, loop, fleet={"max_failures": 2})
    assert failure == "replica 1 died 3 times without a round in between: killed"


def test_a_crash_loop_before_joining_ends_the_run(tmp_path):
    with pytest.raises(FleetError, match="replica 0 died 3 times before it joined"):
        failure_of(tmp_path, lambda context: context.host.die(), fleet={"max_failures": 2})


def test_a_short_hang_is_waited_for(tmp_path):
    outcome = run(tmp_path, faults=(Fault("hang", 1, 2, seconds=100),), fleet={"straggler": "wait"})
    assert_whole(outcome)
    assert outcome.summary["members_lost"] == 0
    assert 100 <= outcome.fleet.clock < 120
    assert any("waiting for replica 1" in text for text in outcome.said("notice"))


def test_a_hang_beyond_the_deadline_is_a_death_from_which_one_can_come_back(tmp_path):
    fleet = {"hang_s": 20, "straggler": "wait"}
    outcome = run(tmp_path, faults=(Fault("hang", 1, 2, seconds=50),), fleet=fleet)
    assert not outcome.failure
    assert outcome.records[1]["members"] == [0, 2]
    summary = outcome.summary
    assert (summary["members_lost"], summary["rounds"]) == (1, 4)


def test_a_hang_in_the_exchange_ends_at_the_deadline(tmp_path):
    fleet = {"deadline_s": 15, "straggler": "wait"}
    outcome = run(tmp_path, faults=(Fault("hang", 2, 2, "exchange", seconds=50),), fleet=fleet)
    assert not outcome.failure
    assert outcome.records[1]["members"] == [0, 1]
    assert outcome.summary["rounds_retried"] == 1


def test_stragglers_are_dropped_and_join_again(tmp_path):
    fleet = {"quorum": 2, "straggler": "drop", "grace_s": 3}
    outcome = run(tmp_path, faults=(Fault("hang", 0, 2, seconds=4),), fleet=fleet)
    assert not outcome.failure
    assert outcome.records[1]["members"] == [1, 2]
    assert outcome.summary["members_lost"] == 0
    assert outcome.summary["rounds"] == 4


@pytest.mark.parametrize("variant", ["dct", "diloco", "ddp", "desloc", "dct_paper"])
def test_nan_on_one_replica_reaches_no_other(tmp_path, variant):
    outcome = run(tmp_path, VARIANTS[variant], faults=(Fault("nan", 1, 2),), replicas=2)
    assert not outcome.failure
    assert outcome.summary["nonfinite_rejected"] == 1
    members = [record["members"] for record in outcome.records]
    assert members.count([0]) == 1  # in the round of the fault, or in the next if it fell after the last loss
    assert members.index([0]) in (1, 2)
    for index in (0, 1):
        assert torch.isfinite(outcome.parameters(index)).all()


def test_nan_everywhere_costs_one_round_of_work(tmp_path):
    outcome = run(tmp_path, faults=tuple(Fault("nan", i, 2) for i in range(3)))
    assert outcome.failure is None
    assert "round 2 is begun again, with other data" in outcome.said("notice")
    assert (outcome.summary["nonfinite_rejected"], outcome.summary["rounds"]) == (3, 4)
    assert all(outcome.parameters(index).isfinite().all() for index in range(3))


# ---- what goes wrong in a train function ------------------------------------------------------------------------


def failure_of(tmp_path, loop, **setup):
    fleet = LocalFleet(*Setup(str(tmp_path), DCT, replicas=2, **setup).plans(False), lambda event: None)
    fleet.run(loop)
    return fleet.coordinator.failure


def wrapped(context):
    model = nn.Linear(2, 1)
    return model, context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_exception_names_the_replica_and_the_line(tmp_path):
    def loop(context):
        wrapped(context)
        if context.index == 1:
            raise ValueError("no such\nfile")

    failure = failure_of(tmp_path, loop)
    assert failure.startswith("replica 1: ValueError: no such file (test_local_fleet.py:")


def test_a_loop_that_never_wraps(tmp_path):
    assert "without calling context.wrap(model, optimizer)" in failure_of(tmp_path, lambda context: None)


def test_wrapping_twice(tmp_path):
    def loop(context):
        wrapped(context)
        wrapped(context)

    assert "context.wrap was called twice" in failure_of(tmp_path, loop)


def test_an_unknown_option(tmp_path):
    def loop(context):
        model = nn.Linear(2, 1)
        context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), clip=1.0)

    assert "context.wrap does not take 'clip': it takes" in failure_of(tmp_path, loop)


def test_a_loss_that_is_no_scalar(tmp_path):
    def loop(context):
        model, replica = wrapped(context)
        loss = model(torch.ones(3, 2))
        loss.sum().backward()
        replica.step(loss)

    assert "must be a 0-d tensor (the mean over the batch), got a tensor of shape [3, 1]" in failure_of(tmp_path, loop)


def test_a_loop_that_goes_on_after_the_end(tmp_path):
    def loop(context):
        model, replica = wrapped(context)
        while True:
            loss = model(torch.ones(2)).sum()
            loss.backward()
            replica.step(loss)

    assert "loop with `while not replica.finished`" in failure_of(tmp_path, loop, steps=4)


def test_different_models_are_refused_with_the_difference(tmp_path):
    def loop(context):
        model = nn.Linear(2 + context.index, 1)
        context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))

    failure = failure_of(tmp_path, loop)
    assert "replica 1 was started with other settings than the rest: its trainable parameters have other" in failure


def test_different_initial_weights_are_made_equal(tmp_path):
    begun = {}

    def loop(context):
        torch.manual_seed(context.index)
        model, replica = wrapped(context)
        begun[context.index] = model.weight.tolist()
        while not replica.finished:
            loss = model(torch.ones(2)).sum()
            loss.backward()
            replica.step(loss)

    assert failure_of(tmp_path, loop, steps=4) is None
    assert begun[0] == begun[1]


def test_replicas_that_wait_for_ever_are_an_error_not_a_hang(tmp_path):
    def loop(context):
        wrapped(context)
        context.host.sleep(float("inf"))

    with pytest.raises(FleetError, match=r"replicas \[0, 1\] wait for each other for ever"):
        failure_of(tmp_path, loop)


def test_a_stop_in_the_middle_is_orderly(tmp_path):
    def look(coordinator, record):
        if record["round"] == 2:
            coordinator.stop("enough")

    outcome = Setup(str(tmp_path), DCT).go(on_record=look)
    assert not outcome.failure
    assert outcome.summary["rounds"] == 2
    assert all(replica.stopped for replica in outcome.replicas.values())
    # noticed at the next step
    assert {index: len(trace) for index, trace in outcome.trace.items()} == {0: 8, 1: 8, 2: 8}
