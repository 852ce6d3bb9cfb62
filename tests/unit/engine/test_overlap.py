"""Rounds that are applied later than they are launched, as the driver sees them."""

import pytest

from ray_lowcomm.core.settings import CheckpointSettings, RunSettings
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.overlap import Measured, measured, next_overlap

from .desk import ROUNDS, Desk, H, only
from .local_run import Setup, mlp


def late(replicas=2, overlap=3, **more):
    """A fleet whose rounds are applied so many steps after their launch; `H` = 4."""
    return Desk(replicas, strategy={"overlap_steps": overlap}, **more)


def given(messages):
    """What each of these says of the next round."""
    return [(one.inner_steps, one.overlap) for one in messages]


# ---- how much ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "steps"),
    [
        ([(2.0, 0.5)], 6),  # 1.1 * 4 steps, rounded up, and one
        ([(0.0, 0.5)], 1),
        ([(0.001, 0.5)], 2),
        ([(2.0, 0.5), (1.0, 0.25), (0.5, 1.0)], 10),  # the longest exchange and the shortest step of all
        ([(99.0, 0.5)], 16),  # no more than there are
        ([], 7),  # as before
    ],
)
def test_auto_takes_as_few_steps_as_hide_the_exchange(rounds, steps):
    assert next_overlap("auto", [Measured(*one) for one in rounds], before=7, most=16) == steps


@pytest.mark.parametrize(("setting", "steps"), [(None, 0), (0, 0), (5, 5), (99, 16)])
def test_a_number_is_taken_as_it_is_up_to_the_next_launch(setting, steps):
    assert next_overlap(setting, [Measured(1.0, 1.0)], before=7, most=16) == steps


def arrived(member, steps=4, compute_s=2.0, skipped=0):
    return m.Arrival(member, 1, 0, True, steps, 0, 1.0, compute_s, (), None, {}, skipped=skipped)


def voted(member, exchange_s, wait_s=0.0, beside_s=0.0):
    return m.Vote(member, 1, 1, True, exchange_s=exchange_s, wait_s=wait_s, beside_s=beside_s)


def test_measured_are_the_longest_exchange_and_the_fastest_member():
    arrivals = [arrived(0), arrived(1, steps=3, skipped=5), arrived(2, steps=0)]
    assert measured(arrivals, [voted(0, 1.0), voted(1, 3.0), voted(2, 2.0)]) == Measured(3.0, 0.25)


def test_an_exchange_has_what_is_computed_beside_it_and_what_the_last_to_arrive_waits():
    """Not what others wait for that one's inner steps."""
    votes = [voted(0, 1.0, wait_s=9.0, beside_s=0.5), voted(1, 1.25, wait_s=0.25, beside_s=0.125)]
    assert measured([arrived(0), arrived(1)], votes) == Measured(1.75, 0.5)


def test_one_that_is_alone_or_takes_no_step_says_nothing():
    assert measured([arrived(0)], [voted(0, 1.0)]) is None
    assert measured([arrived(0, steps=0), arrived(1, steps=0)], [voted(0, 1.0), voted(1, 1.0)]) is None


# ---- launch and apply -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [1, 3, H])
def test_steps_are_counted_from_launch_to_launch_and_the_last_round_waits_for_none(overlap):
    desk = late(overlap=overlap)
    welcomes = desk.begin()
    assert given(welcomes) == [(H, overlap)] * 2
    assert [(w.step, w.launch) for w in welcomes] == [(0, H)] * 2
    commits = [desk.run_round()[0] for _ in range(ROUNDS)]
    assert given(commits) == [(H, overlap), (H, 0), (0, 0)]  # the third is the last
    records = desk.said("record")
    assert [r["step"] for r in records] == [H, 2 * H, 3 * H]
    assert [r["overlap_steps"] for r in records] == [overlap, overlap, 0]
    assert [c.leave for c in commits] == [""] * ROUNDS


def test_a_slower_replica_takes_no_fewer_steps_than_its_round_is_late():
    desk = late(3, overlap=2, pace="by_speed")
    desk.begin()
    for index, seconds in enumerate((1.0, 1.5, 100.0)):
        desk.arrive(index, compute_s=seconds)
    desk.take(0, 1, 2)
    desk.vote(0, 1, 2)
    commits = desk.take(0, 1, 2)
    assert [c.inner_steps for c in commits] == [H, 2, 2]
    assert [c.beside for c in commits] == [2, 1, 1]  # from now on


