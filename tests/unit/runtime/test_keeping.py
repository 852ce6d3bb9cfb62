"""Who may take a living fleet over, and when a fleet is alone. No actor, no cluster."""

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.engine.book import Event
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.runtime import keeper as keeper_module
from ray_lowcomm.runtime import keeping
from ray_lowcomm.runtime.keeper import Keeper, Orders
from ray_lowcomm.runtime.sending import Sent
from tests.unit.runtime.test_driver import plan

OURS = {"inner.lr": "0.1", "fleet.replicas": "2"}


@pytest.fixture
def jobs(monkeypatch):
    """Ids of the jobs that are over."""
    over = set()
    monkeypatch.setattr(keeper_module, "job_is_over", over.__contains__)
    return over


@pytest.fixture
def kept(jobs, monkeypatch, tmp_path):
    """A keeper whose driver is not started; nobody tends it but the test."""
    monkeypatch.setattr(Keeper, "_tend", lambda self: None)
    settings = plan(tmp_path, orphan_s=5.0)
    spec = RunSpec(settings.strategy, 12, str(tmp_path), settings.run, settings.checkpoint, settings.fleet, ())
    return Keeper(Orders(settings, spec, Sent(b""), job="first", settings=OURS))


def note(kept, *events):
    asked = SimpleNamespace(ask=lambda *arguments, **named: list(events))
    kept._follow(asked, SimpleNamespace(note=lambda event: None, tend=lambda now: None))


def test_a_job_takes_over_from_one_that_is_dead(kept, jobs):
    assert not kept.adopt("second", OURS)
    jobs.add("first")
    with pytest.raises(FleetError, match=r"is being trained with inner\.lr = 0\.1, not 0\.2: give the same settings"):
        kept.adopt("second", OURS | {"inner.lr": "0.2"})
    assert kept.adopt("second", OURS)
    assert not kept.adopt("third", OURS)


def test_a_fleet_is_alone_once_its_job_was_gone_for_long_enough(kept, jobs):
    assert not kept._is_alone(100.0)
    jobs.add("first")
    assert not kept._is_alone(200.0)
    assert not kept._is_alone(204.0)
    assert kept.adopt("second", OURS)
    assert not kept._is_alone(206.0)
    jobs.add("second")
    assert not kept._is_alone(300.0)
    assert kept._is_alone(306.0)
    assert kept.is_ending()
    assert not kept.adopt("third", OURS)


@pytest.mark.parametrize("event", [Event("failed", ("why", "")), Event("ended", False)])
def test_a_run_that_broke_off_is_not_taken_over(kept, jobs, event):
    note(kept, event)
    jobs.add("first")
    assert not kept.adopt("second", OURS)
    assert kept._is_alone(100.0)


def test_one_that_is_whole_waits_for_who_writes_down_its_end(kept, jobs):
    note(kept, Event("ended", True))
    jobs.add("first")
    assert not kept._is_alone(100.0)
    assert kept.adopt("second", OURS)


class PaperKeeper:
    def __init__(self, adopts, trouble=None):
        self.adopts, self.trouble = list(adopts), trouble

    def ask(self, method, *arguments, timeout_s):
        if self.trouble is not None:
            raise self.trouble
        if method == "adopt":
            return self.adopts.pop(0)
        if method == "is_ending":
            return False
        assert method == "begin"
        host = SimpleNamespace(handled=7, round=3)
        return SimpleNamespace(ask=lambda what, timeout_s: {"start": 4711, "host": host}[what])


@pytest.fixture
def take_over(monkeypatch):
    monkeypatch.setattr(keeping.ray, "get_actor", lambda name, namespace: name)
    context = SimpleNamespace(get_job_id=lambda: "second")
    monkeypatch.setattr(keeping.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(keeping, "AGAIN_S", 0.0)

    def take(keeper, resume=True):
        monkeypatch.setattr(keeping, "Beside", lambda handle: keeper)
        return keeping.taken_over("/runs/one", OURS, resume)

    return take


def test_who_takes_over_waits_until_ray_knows_of_the_death(take_over):
    living = take_over(PaperKeeper([False, False, True]))
    assert (living.handled, living.round) == (7, 3)


def test_without_a_resume_it_is_refused_at_once(take_over):
    expected = (
        r"^/runs/one is being trained: its driver is process 4711; .* takes it over once its job is gone; end that"
    )
    with pytest.raises(FleetError, match=expected):
        take_over(PaperKeeper([]), resume=False)


def test_a_keeper_that_is_gone_leaves_the_folder_free(take_over):
    assert take_over(PaperKeeper([], ActorDiedError())) is None
    with pytest.raises(FleetError, match=r"does not answer \(GetTimeoutError\)"):
        take_over(PaperKeeper([], GetTimeoutError()))
