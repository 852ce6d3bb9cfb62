"""Every setting changes the run, or is refused, or is remarked on: none is without effect in silence.

`CASES` has an entry for every field of every section; a new field without one fails here.
"""

import dataclasses
import inspect
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from jobs.train import JobConfig
from ray_lowcomm import LowCommTrainer, effects, strategies
from ray_lowcomm.config import ConfigError, TrainConfig, load_config, to_yaml
from ray_lowcomm.config_sources import all_names
from ray_lowcomm.core.errors import DataError, SettingError
from ray_lowcomm.core.settings import Fault, FleetSettings, StrategySettings
from ray_lowcomm.data import load as load_data
from ray_lowcomm.default_loop import make_optimizer, schedule_of
from ray_lowcomm.engine.transport import Transport
from ray_lowcomm.training import trainer_of

from .engine.local_run import Setup


def load(*argv, environment=None, cls=TrainConfig, **options):
    return load_config(argv, cls, environment or {}, **options)


# ---- what a run is made of ------------------------------------------------------------------------------------------


def plan(config):
    """All that the driver and the replicas are told."""
    trainer = trainer_of(config, None)
    return trainer._spec("folder"), config.tracking


def optimizer(config):
    made = make_optimizer(nn.Linear(2, 2), config.inner)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in made.param_groups]
    return type(made), groups


def rates(config):
    return [schedule_of(config.inner)(step) for step in range(config.inner.steps)]


def loop(config):
    return trainer_of(config, None).train_loop


def strategy(config):
    return config.resolved().strategy


def samples(config):
    try:
        train, validation = (load_data(config.data, split) for split in ("train", "validation"))
    except Exception as error:  # another column, another file: it was looked for
        return type(error), str(error)
    first = {name: tensor.tolist() for name, tensor in train[0].items()}
    return len(train), len(validation), first, train.model_defaults


def said_of_data(config):
    try:
        return getattr(load_data(config.data, "train"), "remarks", ())
    except DataError as error:
        return (str(error),)


@dataclass(frozen=True)
class Case:
    """`other` value of a field that changes what `seen` gives, with `where` as the other settings."""

    other: str
    seen: object = plan
    where: tuple[str, ...] = ()


def one(name, value, *more):
    return ("--" + name, value, *more)


FILES = ("--data.name", "files", "--data.path", "{text}")
IMAGES = ("--data.name", "files", "--data.path", "{images}")
SGD = one("inner.optimizer", "sgd")
DESLOC = one("strategy.name", "desloc")
OUTER = (*DESLOC, "--strategy.outer_optimizer", "nesterov")
DROP = one("fleet.straggler", "drop", "--fleet.quorum", "1")
GPU = one("fleet.resources_per_replica.GPU", "1")

