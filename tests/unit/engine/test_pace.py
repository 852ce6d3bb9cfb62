"""Replicas of different speed: each takes the inner steps that it can, and the others do not wait for it."""

import pytest

from ray_lowcomm.core.fault import Fault
from ray_lowcomm.engine import messages as m
from ray_lowcomm.transport.local import LocalFleet

from .local_run import Setup

H, STEP_S, ROUNDS = 16, 2.0, 16
TOPK = {"name": "topk_diloco", "inner_steps": H, "chunk_size": 4, "topk": 3}
FLEETS = {
    "blocking": TOPK,
    "overlapped": TOPK | {"overlap_steps": H // 2},
    "overlapped_all": TOPK | {"overlap_steps": H},
    "fragments": TOPK | {"inner_steps": 2 * H, "fragments": 2, "overlap_steps": H // 4},
}
every_fleet = pytest.mark.parametrize("strategy", FLEETS.values(), ids=FLEETS)
BY_SPEED = {"pace": "by_speed"}


class Run:
    """A run of three replicas with the virtual seconds of its commits, and of all arrivals by round."""

    def __init__(self, directory, strategy, fleet, step_s, monkeypatch, faults=(), rounds=ROUNDS):
        self.commits, self.arrivals = {}, {}
        send, perform, self.weights = LocalFleet.send, LocalFleet.perform, {}

        def noting(fleet, index, request):
            if isinstance(request, m.Arrival):
                self.arrivals.setdefault(request.round + 1, {})[index] = fleet.clock
            return send(fleet, index, request)

        def weighing(fleet, index, plan, key, step):
            self.weights[plan.round + 1] = plan.weights
            return perform(fleet, index, plan, key, step)

        monkeypatch.setattr(LocalFleet, "send", noting)
        monkeypatch.setattr(LocalFleet, "perform", weighing)
        setup = {"steps": rounds * H, "every": 0, "eval_every": 0, "fleet": fleet, "step_s": step_s, "faults": faults}
        self.outcome = Setup(str(directory), strategy, **setup).go(on_record=self._note)
        monkeypatch.undo()
        assert self.outcome.failure is None
        assert len(set(self.outcome.summary["state_digests"].values()) - {None}) == 1
        self.records, self.summary = self.outcome.records, self.outcome.summary

    def _note(self, coordinator, record):
        self.commits[record["round"]] = coordinator.fleet.now

    def took_s(self, first, last):
        return self.commits[last] - self.commits[first]

    def spread(self, number):
        """Between the first arrival and the last in a round, as a part of what the round took."""
        came = self.arrivals[number].values()
        return (max(came) - min(came)) / self.took_s(number - 1, number)


def speeds(*of_replicas):
    return lambda index, now: STEP_S * of_replicas[index]


@every_fleet
def test_all_arrive_together_after_three_rounds(tmp_path, monkeypatch, strategy):
    run = Run(tmp_path, strategy, BY_SPEED, speeds(1.0, 1.5, 4.0), monkeypatch)
    late = {number: round(run.spread(number), 3) for number in range(4, ROUNDS)}
    assert max(late.values()) <= 0.10, (late, [r["steps"] for r in run.records])


@every_fleet
@pytest.mark.parametrize("since", ["the beginning", "round 3"])
def test_one_that_is_four_times_slower_costs_the_others_little(tmp_path, monkeypatch, strategy, since):
    alike = Run(tmp_path / "a", strategy, BY_SPEED, speeds(1.0, 1.0, 1.0), monkeypatch)
    if since == "round 3":
        slow = Fault("slow", 2, 3, "inner", factor=4.0, rounds=ROUNDS)
        late = Run(tmp_path / "b", strategy, BY_SPEED, speeds(1.0, 1.0, 1.0), monkeypatch, (slow,))
    else:
        late = Run(tmp_path / "b", strategy, BY_SPEED, speeds(1.0, 1.0, 4.0), monkeypatch)
    steps = [record["steps"] for record in late.records]
    assert late.took_s(5, ROUNDS) <= 1.10 * alike.took_s(5, ROUNDS), steps
    assert all(own == [H, H, H // 4] for own in steps[6:-1]), steps


@every_fleet
def test_work_weighs_as_many_tokens_as_it_has(tmp_path, monkeypatch, strategy):
    run = Run(tmp_path, strategy, BY_SPEED, speeds(1.0, 1.0, 4.0), monkeypatch, rounds=8)
    for record in run.records:
        steps = record["steps"]
        assert run.weights[record["round"]] == pytest.approx([own / sum(steps) for own in steps])
    assert run.summary["tokens"] == 8 * run.summary["inner_steps"]


def for_a_minute(index, now):
    return 4 * STEP_S if index == 2 and 60 <= now < 120 else STEP_S


@every_fleet
@pytest.mark.parametrize("pace", ["equal", "by_speed"])
def test_one_that_is_slow_for_a_minute_is_not_waited_for(tmp_path, monkeypatch, strategy, pace):
    fleet = {"pace": pace, "quorum": 2, "grace_s": 4.0, "keep_rounds": 8}
    alike = Run(tmp_path / "a", strategy, fleet, speeds(1.0, 1.0, 1.0), monkeypatch)
    run = Run(tmp_path / "b", strategy, fleet, for_a_minute, monkeypatch)
    assert run.took_s(1, ROUNDS) <= 1.10 * alike.took_s(1, ROUNDS)
    assert run.summary["caught_up_rounds"] > 0
    assert (run.summary["lost_inner_steps"], run.summary["state_transfer_bytes"]) == (0, 0)
    assert run.summary["inner_steps"] == sum(map(len, run.outcome.trace.values()))
    assert run.records[-1]["members"] == [0, 1, 2]


def test_that_the_others_wait_is_said_once(tmp_path, monkeypatch):
    run = Run(tmp_path, TOPK, {}, speeds(1.0, 1.0, 2.0), monkeypatch)
    said = [text for text in run.outcome.said("notice") if "fleet.pace: by_speed" in text]
    assert len(said) == 1, said
    assert said[0].startswith("replica 2 takes 2.0 times as long for an inner step as the fastest: each round waits")
