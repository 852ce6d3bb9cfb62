"""Where settings have no effect: refused with what to do, or remarked on where it depends on the run."""

import dataclasses
import json

import pytest

from jobs import tune
from jobs._main import run_main
from ray_lowcomm import effects
from ray_lowcomm.config import ConfigError, TrainConfig
from ray_lowcomm.config_sources import all_names
from ray_lowcomm.core.settings import CohortSettings, Fault, TrackCodec
from ray_lowcomm.tuning.settings import SweepConfig

from .effects_help import (
    DESLOC,
    DROP,
    SGD,
    load,
    one,
    plan,
    strategy,
)

IDLE = {
    "path of another source": (one("data.path", "x"), "data.path"),
    "path on the hub": (one("data.path", "x", "--data.name", "hf:name"), "data.path"),
    "text column": (one("data.text_column", "x"), "data.text_column"),
    "tokens column": (one("data.tokens_column", "x"), "data.tokens_column"),
    "image column": (one("data.image_column", "x", "--data.name", "digits"), "data.image_column"),
    "label column": (one("data.label_column", "x"), "data.label_column"),
    "configuration of files": (one("data.config_name", "x", "--data.name", "files"), "data.config_name"),
    "split": (one("data.split", "valid"), "data.split"),
    "length of images": (one("data.sequence_length", "9", "--data.name", "digits"), "data.sequence_length"),
    "tokenizer": (one("data.tokenizer", "x"), "data.tokenizer"),
    "cache": (one("data.cache_dir", "x"), "data.cache_dir"),
    "betas": (one("inner.betas", "[0.5, 0.5]", *SGD), "inner.betas"),
    "momentum": (one("inner.momentum", "0.5"), "inner.momentum"),
    "momentum of adopt": (one("inner.momentum", "0.5", "--inner.optimizer", "adopt"), "inner.momentum"),
    "no state": (one("inner.state_on_sync", "reset", *SGD, "--inner.momentum", "0"), "inner.state_on_sync"),
    "state of ddp": (one("inner.state_on_sync", "reset", "--strategy.name", "ddp"), "inner.state_on_sync"),
    "second moment of sgd": ((*DESLOC, *SGD, "--strategy.exp_avg_sq_period", "9"), "strategy.exp_avg_sq_period"),
    "no momentum": (
        (*DESLOC, *SGD, "--inner.momentum", "0", "--strategy.exp_avg_period", "9"),
        "strategy.exp_avg_period",
    ),
    "keep": (one("checkpoint.keep", "5", "--checkpoint.every", "0"), "checkpoint.keep"),
    "combine": (one("strategy.combine", "sharded", "--fleet.replicas", "1"), "strategy.combine"),
    "reduce": (one("strategy.reduce", "replicas", "--fleet.replicas", "1"), "strategy.reduce"),
    "buffers": (one("model.buffers", "first", "--fleet.replicas", "1"), "model.buffers"),
    "deadline": (one("fleet.deadline_s", "9", "--fleet.replicas", "1"), "fleet.deadline_s"),
    "hang": (one("fleet.hang_s", "9", "--fleet.replicas", "1"), "fleet.hang_s"),
    "pace of one": (one("fleet.pace", "by_speed", "--fleet.replicas", "1"), "fleet.pace"),
    "pace of ddp": (one("fleet.pace", "by_speed", "--strategy.name", "ddp"), "fleet.pace"),
    "pace of H = 1": (one("fleet.pace", "by_speed", "--strategy.inner_steps", "1"), "fleet.pace"),
    "quorum of all": (one("fleet.quorum", "2", "--fleet.straggler", "drop"), "fleet.quorum"),
    "grace": (one("fleet.grace_s", "9"), "fleet.grace_s"),
    "straggler of one": (one("fleet.straggler", "wait", "--fleet.replicas", "1"), "fleet.straggler"),
    "kept for nobody": (one("fleet.keep_rounds", "9", "--fleet.straggler", "wait"), "fleet.keep_rounds"),
    "kept of ddp": (one("fleet.keep_rounds", "9", "--strategy.name", "ddp"), "fleet.keep_rounds"),
    "moments of ddp": (one("fleet.joiner_moments", "zero", "--strategy.name", "ddp"), "fleet.joiner_moments"),
    "moments that are shared": (
        one("fleet.joiner_moments", "zero", "--strategy.name", "local_adam"),
        "fleet.joiner_moments",
    ),
    "local address": (one("fleet.address", "x", "--fleet.transport", "local"), "fleet.address"),
    "local labels": (
        one("fleet.cohorts", '[{"replicas": 2, "label_selector": {"a": "b"}}]', "--fleet.transport", "local"),
        "fleet.cohorts",
    ),
    "local collective": (one("fleet.collective", "nccl", "--fleet.transport", "local"), "fleet.collective"),
    "local start": (one("fleet.start_s", "9", "--fleet.transport", "local"), "fleet.start_s"),
    "local resources": (
        one("fleet.resources_per_replica.GPU", "1", "--fleet.transport", "local"),
        "fleet.resources_per_replica",
    ),
    "spread of one process": (one("fleet.replica_spread", "pack"), "fleet.replica_spread"),
    "weights of a resumed run": (one("model.init_from", "x", "--run.resume", "true"), "model.init_from"),
    "ddp of one shard": (one("model.sharding", "ddp"), "model.sharding"),
    "store": (one("tracking.uri", "http://x", "--tracking.enabled", "false"), "tracking.uri"),
    "experiment": (one("tracking.experiment", "x", "--tracking.enabled", "false"), "tracking.experiment"),
    "fault beyond the end": (one("faults", '[{"do": "kill", "replica": 1, "round": 51}]'), r"faults[0].round"),
    "seconds of a kill": (
        one("faults", '[{"do": "kill", "replica": 1, "round": 1, "seconds": 3}]'),
        r"faults[0].seconds",
    ),
    "factor of a hang": (one("faults", '[{"do": "hang", "replica": 1, "round": 1, "factor": 3}]'), r"faults[0].factor"),
    "bits of a nan": (one("faults", '[{"do": "nan", "replica": 1, "round": 1, "bits": 3}]'), r"faults[0].bits"),
    "shard that leaves": (
        one("faults", '[{"do": "leave", "replica": 1, "round": 1, "shard": 1}]', "--fleet.shards_per_replica", "2"),
        r"faults[0].shard",
    ),
    "whose hang": (one("faults", '[{"do": "hang", "replica": 1, "round": 1, "whom": "node"}]'), r"faults[0].whom"),
}


