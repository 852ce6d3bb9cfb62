"""Metrics of a user's own: from the loop and from its evaluation, to records and summary."""

import json
import math

import numpy as np
import pytest
import torch

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.engine.reported import TAKEN, checked, combined, evaluated
from tests.unit.engine.own_loop import OwnLoop, loss_of, net


@pytest.mark.parametrize("value", [0.5, 1, True, np.float32(0.5), np.int64(3), torch.tensor(0.5), torch.tensor([2])])
def test_a_number_may_be_of_any_kind(value):
    assert checked({"accuracy": value}, "here") == {"accuracy": float(value)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"accuracy": "high"}, "here: 'accuracy' is a str: it must be a number"),
        ({"accuracy": None}, "here: 'accuracy' is a NoneType"),
        ({"accuracy": torch.ones(2)}, r"here: 'accuracy' is a Tensor of shape \[2\]"),
        ({"loss": 1.0}, "here: 'loss' is no name for a metric of your own"),
        ({"done": 1.0}, "here: 'done' is no name"),
        ({3: 1.0}, "here: 3 is no name"),
        ({"": 1.0}, "here: '' is no name .* allowed are letters"),
        ({"status": 1.0}, "here: 'status' is no name .* it is taken"),  # a column of a sweep's trials
        ({"should_checkpoint": 1.0}, "here: 'should_checkpoint' is no name"),  # Tune would write one
        ({"recall@5": 1.0}, "here: 'recall@5' is no name"),  # MLflow takes none of a call with such a name
        ({"eval//acc": 1.0}, "here: 'eval//acc' is no name"),
        ({"../acc": 1.0}, "here: '../acc' is no name"),
        ({"max:acc": 1.0}, "here: 'max:acc' is no name"),
        ({"x" * 201: 1.0}, "is a name of 201 characters: allowed are 200"),
        ({"accuracy": 10**400}, "here: 'accuracy' is larger than a float can be"),
        ([0.5], "here must be a dictionary of numbers by name, not a list"),
    ],
)
def test_what_is_no_number_or_no_name_is_named(given, said):
    with pytest.raises(ModelError, match=said):
        checked(given, "here")


@pytest.mark.parametrize("name", ["accuracy", "eval/acc top-5", "grad.norm", "größe", "_x"])
def test_names_that_are_free(name):
    assert checked({name: 1}, "here") == {name: 1.0}


def test_what_an_evaluation_may_return():
    assert evaluated(1.5) == (1.5, {})
    assert evaluated(torch.tensor(1.5)) == (1.5, {})
    assert evaluated(None) == (None, {})
    assert evaluated({"val_loss": 1.5, "accuracy": np.float64(0.9)}) == (1.5, {"accuracy": 0.9})
    assert evaluated({"accuracy": 0.9}) == (None, {"accuracy": 0.9})
    for wrong in ("1.5", torch.ones(2), [1.5], {"val_loss": "x"}):
        with pytest.raises(ModelError, match="what `evaluate` returned"):
            evaluated(wrong)


def test_replicas_are_weighed_and_who_has_nothing_does_not_count():
    members = [({"a": 1.0, "b": 4.0}, 0.75), ({"a": 3.0}, 0.25), ({"c": 1.0}, 0.0)]
    assert combined(members) == {"a": 1.5, "b": 4.0, "c": 1.0}
    assert combined([({"a": math.nan}, 1.0)]) == {"a": None}


def _run(path, loop, go=None, **fields):
    setup = OwnLoop(str(path), {"name": "diloco", "inner_steps": 4}, replicas=2, loop=loop, eval_every=2, **fields)
    return setup.go(**(go or {}))


def _reporting(context, outcome):
    def evaluate(model):
        return {"val_loss": 1.0, "accuracy": 0.25}

    model = outcome.models[context.index] = net()
    replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), evaluate=evaluate)
    while not replica.finished:
        loss = loss_of(model, context.index, replica.step_number)
        loss.backward()
        replica.report({"doubled": 2.0 * (replica.step_number % 4)})  # 0, 2, 4, 6 in each round
        if context.index:
            replica.report({"only_1": torch.tensor(5.0)})
        replica.step(loss, tokens=8 * (1 + 2 * context.index))


