"""When what is due: pure functions of the step."""

import pytest

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.schedule import Schedule, SyncOp, at_random, every, half_life


def _launches(schedule: Schedule) -> list[tuple[int, list[str]]]:
    """(step, tracks) of all launches, as the driver walks through them."""
    out, step = [], schedule.next_step(0)
    while step is not None:
        out.append((step, [op.track for op in schedule.ops(step)]))
        step = schedule.next_step(step)
    return out


def test_nothing_is_due_before_the_first_step_or_after_the_last() -> None:
    for due in (every({"params": 2}), at_random({"params": 1}, 0)):
        schedule = Schedule(due, 6, ("params",))
        assert schedule.ops(0) == ()
        assert schedule.ops(7) == schedule.ops(8) == ()
        assert schedule.next_step(6) is None


def test_tracks_are_due_at_multiples_of_their_periods() -> None:
    schedule = Schedule(every({"params": 2, "exp_avg": 3, "exp_avg_sq": 6}), 12, ("params",))
    assert _launches(schedule) == [
        (2, ["params"]),
        (3, ["exp_avg"]),
        (4, ["params"]),
        (6, ["params", "exp_avg", "exp_avg_sq"]),
        (8, ["params"]),
        (9, ["exp_avg"]),
        (10, ["params"]),
        (12, ["params", "exp_avg", "exp_avg_sq"]),
    ]


def test_the_run_ends_with_a_sync_unless_its_last_step_is_one() -> None:
    sync = ["params"]
    assert _launches(Schedule(every({"params": 4}), 10, ("params",))) == [(4, sync), (8, sync), (10, sync)]
    assert _launches(Schedule(every({"params": 4}), 8, ("params",))) == [(4, ["params"]), (8, ["params"])]
    # only what is missing is added
    assert _launches(Schedule(every({"params": 4, "m": 5}), 5, ("params",)))[-1] == (5, ["m", "params"])


def test_a_run_shorter_than_a_period_has_one_sync_at_its_end() -> None:
    assert _launches(Schedule(every({"params": 100}), 3, ("params",))) == [(3, ["params"])]


def test_overlapped_ops_are_applied_later_but_never_after_the_next_launch() -> None:
    schedule = Schedule(every({"params": 4}), 10, ("params",))
    applied = {step: [op.apply for op in schedule.ops(step, overlap=3)] for step in (4, 8, 10)}
    # the op of step 8 is applied before the final one is proposed against an anchor that includes it
    assert applied == {4: [7], 8: [10], 10: [10]}
    assert [op.apply for op in schedule.ops(4, overlap=100)] == [8]
    at_the_end = Schedule(every({"params": 4}), 8, ("params",))
    assert [op.apply for op in at_the_end.ops(8, overlap=3)] == [8]


@pytest.mark.parametrize("total", range(1, 14))
@pytest.mark.parametrize("overlap", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("fragments", [1, 3])
def test_each_op_is_applied_before_the_next_launch_and_all_by_the_end(total: int, overlap: int, fragments: int) -> None:
    schedule = Schedule(every({"params": 3}, fragments=fragments), total, ("params",), fragments)
    steps = [step for step, _ in _launches(schedule)]
    for step, following in zip(steps, [*steps[1:], total], strict=True):
        assert all(step <= op.apply <= following for op in schedule.ops(step, overlap))
        assert len({op.apply for op in schedule.ops(step, overlap)}) == 1
    assert steps[-1] == total


def test_fragments_take_turns_and_all_are_synchronised_at_the_end() -> None:
    schedule = Schedule(every({"params": 6, "exp_avg": 4}, fragments=3), 13, ("params",), 3)
    launched = {step: [op.id for op in schedule.ops(step)] for step, _ in _launches(schedule)}
    assert launched == {
        2: ["params.0@2"],
        4: ["params.1@4", "exp_avg@4"],
        6: ["params.2@6"],
        8: ["params.0@8", "exp_avg@8"],
        10: ["params.1@10"],
        12: ["params.2@12", "exp_avg@12"],
        13: ["params.0@13", "params.1@13", "params.2@13"],
    }
    assert [op.apply for op in schedule.ops(4, overlap=1)] == [5, 5]


@pytest.mark.parametrize(
    ("period", "fragments", "allowed"),
    [
        (16, 5, "take 4 or 8, or a period of 15 or 20"),
        (4, 8, "take 4, or a period of 8"),
        (7, 2, "take 1 or 7, or a period of 6 or 8"),
    ],
)
def test_the_period_must_be_a_multiple_of_the_fragments(period: int, fragments: int, allowed: str) -> None:
    with pytest.raises(SettingError, match=f"strategy.fragments = {fragments}: .* {period}: {allowed}"):
        every({"params": period}, fragments=fragments)


def test_op_ids_are_unique_in_a_run() -> None:
    schedule = Schedule(every({"params": 1, "exp_avg": 1}), 20, ("params",))
    ids = [op.id for step in range(21) for op in schedule.ops(step)]
    assert len(set(ids)) == len(ids) == 40
    assert SyncOp("params", 4, 6, fragment=2).id != SyncOp("params", 4, 6).id


def test_random_schedule_is_the_same_for_all_who_know_the_seed() -> None:
    periods = {"params": 4, "exp_avg": 12}
    one, other = at_random(periods, 7), at_random(periods, 7)
    backwards = [one(step) for step in reversed(range(1000))][::-1]
    assert backwards == [other(step) for step in range(1000)]
    assert backwards != [at_random(periods, 8)(step) for step in range(1000)]


@pytest.mark.parametrize("period", [1, 2, 16, 100])
def test_random_schedule_fires_about_once_a_period_and_tracks_are_independent(period: int) -> None:
    due = at_random({"a": period, "b": period}, 3)
    drawn = [tuple(op.track for op in due(step)) for step in range(20_000)]
    for track in ("a", "b"):
        assert sum(track in tracks for tracks in drawn) == _about(20_000 / period)
    assert sum(tracks == ("a", "b") for tracks in drawn) == _about(20_000 / period**2)


def _about(expected: float) -> object:
    """Within four standard deviations of a count with this mean."""
    return pytest.approx(expected, abs=4 * expected**0.5)


def test_half_life_of_the_usual_betas() -> None:
    assert half_life(0.5) == 1
    assert [round(half_life(beta), 1) for beta in (0.95, 0.99, 0.999, 0.9999)] == [13.5, 69.0, 692.8, 6931.1]
    for beta in (0.0, 1.0, -0.5, 2.0):
        with pytest.raises(SettingError, match="between 0 and 1"):
            half_life(beta)
