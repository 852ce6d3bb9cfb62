"""The main job as a user runs it: files, exit codes, resume, evaluation. Replicas share one process."""

import json
import re
import sqlite3
from pathlib import Path

import pytest

from jobs import evaluate, train
from jobs._main import run_main

SMALL = [
    *("--fleet.transport", "local", "--inner.steps", "24", "--strategy.inner_steps", "4", "--checkpoint.every", "2"),
    *("--data.eval_samples", "32"),
]
TINY_GPT = ["--model.args", '{"layers": 1, "width": 16, "heads": 1}', "--data.sequence_length", "32"]


@pytest.fixture
def run(tmp_path, capfd):
    def start(*argv, job=train):
        model = [] if "--model.name" in argv else TINY_GPT
        code = run_main(job.main, [*SMALL, *model, "--run.output_dir", str(tmp_path), *argv] if job is train else argv)
        out, err = capfd.readouterr()
        return code, out, err

    return start


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_run_leaves_what_it_promises(run, tmp_path):
    code, out, err = run("--run.name", "first")
    assert code == 0, err
    folder = tmp_path / "first"
    summary = json.loads((folder / "summary.json").read_text())
    records = lines_of(folder / "rounds.jsonl")
    assert summary["status"] == "finished"
    assert summary["rounds"] == len(records) == 6
    assert [r["step"] for r in records] == [4, 8, 12, 16, 20, 24]
    assert summary["inner_steps"] == 48
    assert summary["tokens"] == 48 * 16 * 32
    assert summary["bytes_up"] == sum(r["bytes_up"] for r in records)
    assert summary["compression_up"] == pytest.approx(summary["dense_bytes"] / summary["bytes_up"])
    assert summary["train_loss"] == pytest.approx(records[-1]["loss"])
    assert summary["val_loss"] == records[-1]["val_loss"]
    assert len(set(summary["state_digests"].values())) == 1
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"round_000004", "round_000006"}
    assert not list(tmp_path.glob("**/*.pkl"))
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        runs = store.execute("select run_uuid, status from runs").fetchall()
        steps = store.execute("select step from metrics where key = 'loss' order by step").fetchall()
    assert runs == [(summary["mlflow_run_id"], "FINISHED")]
    assert [step for (step,) in steps] == [4, 8, 12, 16, 20, 24]


def test_evaluation_gives_the_loss_of_the_run(run, tmp_path):
    run("--run.name", "judged")
    summary = json.loads((tmp_path / "judged" / "summary.json").read_text())
    for place in ("", "model", "checkpoints/round_000006"):
        code, out, err = run(str(tmp_path / "judged" / place), job=evaluate)
        assert code == 0, err
        assert float(out.split()[-1]) == pytest.approx(summary["val_loss"], abs=1e-5)


def test_an_evaluation_takes_what_it_uses(run, tmp_path):
    run("--run.name", "judged", "--tracking.enabled", "false")
    folder = str(tmp_path / "judged")
    code, _, err = run(folder, "--data.eval_samples", "8", "--inner.batch_size", "4", job=evaluate)
    assert code == 0, err
    for argv, said in (
        (("--data.path", "other.txt"), "data.path = 'other.txt': has no effect with data.name = 'python_stdlib'"),
        (("--inner.lr", "1"), "inner.lr has no effect on an evaluation, which takes data., model.name"),
    ):
        code, _, err = run(folder, *argv, job=evaluate)
        assert (code, len(err.splitlines())) == (2, 1)
        assert said in err


def die_after_round_4(folder):
    """As if the job had died after its checkpoint of that round."""
    for file in (folder / "checkpoints" / "round_000006").iterdir():
        file.unlink()


@pytest.fixture
def resume(tmp_path, capfd):
    def start(*argv):
        code = run_main(train.main, ["--run.output_dir", str(tmp_path), "--run.resume", *argv])
        return code, capfd.readouterr().err

    return start


