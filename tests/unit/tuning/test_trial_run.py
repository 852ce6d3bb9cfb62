"""A trial's run in a thread, here with all replicas in this process: what is reported, saved, taken up and stopped."""

import json
import threading

import pytest
import torch

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.errors import CheckpointError, FleetError
from ray_lowcomm.tuning.trial_checkpoint import Standing, adopt, copy_newest, read_standing, start_over
from ray_lowcomm.tuning.trial_config import trial_config
from ray_lowcomm.tuning.trial_run import TrialRun

H, ROUNDS = 2, 6
KEYS = {"outer_round", "step", "tokens", "loss", "val_loss", "bytes_up", "bytes_down", "members"}


def train(context):
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    check = torch.linspace(-1, 1, 24).reshape(4, 6)
    replica = context.wrap(model, optimizer, evaluate=lambda shared: float((shared(check) ** 2).mean()))
    while not replica.finished:
        loss = (model(torch.randn(8, 6)) ** 2).mean()
        loss.backward()
        replica.step(loss, 8)


def settings(folder, trial="t_1", **sample):
    base = TrainConfig.model_validate(
        {
            "run": {"eval_every": 2},
            "checkpoint": {"every": 1},
            "inner": {"steps": H * ROUNDS},
            "strategy": {"name": "diloco", "inner_steps": H},
            "fleet": {"replicas": 2, "transport": "local"},
        }
    )
    return trial_config(base, None, sample, str(folder), trial)


def to_end(run):
    found = []
    while (result := run.next()) is not None:
        found.append(result)
        if result.get("done"):
            break
    return found


def lines(folder, trial="t_1"):
    return [json.loads(line) for line in (folder / "trials" / trial / "rounds.jsonl").read_text().splitlines()]


