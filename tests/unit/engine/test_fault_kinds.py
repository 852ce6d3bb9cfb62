"""Each kind of a fault schedule over the local transport, in virtual time, with what it costs counted exactly."""

import pytest

from ray_lowcomm.core.fault import BY_CHANCE, IN_A_ROUND, Draw, Fault, RandomFaults, expanded

from .local_run import Setup

H, STEPS, STEP_S = 4, 40, 2.0
BLOCKING = {"name": "topk_diloco", "inner_steps": H, "chunk_size": 4, "topk": 3}
FLEETS = {
    "blocking": BLOCKING,
    "overlapped": BLOCKING | {"overlap_steps": 2},
    "dense": {"name": "diloco", "inner_steps": H},
    "sharded": BLOCKING | {"name": "dct_momentum", "combine": "sharded"},
}
every_fleet = pytest.mark.parametrize("strategy", FLEETS.values(), ids=FLEETS)
every_phase = pytest.mark.parametrize("phase", [*IN_A_ROUND, "checkpoint"])


def run(directory, strategy, *faults, **more):
    fleet = {"deadline_s": 15.0} | more.pop("fleet", {})
    return Setup(str(directory), strategy, steps=STEPS, fleet=fleet, step_s=STEP_S, faults=faults, **more).go()


def assert_whole(outcome, lost=0):
    """It ended alike on all that are there, and each step that was taken was shared once, or is counted as lost."""
    summary = outcome.summary
    assert outcome.failure is None
    assert len(set(summary["state_digests"].values())) == 1
    taken = sum(map(len, outcome.trace.values()))
    assert (summary["inner_steps"] + summary["lost_inner_steps"], summary["lost_inner_steps"]) == (taken, lost)


def fired(outcome):
    return [number for event in outcome.events if event.kind == "fired" for number in [event.data]]


@every_fleet
@every_phase
def test_what_is_damaged_on_the_way_is_sent_again(tmp_path, strategy, phase):
    outcome = run(tmp_path, strategy, Fault("corrupt", 1, 3, phase, bits=2))
    assert_whole(outcome)
    assert fired(outcome) == [0]
    assert (outcome.summary["members_lost"], outcome.summary["rounds_retried"]) == (0, 1)
    retried = [record["round"] for record in outcome.records if record["retries"]]
    # who damages a message after that of the round is out damages the next
    assert retried == [4 if phase in ("voted", "ready", "checkpoint") else 3]
    assert all(record["members"] == [0, 1, 2] for record in outcome.records)
    untouched = run(tmp_path / "untouched", strategy)
    assert outcome.summary["state_digests"] == untouched.summary["state_digests"]


def test_one_alone_sends_nothing_that_could_be_damaged(tmp_path):
    outcome = run(tmp_path, BLOCKING, Fault("corrupt", 0, 2), replicas=1)
    assert_whole(outcome)
    assert outcome.summary["rounds_retried"] == 0


@pytest.mark.parametrize("phase", [*IN_A_ROUND, "checkpoint"])
def test_who_is_slow_takes_so_many_times_as_long_for_so_many_rounds(tmp_path, phase):
    usual = run(tmp_path / "usual", BLOCKING)
    outcome = run(tmp_path / "slow", BLOCKING, Fault("slow", 1, 3, phase, factor=4.0, rounds=2))
    assert_whole(outcome)
    assert outcome.summary["state_digests"] == usual.summary["state_digests"]
    # two rounds of H steps, each of which takes 3 more times its 2 s; the clock ticks in seconds
    assert outcome.fleet.clock - usual.fleet.clock == 2 * H * 3 * STEP_S