def test_resume_is_bit_identical(run, resume, tmp_path):
    """The name is enough: all that is not given is as it was."""
    given = ("--tracking.enabled", "false", "--inner.lr", "1e-3", "--strategy.topk", "200")
    run("--run.name", "whole", *given)
    run("--run.name", "half", *given)
    settings = (tmp_path / "half" / "config.yaml").read_text()
    die_after_round_4(tmp_path / "half")
    code, err = resume("--run.name", "half")
    assert code == 0, err
    assert (tmp_path / "half" / "config.yaml").read_text() == settings
    whole, half = (json.loads((tmp_path / n / "summary.json").read_text()) for n in ("whole", "half"))
    for name in ("state_digests", "train_loss", "val_loss", "bytes_up", "tokens", "inner_steps", "rounds"):
        assert half[name] == whole[name], name
    assert [r["loss"] for r in lines_of(tmp_path / "half" / "rounds.jsonl")] == [
        r["loss"] for r in lines_of(tmp_path / "whole" / "rounds.jsonl")
    ]
    weights = [(tmp_path / n / "model" / "model.safetensors").read_bytes() for n in ("whole", "half")]
    assert weights[0] == weights[1]


def test_all_that_a_resume_changes_is_said_and_time_adds_up(run, resume, tmp_path, capfd):
    run("--run.name", "other", "--tracking.enabled", "false")
    die_after_round_4(tmp_path / "other")
    changes = ("--inner.weight_decay", "0", "--inner.betas", "[0.5, 0.6]", "--model.args.dropout", "0.5")
    code = run_main(train.main, ["--run.output_dir", str(tmp_path), "--run.resume", "--run.name", "other", *changes])
    out, err = capfd.readouterr()
    assert code == 0, err
    (said,) = [line for line in out.splitlines() if "goes on with other settings than before" in line]
    for name in ("inner.weight_decay", "inner.betas", "model.args.dropout"):
        assert f"{name} was" in said
    assert said.count(" was ") == 3
    after = json.loads((tmp_path / "other" / "summary.json").read_text())
    assert after["wall_s"] >= after["compute_s"]
    manifest = json.loads((tmp_path / "other" / "checkpoints" / "round_000006" / "manifest.json").read_text())
    assert 0 < manifest["totals"]["wall_s"] <= after["wall_s"]


def test_a_sweep_is_not_taken_for_a_run(run, resume, tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "config.yaml").write_text("space: diloco\nmodel: {name: byte_gpt}\n")
    code, err = resume("--run.name", "sweep")
    assert (code, len(err.splitlines())) == (1, 1)
    assert "is a sweep" in err
    code, _, err = run(str(tmp_path / "sweep"), job=evaluate)
    assert (code, len(err.splitlines())) == (1, 1)
    assert "is a sweep" in err


def test_a_resume_that_does_not_fit_leaves_the_settings_that_do(run, resume, tmp_path):
    run("--run.name", "kept", "--tracking.enabled", "false")
    settings = (tmp_path / "kept" / "config.yaml").read_text()
    die_after_round_4(tmp_path / "kept")
    code, err = resume("--run.name", "kept", "--model.args.width", "8", "--model.args.heads", "1")
    assert code == 1
    assert "another model?" in err
    assert (tmp_path / "kept" / "config.yaml").read_text() == settings
    code, err = resume("--run.name", "kept", "--inner.lr", "1e-4")
    assert code == 0, err
    assert "lr: 0.0001" in (tmp_path / "kept" / "config.yaml").read_text()


