"""Every strategy trains every awkward model through the engine, and keeps what the contract promises."""

from dataclasses import fields

import pytest
import torch

from ray_lowcomm import strategies
from ray_lowcomm.core.settings import Fault
from ray_lowcomm.core.tracks import Tracks

from .cases import CASES, Case
from .fleet import Job, Outcome, check_consistent, run, strategy_of
from .models import MODELS

NAMES = list(MODELS)


def features(case: Case) -> set[tuple[str, str]]:
    """What a case is made of: the strategy with each of its settings, and the optimizer."""
    settings = strategies.resolve(case.settings)
    own = {f.name: str(getattr(settings, f.name)) for f in fields(settings)}
    together = ("residual", "combine", "reduce")  # what each strategy treats in a way of its own
    return {*own.items(), ("optimizer", case.optimizer.__name__), *((settings.name, own[name]) for name in together)}


def covering(first: int) -> list[Case]:
    """Cases in which each feature occurs that any case has; `first` turns the order in which they are taken."""
    order, missing, chosen = CASES[first:] + CASES[:first], set().union(*map(features, CASES)), []
    while missing:
        chosen.append(max(order, key=lambda case: len(features(case) & missing)))
        missing -= features(chosen[-1])
    return chosen


# All models meet all that strategies can have, with two replicas, and in the slow tests all cases; with one replica and
# with three every strategy and every model occurs.
COVERING = [(case, name) for i, name in enumerate(NAMES) for case in covering(5 * i)]
SLOW = pytest.mark.slow
PAIRS = [pytest.param(case, name, 2, marks=[SLOW] * ((case, name) not in COVERING)) for case in CASES for name in NAMES]
PAIRS += [pytest.param(case, NAMES[i % len(NAMES)], w) for i, case in enumerate(CASES) for w in (1, 3)]


def _id(value: object) -> str:
    return str(value)


@pytest.mark.parametrize(("case", "name", "replicas"), PAIRS, ids=_id)
def test_strategy_trains_model_and_keeps_its_promises(case: Case, name: str, replicas: int, tmp_path) -> None:
    if name == "compiled":
        torch._dynamo.reset()
    job = Job(case.settings, MODELS[name], replicas, optimizer=case.optimizer, evaluate=lambda model: 0.0)
    outcome = run(job, tmp_path)
    assert outcome.failure is None
    assert outcome.summary["inner_steps"] == 6 * replicas
    for model in outcome.models.values():
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    _check_training(outcome, job)
    _check_names(outcome)
    if name == "frozen":
        _check_left_alone(outcome, job, ("0.weight", "0.bias"))
    if name == "partly_used" and replicas < 3:  # x/3 + x/3 + x/3 is not always x
        _check_left_alone(outcome, job, ("never.weight", "never.bias"))
    if strategy_of(outcome.replicas[0]).consistent and replicas > 1:
        check_consistent(outcome)


def _check_training(outcome: Outcome, job: Job) -> None:
    model = job.model()
    before = Tracks(model, job.optimizer(model)).read("params")
    assert not torch.equal(outcome.anchor(), before)


def _check_names(outcome: Outcome) -> None:
    state = outcome.replicas[0]._state.shared() | outcome.replicas[0]._state.local()
    assert not [name for name in state if "_orig_mod" in name]


def _check_left_alone(outcome: Outcome, job: Job, names: tuple[str, ...]) -> None:
    before = dict(job.model().named_parameters())
    for replica in outcome.models:
        after = outcome.parameters(replica)
        assert all(torch.equal(after[name], before[name]) for name in names)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("phase", [pytest.param("exchange", marks=SLOW), "voted"])
def test_death_of_a_replica_in_a_round_costs_the_others_nothing(case: Case, phase: str, tmp_path) -> None:
    """The others retry with the same messages, or commit; the dead one starts again from a peer's shared state."""
    fault = Fault("kill", 1, 2, phase)  # type: ignore[arg-type]
    job = Job(case.settings, MODELS["batch_norm"], 3, 8, optimizer=case.optimizer, faults=(fault,))
    outcome = run(job, tmp_path)
    assert outcome.failure is None
    assert outcome.summary["members_lost"] == 1
    assert outcome.summary["rounds_retried"] == (phase == "exchange")
    assert 1 in outcome.records[-1]["members"]
    if strategy_of(outcome.replicas[0]).consistent:
        assert outcome.shared[0] == outcome.shared[2]
        assert len(set(outcome.summary["state_digests"].values())) == 1


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_replica_with_nan_sits_out_and_never_reaches_another(case: Case, tmp_path) -> None:
    job = Job(case.settings, MODELS["plain"], 3, 8, optimizer=case.optimizer, faults=(Fault("nan", 1, 2),))
    outcome = run(job, tmp_path)
    assert outcome.failure is None
    assert outcome.summary["nonfinite_rejected"] == 1
    without = [number for number, record in enumerate(outcome.records, 1) if record["members"] == [0, 2]]
    parts = case.settings.fragments or 1
    assert without == [2 if parts == 1 else 3]  # found where the fragment is sent that it is in
    assert 1 in outcome.records[-1]["members"]
    for model in outcome.models.values():
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    if strategy_of(outcome.replicas[0]).consistent:
        assert len(set(outcome.summary["state_digests"].values())) == 1


def test_a_message_in_flight_is_applied_later_than_it_was_launched(tmp_path) -> None:
    """The anchor changes one step after each launch, and at the end at once."""
    settings = strategies.resolve(next(case.settings for case in CASES if case.id == "dct_overlap"))
    outcome = run(Job(settings, MODELS["plain"]), tmp_path)
    changed = [a != b for a, b in zip(outcome.shared[0], outcome.shared[0][1:], strict=False)]
    assert changed == [False, True, False, True, True]  # after steps 3 (launched at 2), 5 (at 4), 6 (the end)