CASES = {
    "run.name": Case("other"),
    "run.output_dir": Case("elsewhere"),
    "run.seed": Case("1"),
    "run.resume": Case("true"),
    "run.eval_every": Case("3"),
    "run.log_every": Case("2"),
    "checkpoint.every": Case("3"),
    "checkpoint.keep": Case("3"),
    "model.name": Case("small_cnn", loop),
    "model.args": Case('{"width": 32}', loop),
    "model.buffers": Case("first"),
    "model.init_from": Case("weights.safetensors", loop),
    "data.name": Case("digits", samples),
    "data.path": Case("{other}", samples, FILES),
    "data.text_column": Case("title", samples, FILES),
    "data.image_column": Case("picture", samples, IMAGES),
    "data.label_column": Case("kind", samples, IMAGES),
    "data.config_name": Case("small", loop, one("data.name", "hf:name")),
    "data.split": Case("valid", samples, FILES),
    "data.sequence_length": Case("16", samples, FILES),
    "data.tokenizer": Case("some/tokenizer", samples, FILES),
    "data.validation_fraction": Case("0.5", samples, IMAGES),
    "data.eval_samples": Case("2", samples, FILES),
    "data.cache_dir": Case("cache", loop, FILES),
    "inner.steps": Case("40"),
    "inner.batch_size": Case("3", loop),
    "inner.accumulate": Case("2", loop),
    "inner.lr": Case("0.5", optimizer),
    "inner.optimizer": Case("sgd", optimizer),
    "inner.betas": Case("[0.8, 0.95]", optimizer),
    "inner.momentum": Case("0.5", optimizer, SGD),
    "inner.weight_decay": Case("0.5", optimizer),
    "inner.warmup_steps": Case("7", rates),
    "inner.schedule": Case("constant", rates),
    "inner.clip_norm": Case("0.5", loop),
    "inner.skip_nonfinite": Case("false"),
    "inner.state_on_sync": Case("reset"),
    "inner.autocast": Case("false", loop, GPU),
    "strategy.name": Case("diloco", strategy),
    "strategy.inner_steps": Case("5", strategy),
    "strategy.topk": Case("100", strategy),
    "strategy.chunk_size": Case("32", strategy),
    "strategy.outer_lr": Case("0.3", strategy),
    "strategy.outer_momentum": Case("0.2", strategy),
    "strategy.outer_optimizer": Case("sgd", strategy),
    "strategy.residual": Case("buffer", strategy),
    "strategy.residual_decay": Case("0.5", strategy),
    "strategy.value_bits": Case("4", strategy),
    "strategy.value_format": Case("e3m0", strategy, one("strategy.value_bits", "4")),
    "strategy.rounding": Case("stochastic", strategy),
    "strategy.variant": Case("paper", strategy, one("strategy.name", "dct_momentum")),
    "strategy.reduce": Case("replicas", strategy),
    "strategy.combine": Case("sharded", strategy),
    "strategy.param_period": Case("3", strategy, DESLOC),
    "strategy.exp_avg_period": Case("3", strategy, DESLOC),
    "strategy.exp_avg_sq_period": Case("3", strategy, DESLOC),
    "strategy.moment_period": Case("3", strategy, DESLOC),
    "strategy.codec": Case('{"params": {"topk": 8}}', strategy, DESLOC),
    "strategy.periods": Case("random", strategy, DESLOC),
    "strategy.overlap_steps": Case("2", strategy),
    "fleet.replicas": Case("3"),
    "fleet.address": Case("host:1"),
    "fleet.resources_per_replica": Case('{"CPU": 2}'),
    "fleet.cohorts": Case('[{"replicas": 1}, {"replicas": 1}]'),
    "fleet.transport": Case("local"),
    "fleet.collective": Case("nccl", plan, GPU),
    "fleet.threads_per_replica": Case("2"),
    "fleet.pace": Case("by_speed"),
    "fleet.quorum": Case("2", plan, (*DROP, "--fleet.replicas", "3")),
    "fleet.grace_s": Case("9", plan, DROP),
    "fleet.deadline_s": Case("9"),
    "fleet.hang_s": Case("9"),
    "fleet.start_s": Case("9"),
    "fleet.straggler": Case("drop", plan),
    "fleet.max_retries": Case("2"),
    "fleet.max_failures": Case("2"),
    "faults": Case('[{"do": "kill", "replica": 1, "round": 3}]'),
    "tracking.uri": Case("http://there"),
    "tracking.experiment": Case("mine"),
    "tracking.enabled": Case("false"),
}

PAIRED = {"fleet.straggler": one("fleet.quorum", "1")}