def summary(folder, trial="t_1"):
    return json.loads((folder / "trials" / trial / "summary.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The results of an uninterrupted run, and the folder of its sweep."""
    folder = tmp_path_factory.mktemp("whole")
    return to_end(TrialRun(settings(folder), train, Standing())), folder


def test_one_result_a_round(whole):
    results, folder = whole
    assert [r["outer_round"] for r in results] == list(range(1, ROUNDS + 1))
    assert [r["step"] for r in results] == [H * n for n in range(1, ROUNDS + 1)]
    assert [r["tokens"] for r in results] == [2 * H * 8 * n for n in range(1, ROUNDS + 1)]
    assert [r.get("done", False) for r in results] == [False] * (ROUNDS - 1) + [True]
    assert all(r.keys() - {"done"} == KEYS for r in results)
    rounds, end = lines(folder), summary(folder)
    assert [r["bytes_up"] for r in results] == [sum(x["bytes_up"] for x in rounds[:n]) for n in range(1, ROUNDS + 1)]
    assert (results[-1]["bytes_up"], results[-1]["tokens"]) == (end["bytes_up"], end["tokens"])
    assert end["status"] == "finished"
    assert (folder / "trials/t_1/model/model.safetensors").exists()


def test_the_validation_loss_is_the_last_that_is_known(whole):
    results, folder = whole
    at, last = [summary(folder)["val_loss_start"]], summary(folder)["val_loss"]
    for line in lines(folder):
        at.append(at[-1] if line["val_loss"] is None else line["val_loss"])
    assert [r["val_loss"] for r in results] == at[1:]
    assert at[0] == at[1] != at[2]
    assert results[-1]["val_loss"] == last


def test_the_fleet_waits_with_the_round_after_next(tmp_path):
    run = TrialRun(settings(tmp_path), train, Standing())
    assert run.next()["outer_round"] == 1
    run._thread.join(1.0)
    assert run._thread.is_alive()
    assert [line["round"] for line in lines(tmp_path)] in ([1], [1, 2])
    run.stop("enough")
    assert not run._thread.is_alive()


def test_a_stop_leaves_whole_files(tmp_path):
    run = TrialRun(settings(tmp_path), train, Standing())
    assert [run.next()["outer_round"] for _ in range(3)] == [1, 2, 3]
    run.stop("the trial was stopped")
    end = summary(tmp_path)
    assert (end["status"], end["error"]) == ("stopped", "the trial was stopped")
    assert lines(tmp_path)[2]["round"] == 3


def test_goes_on_from_its_own_checkpoint_as_if_never_interrupted(whole, tmp_path):
    run = TrialRun(settings(tmp_path), train, Standing())
    assert [run.next()["outer_round"] for _ in range(3)] == [1, 2, 3]
    run.save(str(tmp_path / "saved"))
    run.next()  # a round that Tune will not remember
    run.stop("killed")

    standing = read_standing(str(tmp_path / "saved"))
    assert (standing.round, standing.reported, len(standing.records)) == (3, 3, 3)
    adopt(str(tmp_path / "saved"), str(tmp_path / "trials/t_1"), standing)
    results = to_end(TrialRun(settings(tmp_path), train, standing))
    assert results == whole[0][3:]
    assert summary(tmp_path)["state_digests"] == summary(whole[1])["state_digests"]
    assert [line["round"] for line in lines(tmp_path)] == list(range(1, ROUNDS + 1))
    assert not (tmp_path / "trials/t_1/superseded").exists()


def test_rounds_between_the_checkpoint_and_the_last_report_are_not_reported_again(whole, tmp_path):
    rare = {"checkpoint.every": 2}
    run = TrialRun(settings(tmp_path, **rare), train, Standing())
    assert [run.next()["outer_round"] for _ in range(3)] == [1, 2, 3]
    run.save(str(tmp_path / "saved"))
    run.stop("killed")
    standing = read_standing(str(tmp_path / "saved"))
    assert (standing.round, standing.reported) == (2, 3)
    adopt(str(tmp_path / "saved"), str(tmp_path / "trials/t_1"), standing)
    results = to_end(TrialRun(settings(tmp_path, **rare), train, standing))
    assert results == whole[0][3:]


def test_without_a_checkpoint_it_begins_again_and_reports_only_what_is_new(whole, tmp_path):
    never = {"checkpoint.every": 0}
    run = TrialRun(settings(tmp_path, **never), train, Standing())
    assert [run.next()["outer_round"] for _ in range(2)] == [1, 2]
    run.save(str(tmp_path / "saved"))
    run.stop("killed")
    standing = read_standing(str(tmp_path / "saved"))
    assert (standing.round, standing.reported) == (0, 2)
    assert to_end(TrialRun(settings(tmp_path, **never), train, standing)) == whole[0][2:]


def test_goes_on_from_anothers_checkpoint_with_its_own_settings(whole, tmp_path):
    donor = TrialRun(settings(tmp_path, "donor"), train, Standing())
    donated = [donor.next() for _ in range(4)]
    donor.save(str(tmp_path / "saved"))
    donor.stop("enough")
    slow = {"strategy.outer_lr": 0.01}
    run = TrialRun(settings(tmp_path, **slow), train, Standing())
    own = [run.next() for _ in range(2)]
    run.stop("exploits")

    standing = read_standing(str(tmp_path / "saved"))
    adopt(str(tmp_path / "saved"), str(tmp_path / "trials/t_1"), standing)
    results = to_end(TrialRun(settings(tmp_path, **slow), train, standing))
    assert [r["outer_round"] for r in results] == [5, 6]
    assert results[0]["tokens"] == donated[-1]["tokens"] + 2 * H * 8
    assert results[-1]["val_loss"] not in (whole[0][-1]["val_loss"], own[-1]["val_loss"])
    rounds = lines(tmp_path)
    assert [line["round"] for line in rounds] == list(range(1, ROUNDS + 1))
    assert rounds[:4] == lines(tmp_path, "donor")[:4]
    kept = (tmp_path / "trials/t_1/superseded/0001/rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["val_loss"] for line in kept[:2]] == [None, own[1]["val_loss"]]
    assert "outer_lr: 0.01" in (tmp_path / "trials/t_1/config.yaml").read_text()
    assert any("outer_lr" in notice for notice in summary(tmp_path)["notices"])


def test_goes_on_and_begins_again_where_nothing_can_be_moved(whole, tmp_path):
    place = f"file://{tmp_path}"
    run = TrialRun(settings(place), train, Standing())
    assert [run.next()["outer_round"] for _ in range(3)] == [1, 2, 3]
    run.save(str(tmp_path / "saved"))
    run.stop("killed")
    standing = read_standing(str(tmp_path / "saved"))
    adopt(str(tmp_path / "saved"), f"{place}/trials/t_1", standing)
    assert to_end(TrialRun(settings(place), train, standing)) == whole[0][3:]

    start_over(f"{place}/trials/t_1")
    assert to_end(TrialRun(settings(place), train, Standing())) == whole[0]
    assert len((tmp_path / "trials/t_1/superseded/0001/rounds.jsonl").read_text().splitlines()) == ROUNDS


def test_a_finished_run_that_is_taken_up_again_only_says_so(whole, tmp_path):
    run = TrialRun(settings(tmp_path), train, Standing())
    to_end(run)
    run.save(str(tmp_path / "saved"))
    standing = read_standing(str(tmp_path / "saved"))
    adopt(str(tmp_path / "saved"), str(tmp_path / "trials/t_1"), standing)
    assert TrialRun(settings(tmp_path), train, standing).next() is None
    assert summary(tmp_path)["status"] == "finished"


def test_a_train_function_that_fails_is_the_trials_reason(tmp_path):
    def broken(context):
        raise ValueError("no such column: text")

    with pytest.raises(FleetError, match=r"replica [01]: ValueError: no such column: text"):
        TrialRun(settings(tmp_path), broken, Standing()).next()
    assert summary(tmp_path)["status"] == "failed"


def test_a_train_function_that_ends_early_ends_the_trial(tmp_path):
    def short(context):
        model = torch.nn.Linear(2, 1)
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2 * H):
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            replica.step(loss, 1)

    run = TrialRun(settings(tmp_path), short, Standing())
    assert [run.next()["outer_round"], run.next()["outer_round"], run.next()] == [1, 2, None]
    assert summary(tmp_path)["status"] == "incomplete"


def test_the_default_loop_is_the_jobs(tmp_path):
    small = {
        "model.args": {"layers": 1, "width": 16, "heads": 2},
        "data.sequence_length": 16,
        "data.eval_samples": 8,
        "inner.steps": 2,
        "inner.batch_size": 2,
    }
    results = to_end(TrialRun(settings(tmp_path, **small), None, Standing()))
    assert [(r["outer_round"], r["tokens"], r["done"]) for r in results] == [(1, 2 * 2 * 2 * 16, True)]


def test_a_copy_that_is_always_too_late_says_what_to_do(whole, tmp_path, monkeypatch):
    from ray_lowcomm.tuning import trial_checkpoint

    def gone(source, target):
        raise FileNotFoundError(f"{source}/shared.safetensors")

    monkeypatch.setattr(trial_checkpoint, "_copy", gone)
    with pytest.raises(CheckpointError, match=r"5 attempts.*shared\.safetensors; raise checkpoint\.keep"):
        copy_newest(str(whole[1] / "trials/t_1"), str(tmp_path))


def test_the_next_newest_is_copied_if_the_run_was_quicker(whole, tmp_path, monkeypatch):
    from ray_lowcomm.tuning import trial_checkpoint

    copies, real = [], trial_checkpoint._copy

    def late_once(source, target):
        copies.append(source)
        if len(copies) == 1:
            raise FileNotFoundError(source)
        real(source, target)

    monkeypatch.setattr(trial_checkpoint, "_copy", late_once)
    found = copy_newest(str(whole[1] / "trials/t_1"), str(tmp_path))
    assert (len(copies), found.manifest["round"]) == (2, ROUNDS)


@pytest.mark.parametrize(
    "text", ["", "{", '{"format": 2}', '{"format": 1, "round": 3}', '{"format": 1, "nonsense": 1}']
)
def test_a_damaged_standing_is_one_line(tmp_path, text):
    (tmp_path / "trial.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"trial\.json"):
        read_standing(str(tmp_path))


def test_no_thread_of_a_trial_stays(whole):
    assert [t.name for t in threading.enumerate() if t.name == "fleet"] == []