def test_metrics_are_in_the_records_and_in_the_summary(tmp_path):
    outcome = _run(tmp_path, _reporting)
    assert outcome.failure is None
    records = outcome.said("record")
    assert [record["doubled"] for record in records] == [3.0] * 4
    assert [record["only_1"] for record in records] == [5.0] * 4
    assert [record.get("accuracy") for record in records] == [None, 0.25, None, 0.25]
    assert outcome.summary["metrics"] == {"doubled": 3.0, "only_1": 5.0, "accuracy": 0.25}
    assert set().union(*records) - TAKEN == {"doubled", "only_1", "accuracy"}
    json.dumps(records, allow_nan=False)


def test_a_resume_goes_on_with_them(tmp_path):
    _run(tmp_path, _reporting, go={"kill_after": 2})
    resumed = _run(tmp_path, _reporting, go={"resume": True})
    assert [record["doubled"] for record in resumed.said("record")] == [3.0] * len(resumed.said("record"))
    assert resumed.summary["metrics"]["accuracy"] == 0.25


def test_a_report_in_mid_round_survives_a_checkpoint_with_overlap(tmp_path):
    def run(path, go):
        strategy = {"name": "topk_diloco", "inner_steps": 4, "overlap_steps": 2}
        return OwnLoop(str(path), strategy, replicas=2, loop=_reporting, eval_every=0).go(**go)

    whole = run(tmp_path / "a", {})
    run(tmp_path / "b", {"kill_after": 2})
    resumed = run(tmp_path / "b", {"resume": True})
    later = {record["round"]: record["doubled"] for record in whole.said("record")}
    assert all(record["doubled"] == later[record["round"]] for record in resumed.said("record"))


def test_an_evaluation_without_a_loss_is_said_once(tmp_path):
    def loop(context, outcome):
        model = outcome.models[context.index] = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = context.wrap(model, optimizer, evaluate=lambda model: {"accuracy": 0.5})
        while not replica.finished:
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss)

    outcome = _run(tmp_path, loop)
    said = [text for text in outcome.said("notice") if "returned no val_loss" in text]
    assert said == ["replica 0: `evaluate` returned no val_loss: there is no validation loss"]
    assert outcome.summary["val_loss"] is None
    assert outcome.summary["metrics"] == {"accuracy": 0.5}


def _evaluating(evaluate, report=()):
    def loop(context, outcome):
        model = outcome.models[context.index] = net()
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), evaluate=evaluate)
        while not replica.finished:
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.report(dict(report))
            replica.step(loss)

    return loop


def test_a_name_that_loop_and_evaluation_both_give_is_said_once(tmp_path):
    loop = _evaluating(lambda model: {"val_loss": 1.0, "accuracy": 0.5}, {"accuracy": 0.75})
    outcome = _run(tmp_path, loop)
    said = [text for text in outcome.said("notice") if "accuracy" in text]
    assert said == ["accuracy is given by `replica.report` and by `evaluate`: where there are both, the latter counts"]
    assert [record["accuracy"] for record in outcome.said("record")] == [0.75, 0.5, 0.75, 0.5]


def test_an_evaluation_that_fails_is_said_to_be_one(tmp_path):
    def evaluate(model):
        raise KeyError("image")

    outcome = _run(tmp_path, _evaluating(evaluate))
    assert "KeyError" in outcome.failure
    said = [text for text in outcome.said("notice") if "`evaluate` failed" in text]
    assert said == ["replica 0: `evaluate` failed at the end of round 0 with KeyError"]


def test_an_export_that_fails_is_said_to_be_one(tmp_path):
    def export(model, folder):
        raise KeyError("image")

    def loop(context, outcome):
        model = net()
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), export=export)
        while not replica.finished:
            loss = loss_of(model, context.index, replica.step_number)
            loss.backward()
            replica.step(loss)

    outcome = _run(tmp_path, loop)
    assert "KeyError" in outcome.failure
    assert [text for text in outcome.said("notice") if "`export`" in text] == [
        "replica 0: `export` failed with KeyError"
    ]


def test_an_evaluation_that_returns_something_else_is_one_line(tmp_path):
    def loop(context, outcome):
        model = net()
        context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), evaluate=lambda model: "good")

    assert _run(tmp_path, loop).failure == "replica 0: what `evaluate` returned is a str: it must be a number"