PLACES = {
    "as it is": (),
    "ddp": one("strategy.name", "ddp"),
    "local sgd": one("strategy.name", "local_sgd"),
    "local adam": one("strategy.name", "local_adam"),
    "desloc": DESLOC,
    "diloco": one("strategy.name", "diloco"),
    "one replica": one("fleet.replicas", "1"),
    "sgd": SGD,
    "sgd without momentum": (*SGD, "--inner.momentum", "0"),
    "adopt": one("inner.optimizer", "adopt"),
    "files": FILES,
    "images": IMAGES,
    "digits": one("data.name", "digits"),
    "hub": one("data.name", "hf:name"),
    "few steps": one("inner.steps", "6"),
    "one round": one("strategy.inner_steps", "800"),
    "no validation": one("run.eval_every", "0"),
    "no checkpoints": one("checkpoint.every", "0"),
    "no tracking": one("tracking.enabled", "false"),
    "local": one("fleet.transport", "local"),
    "gpu": GPU,
    "quorum": DROP,
    "elastic": one("fleet.replicas", "[2, 4]"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Small files to train on, by the name in braces."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = tmp_path_factory.mktemp("data")
    found = {}
    for name in ("text", "other"):
        folder = root / name
        folder.mkdir()
        for split in ("train", "valid", "test"):
            rows = [f"{name} {split} {i} " * 40 for i in range(6)]
            titles = [f"title {split} {i} " * 40 for i in range(6)]
            pq.write_table(pa.table({"text": rows, "title": titles}), folder / f"{split}.parquet")
        found[name] = str(folder)
    pixels = [[[(i * 7 + x) % 256 for x in range(4)] for _ in range(4)] for i in range(60)]
    dark = [[[(i * 3 + x) % 9 + 1 for x in range(4)] for _ in range(4)] for i in range(60)]
    table = {"image": pixels, "label": [i % 3 for i in range(60)], "picture": dark, "kind": [i % 5 for i in range(60)]}
    found["images"] = str(root / "images.parquet")
    pq.write_table(pa.table(table), found["images"])
    return found


@pytest.fixture
def filled(places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def fill(*argv):
        for name, path in places.items():
            argv = [word.replace(f"{{{name}}}", path) for word in argv]
        return list(argv)

    return fill


def test_every_field_has_a_case():
    assert set(CASES) == all_names(TrainConfig) | {"faults"}


@pytest.mark.parametrize("name", CASES)
def test_another_value_changes_the_run(name, filled):
    case = CASES[name]
    more = PAIRED.get(name, ())  # of two fields that go together
    before, after = load(*filled(*case.where)), load(*filled(*case.where, *more, "--" + name, case.other))
    assert effects.value_of(before, name) != effects.value_of(after, name)
    assert case.seen(before) != case.seen(after)


DATA_PLACES = ("as it is", "files", "images", "digits")  # the others do not matter to data; the hub needs a network
ANYWHERE = [
    (name, place)
    for name, case in CASES.items()
    for place in (DATA_PLACES if case.seen is samples else PLACES)
    if case.seen is not plan
]


@pytest.mark.parametrize(("name", "place"), ANYWHERE)
def test_in_any_place_it_changes_the_run_or_is_refused_or_remarked_on(name, place, filled):
    """Of what can be observed to the end: data, optimizer, schedule, strategy."""
    case, where = CASES[name], filled(*PLACES[place])
    try:
        before, after = load(*where), load(*where, *filled("--" + name, case.other))
    except ConfigError:
        return
    if before == after:
        return  # the other value of this case is the one of this place
    if name in " ".join(after.remarks()):
        return
    if case.seen is samples and name in " ".join(said_of_data(after)):
        return
    assert case.seen(before) != case.seen(after)


# ---- where they have none -------------------------------------------------------------------------------------------

IDLE = {
    "path of another source": (one("data.path", "x"), "data.path"),
    "path on the hub": (one("data.path", "x", "--data.name", "hf:name"), "data.path"),
    "text column": (one("data.text_column", "x"), "data.text_column"),
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
    "first moments": (
        (*DESLOC, "--strategy.exp_avg_period", "4", *SGD, "--inner.momentum", "0"),
        "strategy.exp_avg_period",
    ),
    "second moments": ((*DESLOC, "--strategy.exp_avg_sq_period", "4", *SGD), "strategy.exp_avg_sq_period"),
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
    "weights of a resumed run": (one("model.init_from", "x", "--run.resume", "true"), "model.init_from"),
    "store": (one("tracking.uri", "http://x", "--tracking.enabled", "false"), "tracking.uri"),
    "experiment": (one("tracking.experiment", "x", "--tracking.enabled", "false"), "tracking.experiment"),
    "fault beyond the end": (one("faults", '[{"do": "kill", "replica": 1, "round": 51}]'), r"faults[0].round"),
    "seconds of a kill": (
        one("faults", '[{"do": "kill", "replica": 1, "round": 1, "seconds": 3}]'),
        r"faults[0].seconds",
    ),
}


@pytest.mark.parametrize("case", IDLE)
def test_what_has_no_effect_is_refused_with_what_to_do(case):
    argv, field = IDLE[case]
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{field} = ")
    assert "has no effect with " in line or "beyond the end" in line
    assert "leave it out" in line or "must be a round that there is" in line


def test_every_rule_has_a_case():
    refused = {field for _, field in IDLE.values()}
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


def test_columns_that_are_named_decide_how_data_is_read(filled, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = {"text": ["some text"] * 8, "pixels": [[[1, 2], [3, 4]]] * 8, "label": [0, 1] * 4}
    pq.write_table(pa.table(table), tmp_path / "both.parquet")
    where = ("--data.name", "files", "--data.path", str(tmp_path / "both.parquet"))
    assert "image" in load_data(load(*where, "--data.image_column", "pixels").data, "train")[0]
    assert "input_ids" in load_data(load(*where).data, "train")[0]
    (said,) = load_data(
        load(*where, "--data.sequence_length", "4", "--data.image_column", "pixels").data, "train"
    ).remarks
    assert said.startswith("data.sequence_length = 4: has no effect, data.path = ")


def test_a_split_of_files_is_taken_or_refused(filled):
    for split, holds in (("train", "text train"), ("valid", "text valid"), ("test", "text test")):
        data = load_data(load(*filled(*FILES), "--data.split", split).data, "train")
        assert bytes(data[0]["input_ids"].tolist()).decode().startswith(holds)
    assert (
        bytes(load_data(load(*filled(*FILES), "--data.split", "valid").data, "validation")[0]["input_ids"]).decode()[:9]
        == "text test"
    )
    with pytest.raises(
        DataError, match=r"has no split 'dev' \(data\.split\): by their names its files are test, train"
    ):
        load_data(load(*filled(*FILES), "--data.split", "dev").data, "train")


def test_a_model_without_buffers_has_no_use_for_a_policy(tmp_path):
    outcome = Setup(str(tmp_path), {"name": "diloco", "inner_steps": 8}, buffers="first").go()
    assert any("has no effect, the model has no buffers" in text for text in outcome.said("notice"))
    outcome = Setup(str(tmp_path / "b"), {"name": "diloco", "inner_steps": 8}).go()
    assert not any("buffers" in text for text in outcome.said("notice"))


# ---- what was given -------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_given_anywhere_is_given(file):
    with pytest.raises(ConfigError, match=r"data\.path = 'x': has no effect with data\.name"):
        load("--config", file("data: {path: x}\n"))
    with pytest.raises(ConfigError, match=r"data\.path = 'x': has no effect with data\.name"):
        load(environment={"RAY_LOWCOMM_DATA__PATH": "x"})
    with pytest.raises(ConfigError, match=r"inner\.betas"):
        load("--inner.betas", "[0.9, 0.99]", *SGD)
    load("--config", file("inner: {betas: [0.9, 0.99], optimizer: sgd}\n"))  # a file may spell out defaults
    assert load("--config", file("data: {path: x}\n"), "--data.name", "files").data.path == "x"


def test_the_file_of_a_run_is_accepted_and_what_is_idle_then_is_said(file):
    whole = file(to_yaml(load("--inner.betas", "[0.5, 0.6]", "--tracking.uri", "http://x")))
    assert load("--config", whole).remarks() == ()
    changed = load("--config", whole, *SGD, "--tracking.enabled", "false")
    said = " ".join(changed.remarks())
    assert "inner.betas = (0.5, 0.6): has no effect with inner.optimizer = 'sgd'" in said
    assert "tracking.uri" in said
    with pytest.raises(ConfigError, match=r"inner\.betas"):
        load("--config", whole, *SGD, "--inner.betas", "[0.5, 0.6]")


def test_settings_of_a_resumed_run_are_not_given(file):
    saved = file("data: {path: x}\n")  # of an older version, which had not all fields and refused less
    config = load("--run.resume", base=lambda given: saved)
    assert "data.path = 'x': has no effect" in config.remarks()[0]


def test_what_a_run_writes_can_be_begun_again(file):
    for argv in (one("fleet.replicas", "1"), one("inner.steps", "6"), one("fleet.transport", "local"), IMAGES[:2]):
        config = load(*argv)
        assert load("--config", file(to_yaml(config))) == config


def test_what_is_given_is_no_part_of_a_configuration():
    assert load("--inner.lr", "3e-3") == load()
    assert load("--inner.lr", "1e-3").model_copy().remarks() == ()


def test_a_name_that_stands_twice_in_a_file_is_refused(file):
    with pytest.raises(ConfigError) as caught:
        load("--config", file("inner: {lr: 1}\nrun: {seed: 1}\ninner:\n  steps: 4\n"))
    assert "in line 3, column 1: 'inner' is given twice, first in line 1" in str(caught.value)
    with pytest.raises(ConfigError, match=r"'lr' is given twice, first in line 2"):
        load("--config", file("inner:\n  lr: 1\n  steps: 4\n  lr: 2\n"))


def test_one_job_leaves_settings_of_others_alone():
    assert load("--data.path", "x", drawn=None).data.path == "x"
    assert load("--inner.betas", "[0.5, 0.5]", *SGD, drawn=lambda config: ["inner.optimizer"])
    with pytest.raises(ConfigError, match=r"data\.path"):
        load("--data.path", "x", cls=JobConfig, drawn=lambda config: ["inner.optimizer"])


# ---- a program of one's own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"fleet": {"transport": "local", "start_s": 300.0}},
            r"^fleet\.start_s = 300\.0: has no effect with fleet\.tr",
        ),
        ({"fleet": FleetSettings(transport="local", start_s=9)}, r"^fleet\.start_s = 9.0: has no effect"),
        (
            {"fleet": {"replicas": 1}, "strategy": {"combine": "gather"}},
            r"^strategy\.combine = 'gather': has no effect",
        ),
        ({"fleet": {"replicas": 1}, "strategy": StrategySettings(combine="sharded")}, r"^strategy\.combine"),
        ({"fleet": {"replicas": 1}, "buffers": "first"}, r"^buffers = 'first': has no effect with fleet\.replicas = 1"),
        ({"strategy": {"name": "ddp"}, "state_on_sync": "reset"}, r"^state_on_sync = 'reset': has no effect"),
        ({"tracking": {"enabled": False, "uri": "http://x"}}, r"^tracking\.uri = 'http://x': has no effect"),
        ({"checkpoint": {"every": 0, "keep": 3}}, r"^checkpoint\.keep"),
        ({"faults": (Fault("kill", 0, 99),)}, r"^faults\[0\]\.round = 99: is beyond the end"),
        ({"faults": (Fault("kill", 2, 1),)}, r"^faults\[0\]\.replica = 2: must be less than fleet\.replicas = 2"),
    ],
)
def test_a_trainer_refuses_what_has_no_effect(options, said):
    with pytest.raises(SettingError, match=said):
        LowCommTrainer(lambda context: None, 32, **options)


def test_a_trainer_takes_settings_that_are_resolved():
    for name in strategies.ALGORITHMS:
        resolved = strategies.resolve(StrategySettings(name=name))
        LowCommTrainer(lambda context: None, 320, fleet={"replicas": 1}, strategy=resolved)


def test_a_trainer_says_what_does_nothing_in_its_own_words(tmp_path, capsys):
    def train(context):
        model = nn.Linear(2, 1)
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        while not replica.finished:
            loss = model(torch.ones(1, 2)).mean()
            loss.backward()
            replica.step(loss)

    fleet, run = {"transport": "local", "replicas": 1}, {"output_dir": str(tmp_path)}
    LowCommTrainer(train, 4, fleet=fleet, run=run, tracking={"enabled": False}, strategy={"name": "diloco"}).fit()
    said = "strategy.inner_steps = 32: is more than steps = 4: the run is one round"
    assert said in " ".join(capsys.readouterr().out.split())


# ---- the fleet of one process ---------------------------------------------------------------------------------------


class Watched(FleetSettings):
    """Remembers which fields are read after it was made."""

    def __getattribute__(self, name):
        frame = inspect.currentframe().f_back
        if "/ray_lowcomm/core/settings.py" not in frame.f_code.co_filename or name == "replicas":
            READ.add(name)
        return object.__getattribute__(self, name)


READ: set[str] = set()


def test_a_fleet_in_one_process_reads_all_that_is_not_refused_there(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.unit.engine.local_run.FleetSettings", Watched)
    READ.clear()
    faults = (Fault("kill", 0, 1, "inner"), Fault("kill", 1, 2, "exchange"), Fault("hang", 2, 3, "inner", 900.0))
    setup = Setup(str(tmp_path), {"name": "diloco", "inner_steps": 4}, faults=faults, fleet={"pace": "by_speed"})
    setup.go()
    dropping = {"quorum": 2, "straggler": "drop", "hang_s": 50}
    Setup(str(tmp_path / "b"), {"name": "diloco", "inner_steps": 4}, faults=faults[2:], fleet=dropping).go()
    idle = {name for rule in effects.EFFECTS for name in rule.fields if rule.on == ("fleet.transport",)}
    unread = {f"fleet.{field.name}" for field in dataclasses.fields(FleetSettings)} - {f"fleet.{n}" for n in READ}
    assert unread - {"fleet.transport"} <= idle
    assert Transport  # what reads them