@every_fleet
def test_who_leaves_has_lost_nothing_and_the_others_go_on(tmp_path, strategy):
    outcome = run(tmp_path, strategy, Fault("leave", 1, 3))
    assert_whole(outcome)
    summary = outcome.summary
    assert (summary["members_lost"], summary["replicas_left"], summary["rounds"]) == (0, 1, STEPS // H)
    there = [record["round"] for record in outcome.records if 1 in record["members"]]
    late = 1 if strategy.get("overlap_steps") else 0
    assert there == list(range(1, 4 + late))
    assert all({0, 2} <= set(record["members"]) for record in outcome.records)


@pytest.mark.parametrize("phase", [*IN_A_ROUND, "checkpoint"])
def test_who_is_cut_off_comes_back_with_all_its_work(tmp_path, phase):
    outcome = run(tmp_path, BLOCKING, Fault("cut", 1, 3, phase, seconds=26.0))
    assert_whole(outcome)
    assert outcome.summary["members_lost"] == 0
    assert outcome.summary["caught_up_rounds"] > 0
    assert outcome.records[-1]["members"] == [0, 1, 2]


@pytest.mark.parametrize("who", [0, 1], ids=["writes what is shared", "writes its own"])
def test_a_disk_that_is_full_costs_the_checkpoint_of_that_round(tmp_path, who):
    outcome = run(tmp_path, BLOCKING, Fault("full_disk", who, 3))
    assert_whole(outcome)
    saved = [event.data[1]["round"] for event in outcome.events if event.kind == "manifest"]
    assert saved == [n for n in range(1, STEPS // H + 1) if n != 3]
    (said,) = [text for text in outcome.said("notice") if "is given up" in text]
    assert (
        f"checkpoint of round 3 is given up: replica {who}: replica_000{who}.safetensors: OSError: [Errno 28]" in said
    )


def test_the_last_checkpoint_waits_for_room(tmp_path):
    last = STEPS // H
    outcome = run(tmp_path, BLOCKING, Fault("full_disk", 0, last))
    assert_whole(outcome)
    assert [event.data[1]["round"] for event in outcome.events if event.kind == "manifest"][-1] == last


@every_fleet
@pytest.mark.parametrize("kind", ["kill", "nan"])
@pytest.mark.parametrize("who", [0, 1])
def test_it_may_strike_while_a_checkpoint_is_written(tmp_path, strategy, kind, who):
    outcome = run(tmp_path, strategy, Fault(kind, who, 3, "checkpoint"))
    assert outcome.failure is None
    assert fired(outcome) == [0]
    assert len(set(outcome.summary["state_digests"].values())) == 1
    assert outcome.records[-1]["members"] == [0, 1, 2]
    saved = [event.data[1]["round"] for event in outcome.events if event.kind == "manifest"]
    assert saved[-1] == STEPS // H
    assert (3 in saved) == (kind == "nan")  # what is written is a copy of what was


@every_fleet
@pytest.mark.parametrize("donor", [0, 2])
def test_it_may_strike_while_a_state_is_offered(tmp_path, strategy, donor):
    """Replica 1 dies and joins again; whoever offers it a state dies, too: it takes the state from the others."""
    outcome = run(tmp_path, strategy, Fault("kill", 1, 3), Fault("kill", donor, 1, "serving"))
    assert outcome.failure is None
    assert sorted(fired(outcome)) == [0, 1]
    assert outcome.summary["members_lost"] == 2
    assert len(set(outcome.summary["state_digests"].values())) == 1
    assert outcome.records[-1]["members"] == [0, 1, 2]


def test_the_same_schedule_gives_the_same_rounds_and_members(tmp_path):
    faults = expanded([RandomFaults(Draw(0.2, 5, ("kill", "hang", "nan", "corrupt", "leave", "cut")))], 3, STEPS // H)
    first, again = (run(tmp_path / name, BLOCKING, *faults) for name in "ab")
    assert len({fault.do for fault in faults}) > 2
    assert first.records == again.records
    assert fired(first) == fired(again) != []
    assert first.summary["state_digests"] == again.summary["state_digests"]


def test_draws_depend_on_seed_round_and_replica_alone():
    def drawn(rate, seed, replicas, rounds, kinds=BY_CHANCE):
        return set(expanded([RandomFaults(Draw(rate, seed, kinds))], replicas, rounds))

    many = drawn(0.1, 7, 4, 500)
    assert drawn(0.1, 7, 4, 250) == {fault for fault in many if fault.round <= 250}
    assert drawn(0.1, 7, 2, 500) == {fault for fault in many if fault.replica < 2}
    assert drawn(0.1, 8, 4, 500) != many
    assert drawn(0.0, 7, 4, 500) == set()
    assert 0.08 < len(many) / 2000 < 0.12
    assert {fault.do for fault in many} == set(BY_CHANCE)
    assert {fault.phase for fault in many} == {*IN_A_ROUND, "checkpoint"}
    assert {fault.phase for fault in many if fault.do == "full_disk"} == {"checkpoint"}
    named = Fault("kill", 0, 2)
    assert expanded([named, RandomFaults(Draw(0.1, 7, ("nan",)))], 1, 3)[0] is named
