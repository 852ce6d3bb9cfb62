"""Every setting changes the run, or is refused, or is remarked on: none is without effect in silence.

`CASES` has an entry for every field of every section; a new field without one fails here.
"""

from dataclasses import dataclass

import pytest

from ray_lowcomm import effects
from ray_lowcomm.config import ConfigError, TrainConfig
from ray_lowcomm.config_sources import all_names
from ray_lowcomm.core.errors import DataError
from ray_lowcomm.data import load as load_data

from .effects_help import (
    DESLOC,
    DROP,
    FILES,
    GPU,
    IMAGES,
    SGD,
    load,
    loop,
    one,
    optimizer,
    plan,
    rates,
    said_of_data,
    samples,
    strategy,
)
from .engine.local_run import Setup


@dataclass(frozen=True)
class Case:
    """`other` value of a field that changes what `seen` gives, with `where` as the other settings."""

    other: str
    seen: object = plan
    where: tuple[str, ...] = ()


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
    "model.sharding": Case("fsdp2", loop),
    "model.activation_checkpointing": Case("true", loop),
    "model.compile": Case("true", loop),
    "data.name": Case("digits", samples),
    "data.path": Case("{other}", samples, FILES),
    "data.text_column": Case("title", samples, FILES),
    "data.tokens_column": Case("ids", samples, FILES),
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
    "strategy.fragments": Case("2", strategy),
    "strategy.fragment_order": Case("sequential", strategy, one("strategy.fragments", "2")),
    "strategy.mix": Case("0.25", strategy, (*one("strategy.name", "diloco"), *one("strategy.overlap_steps", "2"))),
    "fleet.replicas": Case("3"),
    "fleet.address": Case("host:1"),
    "fleet.resources_per_replica": Case('{"CPU": 2}'),
    "fleet.shards_per_replica": Case("2"),
    "fleet.replica_spread": Case("pack", plan, one("fleet.shards_per_replica", "2")),
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
    "fleet.keep_rounds": Case("9"),
    "fleet.joiner_moments": Case("zero"),
    "fleet.max_retries": Case("2"),
    "fleet.max_failures": Case("2"),
    "fleet.orphan_s": Case("9"),
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