NO_JUDGE = one("scheduler", "none")
IDLE_IN_A_SWEEP = {
    "lines": (one("run.log_every", "2"), "run.log_every"),
    "orphan": (one("fleet.orphan_s", "9"), "fleet.orphan_s"),
    "grace": (one("grace", "9", *NO_JUDGE), "grace"),
    "clock": (one("time-attr", "outer_round", *NO_JUDGE), "time_attr"),
    "two objectives": (one("grace", "9", "--objective", "val_loss,bytes_up"), "grace"),
    "halving": (one("reduction_factor", "3", "--scheduler", "pbt"), "reduction_factor"),
    "no budget": (one("budget.step_s", "1"), "budget.step_s"),
}


@pytest.mark.parametrize("case", IDLE_IN_A_SWEEP)
def test_what_has_no_effect_in_a_sweep_is_refused(case, tmp_path, capsys):
    argv, field = IDLE_IN_A_SWEEP[case]
    common = ("--space", "diloco", "--run.output_dir", str(tmp_path))
    assert run_main(tune.main, [*common, *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{field} = ")
    assert "has no effect with " in line


SWEEP_CASES = {
    "space": "desloc",
    "num_samples": "3",
    "search": "grid",
    "scheduler": "none",
    "objective": "bytes_up",
    "target_loss": ("2.0", "--objective", "bytes_to_loss"),
    "time_attr": "outer_round",
    "grace": "9",
    "reduction_factor": "3",
    "max_concurrent": "1",
    "time_budget": "60",
    "resume": "true",
    "register": "mine",
    "budget.link_mbit_s": ("9", "--space", "budget", "--budget.step_s", "1"),
    "budget.latency_ms": ("9", "--space", "budget", "--budget.step_s", "1"),
    "budget.step_s": ("1", "--space", "budget"),
    "budget.utilisation": ("0.5", "--space", "budget", "--budget.step_s", "1"),
}


@pytest.mark.parametrize("name", SWEEP_CASES)
def test_a_field_of_a_sweep_is_taken_where_it_matters(name):
    given = SWEEP_CASES[name]
    argv = given if isinstance(given, tuple) else (given,)
    config = load("--space", "diloco", "--" + name, *argv, cls=SweepConfig)
    assert effects.value_of(config, name) != effects.value_of(SweepConfig(), name)


def test_every_field_of_a_sweep_has_a_case():
    own = set(SweepConfig.model_fields) - set(TrainConfig.model_fields) - {"budget"}
    assert set(SWEEP_CASES) == own | {name for name in all_names(SweepConfig) if name.startswith("budget.")}


# fields of the entries of lists and tables: another value, and what must go with it
CODEC = {
    "topk": {"topk": 9},
    "transform": {"topk": 8, "transform": "dct"},
    "chunk_size": {"topk": 8, "chunk_size": 32},
    "value_bits": {"topk": 8, "value_bits": 4},
    "value_format": {"topk": 8, "value_bits": 4, "value_format": "e3m0"},
    "rounding": {"topk": 8, "rounding": "stochastic"},
    "residual": {"topk": 8, "residual": "buffer"},
    "residual_decay": {"topk": 8, "residual_decay": 0.5},
    "reduce": {"topk": 8, "reduce": "senders"},
}
FAULT = {
    "do": {"do": "nan"},
    "replica": {"replica": 0},
    "round": {"round": 2},
    "phase": {"phase": "voted"},
    "seconds": {"do": "hang", "seconds": 3.0},
    "whom": {"do": "kill", "whom": "node"},
    "factor": {"do": "slow", "factor": 3.0},
    "rounds": {"do": "slow", "rounds": 3},
    "bits": {"do": "corrupt", "bits": 3},
    "shard": {"shard": 1},
}


def test_every_field_of_an_entry_changes_the_run_or_is_refused():
    assert set(CODEC) == {field.name for field in dataclasses.fields(TrackCodec)}
    for name, fields in CODEC.items():
        less = {key: value for key, value in fields.items() if key != name}
        codecs = [
            load(*DESLOC, "--strategy.codec", json.dumps({"params": one})) for one in (fields, less or {"topk": 8})
        ]
        assert strategy(codecs[0]) != strategy(codecs[1]), name
        if name not in ("topk", "value_bits"):
            with pytest.raises(ConfigError, match=r"^strategy\.codec"):
                load(*DESLOC, "--strategy.codec", json.dumps({"params": {name: fields[name]}}))
    assert set(FAULT) == {field.name for field in dataclasses.fields(Fault)}
    usual = {"do": "hang", "replica": 1, "round": 1}
    for name, fields in FAULT.items():
        shards = ("--fleet.shards_per_replica", "2") if name == "shard" else ()
        changed, before = (load(*shards, "--faults", json.dumps([usual | more])) for more in (fields, {}))
        assert plan(changed) != plan(before), name
    assert {"replicas", "label_selector"} == {field.name for field in dataclasses.fields(CohortSettings)}


@pytest.mark.parametrize("case", IDLE)
def test_what_has_no_effect_is_refused_with_what_to_do(case):
    argv, field = IDLE[case]
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{field} = ")
    assert "has no effect with " in line or "beyond the end" in line
    assert line.count(f"{field} = ") == 1
    assert "leave it out" in line or "must be a round that there is" in line


def test_every_rule_has_a_case():
    refused = {field for _, field in (*IDLE.values(), *IDLE_IN_A_SWEEP.values())}
    assert {name for rule in effects.EFFECTS for name in rule.fields} - {"inner.buffers"} <= refused


@pytest.mark.parametrize(
    "argv",
    [
        one("fleet.grace_s", "9", *DROP),
        one("fleet.grace_s", "9", "--fleet.replicas", "[2, 3]"),
        one("faults", '[{"do": "kill", "replica": 1, "round": 50}]'),
        one("faults", '[{"do": "hang", "replica": 1, "round": 1, "seconds": 3}]'),
        one("faults", '[{"do": "kill", "replica": 1, "round": 800}]', "--strategy.name", "ddp"),
        one("fleet.pace", "by_speed", *DESLOC, "--strategy.param_period", "4", "--inner.optimizer", "sgd"),
        one("strategy.combine", "sharded", "--fleet.replicas", "[1, 2]"),
        one("inner.state_on_sync", "reset", "--strategy.name", "local_sgd"),
    ],
)
def test_what_has_an_effect_is_taken(argv):
    load(*argv)


REMARKED = {
    "warm-up": (one("inner.steps", "16"), "inner.warmup_steps = 20: does not end within inner.steps = 16"),
    "its rate": (one("inner.steps", "16"), "reaches 80% of inner.lr, and inner.schedule has no effect"),
    "H": (one("strategy.inner_steps", "900"), "strategy.inner_steps = 900: is more than inner.steps = 800"),
    "period": ((*DESLOC, "--strategy.param_period", "900"), "strategy.param_period = 900: is more than"),
    "moments": ((*DESLOC, "--strategy.exp_avg_sq_period", "900"), "strategy.exp_avg_sq_period = 900: is more than"),
    "overlap": (
        one("strategy.inner_steps", "800", "--strategy.overlap_steps", "2"),
        "overlap_steps = 2: has no effect",
    ),
    "eval samples": (one("data.eval_samples", "9", "--run.eval_every", "0"), "eval_samples = 9: has no effect in this"),
    "autocast": (one("inner.autocast", "true"), "inner.autocast = True: has no effect: replicas run on CPUs"),
    "validations": (one("run.eval_every", "51"), "run.eval_every = 51: is more than the rounds of the run"),
    "lines": (one("run.log_every", "51"), "run.log_every = 51: is more than the rounds of the run"),
    "checkpoints": (one("checkpoint.every", "51"), "checkpoint.every = 51: is more than the rounds of the run"),
}


@pytest.mark.parametrize("case", REMARKED)
def test_what_does_nothing_in_this_run_is_remarked_on(case):
    argv, said = REMARKED[case]
    assert [line for line in load(*argv).remarks() if said in line]


def test_every_remark_has_a_case():
    remarked = " ".join(said for _, said in REMARKED.values())
    assert [rule.field for rule in effects.REMARKS if rule.field.split(".")[1] not in remarked] == [
        "strategy.exp_avg_period"
    ]


def test_a_run_as_it_comes_is_not_remarked_on():
    assert load().remarks() == ()
    assert TrainConfig().remarks() == ()