def test_who_is_lost_loses_the_steps_since_its_launch():
    desk = late(3)
    desk.begin()
    desk.run_round()
    desk.lose(2)
    assert desk.summary["lost_inner_steps"] == H
    desk.arrive(0, 1)
    desk.take(0, 1)
    desk.lose(1)  # it was told to take as many beside the exchange as the round is late
    assert desk.summary["lost_inner_steps"] == 2 * H + desk.coordinator.fleet.where.overlap
    desk.vote(0, ok=False)
    (again,) = only(desk.take(0), m.Plan)
    assert again.members == (0,)


@pytest.mark.parametrize(("overlap", "left"), [(1, 3), (3, 1), (H, 0)])
def test_who_joins_begins_where_the_round_is_applied(overlap, left):
    desk = late(3, overlap=overlap)
    desk.begin()
    desk.lose(2)
    desk.join(2)
    first, second = desk.run_round(0, 1)
    assert (first.serve, second.serve) == ((2,), (2,))
    desk.offer(0, 1)
    welcome = desk.welcomes[2]
    assert (welcome.step, welcome.launch, welcome.overlap) == (H + overlap, 2 * H, overlap)
    desk.drop_answers()
    desk.back(2)
    (answer,) = only(desk.take(2), m.Return)
    assert (answer.step, answer.launch, answer.inner_steps, answer.overlap) == (H + overlap, 2 * H, left, overlap)
    desk.arrive(1)
    assert desk.silent(1, 2)  # the next round waits for it
    desk.arrive(0, 2)
    assert desk.take(0, 1, 2)[0].members == (0, 1, 2)


def test_a_finished_run_has_no_further_launch():
    desk = Desk(1)
    desk.begin()
    for _ in range(ROUNDS):
        desk.run_round()
    desk.save(0)
    manifest = desk.said("manifest")[-1][1]
    again = Desk(1, restored=manifest)
    assert [(w.step, w.launch, w.inner_steps) for w in again.begin()] == [(ROUNDS * H, None, 0)]


def test_a_resumed_run_goes_on_from_the_launch_and_with_the_overlap_of_its_checkpoint():
    desk = late(overlap="auto", checkpoint=CheckpointSettings(every=2), total=5 * H)
    desk.begin()
    measured_round(desk, 0.5)
    desk.run_round()
    desk.save(0, 1)
    manifest = desk.said("manifest")[-1][1]
    assert (manifest["launched"], manifest["step"], manifest["overlap"]) == (2 * H, 2 * H + 3, 3)
    again = late(overlap="auto", total=5 * H, restored=manifest)
    assert [(w.step, w.launch, w.inner_steps, w.overlap) for w in again.begin()] == [(2 * H + 3, 3 * H, 1, 3)] * 2
    other = late(overlap=2, total=5 * H, restored=manifest)
    assert [w.overlap for w in other.begin()] == [2, 2]


# ---- auto -------------------------------------------------------------------------------------------------------


def measured_round(desk, exchange_s):
    """A round of this exchange, and steps of half a second; returns the commits."""
    desk.arrive(0, 1, compute_s=H / 2)
    desk.take(0, 1)
    desk.vote(0)
    desk.vote(1, exchange_s=exchange_s)
    return desk.take(0, 1)


def test_auto_follows_the_last_three_rounds():
    desk = Desk(2, strategy={"overlap_steps": "auto", "inner_steps": 8}, total=80)
    assert [w.overlap for w in desk.begin()] == [0, 0]
    found = [measured_round(desk, exchange_s)[0].overlap for exchange_s in (1.0, 2.0, 0.1, 0.1, 0.1, 50.0)]
    assert found == [4, 6, 6, 6, 2, 8]  # ceil(1.1 * 2 * longest) + 1, and at most 8
    assert [r["overlap_steps"] for r in desk.said("record")] == [0, *found[:-1]]


# ---- a fleet that grows and shrinks -----------------------------------------------------------------------------


def begun(*indices, overlap=3, **more):
    """An elastic fleet that these have begun."""
    desk = late([1, 4], overlap, grace_s=5, total=8 * H, **more)
    desk.join(*indices)
    desk.wait(6)
    only(desk.take(*indices), m.Welcome)
    return desk