def test_a_run_of_another_program_is_not_resumed(resume, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.yaml").write_text("inner: {steps: 4}\n")
    code, err = resume("--run.name", "own")
    assert code == 1
    assert "is of a train function of your own" in err
    assert "Traceback" not in err


def test_damaged_settings_of_a_run_to_resume_are_named(resume, tmp_path):
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.yaml").write_text("model: {name: [\n")
    code, err = resume("--run.name", "torn")
    assert code == 2
    assert f"{tmp_path}/torn/config.yaml" in err
    assert "not valid YAML" in err


def test_a_checkpoint_of_another_model_or_not_whole_is_not_evaluated(run, tmp_path):
    run("--run.name", "wide", "--tracking.enabled", "false")
    place = str(tmp_path / "wide" / "checkpoints" / "round_000006")
    code, _, err = run(place, "--model.args.width", "8", job=evaluate)
    assert code == 1
    assert re.search(r"made by another model: strategy/anchor/\S+ is of shape \[256, 16\], this one \[256, 8\]", err)
    (tmp_path / "wide" / "checkpoints" / "round_000006" / "replica_0000.safetensors").unlink()
    code, _, err = run(place, job=evaluate)
    assert (code, err) == (1, "round_000006/replica_0000.safetensors is missing\n")
    (tmp_path / "wide" / "checkpoints" / "round_000006" / "manifest.json").unlink()
    code, _, err = run(place, job=evaluate)
    assert (code, err) == (1, "round_000006 has no manifest.json: it is not a whole checkpoint\n")


def test_an_older_run_is_moved_aside(run, tmp_path):
    run("--run.name", "twice", "--tracking.enabled", "false")
    before = (tmp_path / "twice" / "summary.json").read_text()
    code, out, _ = run("--run.name", "twice", "--tracking.enabled", "false")
    assert code == 0
    (aside,) = tmp_path.glob("twice.*")
    assert (aside / "summary.json").read_text() == before
    assert str(aside) in out.replace("\n", "")


def test_digits_with_batch_norm(run, tmp_path):
    argv = ("--model.name", "small_cnn", "--data.name", "digits", "--inner.lr", "0.01", "--inner.steps", "96")
    code, out, err = run("--run.name", "digits", *argv)
    assert code == 0, err
    summary = json.loads((tmp_path / "digits" / "summary.json").read_text())
    assert summary["buffer_bytes"] > 0
    assert summary["val_loss"] < summary["val_loss_start"]


BAD = {
    "unknown field": (["--strategy.topkk", "3"], 2, "strategy.topkk"),
    "wrong type": (["--inner.steps", "many"], 2, "inner.steps = 'many'"),
    "H of 0": (["--strategy.inner_steps", "0"], 2, "strategy.inner_steps = 0"),
    "topk above the chunk": (["--strategy.topk", "70000"], 2, "strategy.topk = 70000"),
    "unknown strategy": (["--strategy.name", "magic"], 2, "strategy.name = 'magic'"),
    "field of another strategy": (["--strategy.name", "diloco", "--strategy.topk", "3"], 2, "strategy.topk"),
    "no such data": (["--data.name", "files", "--data.path", "/nope"], 1, "'/nope'"),
    "empty data": (["--data.name", "files", "--data.path", "EMPTY"], 1, "empty"),
    "factory raises": (["--model.name", "tests.jobs.factories:boom"], 1, "no weights for you"),
    "loss is no scalar": (["--model.name", "tests.jobs.factories:vector_loss"], 1, "0-d"),
    "nothing to resume": (["--run.resume"], 1, "no whole checkpoint"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(case, run, tmp_path):
    (tmp_path / "empty.txt").touch()
    argv, code, said = BAD[case]
    argv = [str(tmp_path / "empty.txt") if word == "EMPTY" else word for word in argv]
    got, _, err = run("--tracking.enabled", "false", *argv)
    assert got == code, err
    (line,) = [line for line in err.splitlines() if said in line]
    assert "Traceback" not in err


def test_dry_run_says_what_the_run_then_sends(run, tmp_path):
    from jobs.dry_run import estimate
    from ray_lowcomm.config import load_config

    lines, _ = estimate(load_config([*SMALL, *TINY_GPT], train.JobConfig, {}))
    assert lines["strategy"] == "topk_diloco: 6 rounds in 24 inner steps, topk 10,923 of 65,536 (16.7%) a round"
    few = ("--strategy.topk", "1520")  # too few for so few rounds, which is remarked on
    lines, remarks = estimate(load_config([*SMALL, *TINY_GPT, *few], train.JobConfig, {}))
    assert "topk 1,520 of 65,536 (2.3%)" in lines["strategy"]
    code, out, _ = run("--dry-run", *few)
    assert code == 0
    assert remarks
    assert all(remark in out for remark in remarks)
    assert not (tmp_path / "default").exists()
    _, out, _ = run("--run.name", "real", "--tracking.enabled", "false", *few)
    assert all(remark in out for remark in remarks)
    summary = json.loads((tmp_path / "real" / "summary.json").read_text())
    said = re.search(r"about ([0-9.]+) KiB in all", lines["sent per round"])
    # how long coded indices become depends on where they lie
    assert float(said[1]) == pytest.approx(summary["bytes_up"] / 1024, rel=0.05)