def test_the_data_are_dealt_anew_only_where_a_round_is_applied_at_its_launch():
    desk = begun(0, 1)
    desk.join(3)
    first = desk.run_round(0, 1)
    assert given(first) == [(H, 0)] * 2  # the next one is for the newcomer's sake
    assert [(c.serve, c.dealt) for c in first] == [((), ())] * 2
    assert desk.silent(3)
    second = desk.run_round(0, 1)
    assert [(c.serve, c.dealt, c.positions) for c in second] == [
        ((3,), (0, 1, 3), {0: 8, 1: 8}),
        ((3,), (0, 1, 3), {0: 8, 1: 8}),
    ]
    assert given(second) == [(H, 3)] * 2
    desk.offer(0, 1)
    assert (desk.welcomes[3].dealt, desk.welcomes[3].step) == ((0, 1, 3), 2 * H)


def test_who_leaves_waits_for_such_a_round_too():
    desk = begun(0, 1)
    desk.coordinator.leave(1, "its node is being drained", desk.now)
    first = desk.run_round(0, 1)
    assert [(c.leave, *g) for c, g in zip(first, given(first), strict=True)] == [("", H, 0)] * 2
    stays, leaves = desk.run_round(0, 1)
    assert (leaves.leave, leaves.inner_steps, leaves.dealt) == ("its node is being drained", 0, (0,))
    assert (stays.leave, stays.inner_steps, stays.overlap, stays.dealt) == ("", H, 3, (0,))
    assert desk.summary["replicas_left"] == 1


def test_where_all_leave_nothing_is_dealt_and_nobody_waits():
    desk = begun(0, 1)
    for index in (0, 1):
        desk.coordinator.leave(index, "its node is being drained", desk.now)
    commits = desk.run_round(0, 1)
    assert [(c.leave, c.inner_steps, c.dealt) for c in commits] == [("its node is being drained", 0, ())] * 2


def test_who_comes_back_to_its_share_does_not_wait():
    desk = begun(0, 1, 2)
    desk.lose(2)
    desk.join(2, 3)
    first, _ = desk.run_round(0, 1)
    assert (first.serve, first.overlap, first.dealt) == ((2,), 0, ())
    desk.offer(0, 1)
    desk.back(2)
    desk.drop_answers()
    assert desk.run_round(0, 1, 2)[0].serve == (3,)


def test_a_loss_is_dealt_with_in_the_same_way():
    desk = begun(0, 1, 2)
    desk.lose(1)
    assert [c.dealt for c in desk.run_round(0, 2)] == [(), ()]
    assert [c.dealt for c in desk.run_round(0, 2)] == [(0, 2)] * 2


# ---- a stop beside an exchange ----------------------------------------------------------------------------------

STOPPED = "checkpoints/round_000001_stop_01"


def pause(desk, *indices):
    for index in indices:
        desk.send(m.Paused(index, desk.welcomes[index].incarnation, desk.coordinator.round))


def stop(desk):
    desk.coordinator.stop("Ctrl-C", save=True)
    desk.collect()


def end(desk, *indices, folder, number):
    """These save, and end; the run has a checkpoint then, and has ended."""
    for index in indices:
        files = {"shared.safetensors": (1, "a")} if index == min(indices) else {}
        desk.send(m.Saved(index, number, files, "", {index: 11}, folder))
    for index in indices:
        desk.send(m.Finished(index, None))
    assert [name for name, _ in desk.said("manifest")] == [folder]
    assert desk.said("ended") == [False]
    assert desk.summary["lost_inner_steps"] == 0


def test_who_has_launched_a_round_that_is_not_closed_saves_as_those_do_that_have_not():
    desk = late(3)
    desk.begin()
    desk.run_round()
    desk.arrive(1)  # trains on, and will look for its answer
    stop(desk)
    assert desk.take(1) == [m.Stop("Ctrl-C", STOPPED, False)]
    pause(desk, 0)
    desk.arrive(2)  # launched before it has heard of the stop
    assert desk.take(0, 2) == [m.Stop("Ctrl-C", STOPPED, True), m.Stop("Ctrl-C", STOPPED, False)]
    end(desk, 0, 1, 2, folder=STOPPED, number=1)


def test_an_exchange_that_goes_on_is_committed_and_saved_where_it_is_applied():
    desk = late(2)
    desk.begin()
    desk.arrive(0, 1)
    desk.take(0, 1)
    stop(desk)
    desk.vote(0)
    assert desk.silent(0, 1)
    desk.vote(1)
    commits = only(desk.take(0, 1), m.Commit)
    assert [(c.leave, c.inner_steps, c.dealt) for c in commits] == [("Ctrl-C", 0, ())] * 2
    end(desk, 0, 1, folder=commits[0].checkpoint, number=1)
    assert desk.said("manifest")[0][1]["step"] == H + 3


def test_one_that_fails_then_is_saved_as_it_was_launched():
    desk = late(2)
    desk.begin()
    desk.run_round()
    desk.arrive(0, 1)
    desk.take(0, 1)
    stop(desk)
    desk.vote(0, 1, ok=False)
    assert [a.checkpoint for a in only(desk.take(0, 1), m.Stop)] == [STOPPED] * 2
    end(desk, 0, 1, folder=STOPPED, number=1)


def test_one_that_a_member_is_lost_of_then_does_not_keep_the_others_waiting():
    desk = late(3)
    desk.begin()
    desk.run_round()
    desk.arrive(0, 1, 2)
    desk.take(0, 1, 2)
    stop(desk)
    desk.vote(0)
    desk.lose(1)
    desk.vote(2, ok=False)
    assert [a.checkpoint for a in only(desk.take(0, 2), m.Stop)] == [STOPPED] * 2
    end(desk, 0, 2, folder=STOPPED, number=1)


def test_a_stop_between_commit_and_apply_is_answered_once_the_round_is_applied():
    desk = late(3, run=RunSettings(eval_every=0))
    desk.begin()
    desk.lose(2)
    desk.join(2)
    first, _ = desk.run_round(0, 1)
    assert first.serve == (2,)
    stop(desk)
    only(desk.take(2), m.Stop)  # it will not be needed
    desk.offer(0, 2)
    assert desk.take(0) == [m.Noted()]
    pause(desk, 1, 0)
    assert [a.checkpoint for a in only(desk.take(0, 1), m.Stop)] == [STOPPED] * 2


def test_the_data_are_not_dealt_anew_for_a_stop():
    desk = begun(0, 1)
    desk.arrive(0, 1)
    desk.take(0, 1)
    desk.join(2)
    stop(desk)
    only(desk.take(2), m.Stop)
    desk.vote(0, 1)
    assert [(c.leave, c.dealt) for c in only(desk.take(0, 1), m.Commit)] == [("Ctrl-C", ())] * 2


# ---- with replicas ----------------------------------------------------------------------------------------------

TOPK = {"name": "topk_diloco", "inner_steps": H, "chunk_size": 4, "topk": 3}


def test_auto_is_given_to_all_replicas_alike(tmp_path):
    outcome = Setup(str(tmp_path), TOPK | {"overlap_steps": "auto"}, steps=5 * H, model=mlp()).go()
    assert not outcome.failure
    late = [record["overlap_steps"] for record in outcome.records]
    assert (late[0], late[-1]) == (0, 0)  # nothing was measured yet; nothing is trained afterwards
    assert all(1 <= steps <= H for steps in late[1:-1])
    assert outcome.summary["inner_steps"] == 3 * 5 * H
    assert len(set(outcome.summary["state_digests"].values())) == 1


@pytest.mark.parametrize("overlap", [1, 3, H])
def test_who_takes_as_few_steps_as_its_round_is_late_launches_at_once(tmp_path, monkeypatch, overlap):
    """A pace that leaves replica 1 no step more than it must take."""

    def slow(fleet, indices):
        return {index: 0.001 if index == 1 else 1.0 for index in indices}

    monkeypatch.setattr("ray_lowcomm.engine.pacing.shares_of", slow)
    outcome = Setup(str(tmp_path), TOPK | {"overlap_steps": overlap}, steps=4 * H, model=mlp()).go()
    assert not outcome.failure
    assert [record["step"] for record in outcome.records] == [H, 2 * H, 3 * H, 4 * H]
    assert [len(outcome.trace[i]) for i in range(3)] == [4 * H, 4, 4 * H]
    assert outcome.summary["inner_steps"] == sum(map(len, outcome.trace.values()))
    assert len(set(outcome.summary["state_digests"].values())) == 1
