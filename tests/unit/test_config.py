import dataclasses
from dataclasses import dataclass, field, replace

import pytest
from pydantic import Field

from ray_lowcomm.config import ConfigError, TrainConfig, flatten, load_config, to_yaml
from ray_lowcomm.config_help import MEANINGS, describe
from ray_lowcomm.config_sources import members, type_at
from ray_lowcomm.core.settings import CohortSettings, Fault, StrategySettings


def load(*argv, environment=None, cls=TrainConfig, **more):
    return load_config(argv, cls, environment or {}, **more)


def problems(*argv, environment=None):
    with pytest.raises(ConfigError) as caught:
        load(*argv, environment=environment)
    return str(caught.value).splitlines()


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["--strategy.topk", "32"], "strategy.topk", 32),
        (["--strategy.topk=32"], "strategy.topk", 32),
        (["--strategy.inner-steps", "8"], "strategy.inner_steps", 8),
        (["--inner.lr", "1e-4"], "inner.lr", 1e-4),
        (["--inner.clip_norm", "null"], "inner.clip_norm", None),
        (["--inner.betas", "[0.8, 0.9]"], "inner.betas", (0.8, 0.9)),
        (["--run.resume"], "run.resume", True),
        (["--run.resume", "--run.seed", "3"], "run.resume", True),
        (["--run.resume", "false"], "run.resume", False),
        (["--run.resume", "auto"], "run.resume", "auto"),
        (["--run.name", "7"], "run.name", "7"),
        (["--data.path=--odd", "--data.name", "files"], "data.path", "--odd"),
        (["--model.args.width", "128", "--model.args.bias", "False"], "model.args", {"width": 128, "bias": False}),
        (["--model.args", '{"width": 128}'], "model.args", {"width": 128}),
        (["--model.args.my-key", "text"], "model.args", {"my-key": "text"}),
        (["--model.args.inner.depth", "2"], "model.args", {"inner": {"depth": 2}}),
        (["--fleet.replicas", "[2, 8]"], "fleet.replicas", (2, 8)),
        (["--fleet.replicas", "[3, 3]"], "fleet.replicas", 3),
        (["--fleet.resources_per_replica.GPU", "1"], "fleet.resources_per_replica", {"CPU": 1.0, "GPU": 1.0}),
        (
            ["--fleet.cohorts", '[{"replicas": 2, "label_selector": {"region": "eu"}}]'],
            "fleet.cohorts",
            (CohortSettings(2, {"region": "eu"}),),
        ),
    ],
)
def test_command_line(argv, path, value):
    section, name = path.split(".")
    assert getattr(getattr(load(*argv), section), name) == value


def test_faults_are_a_list_of_entries():
    config = load("--faults", '[{"do": "kill", "replica": 1, "round": 3}]')
    assert config.faults == [Fault("kill", 1, 3)]


def test_later_sources_win_and_dictionaries_merge(file):
    path = file("strategy: {topk: 8, chunk_size: 32}\nmodel: {args: {width: 64, depth: 2}}\ninner: {lr: 1e-3}\nrun:\n")
    environment = {"RAY_LOWCOMM_STRATEGY__TOPK": "16", "RAY_LOWCOMM_model__ARGS__Depth": "3", "RAY_LOWCOMM_PORT": "80"}
    config = load("--config", path, environment=environment)
    assert (config.strategy.topk, config.strategy.chunk_size, config.inner.lr) == (16, 32, 1e-3)
    assert config.model.args == {"width": 64, "depth": 2, "Depth": 3}
    assert load("--strategy.topk", "24", "--config", path, environment=environment).strategy.topk == 24


def test_environment_takes_json():
    config = load(environment={"RAY_LOWCOMM_MODEL__ARGS": '{"width": 8}', "RAY_LOWCOMM_RUN__RESUME": "true"})
    assert config.model.args == {"width": 8}
    assert config.run.resume


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--strategy.topkk", "64"], "strategy.topkk = '64': no such field; nearest: strategy.topk"),
        (["--steps", "3"], "steps = 3: no such field; nearest: inner.steps"),
        (["--strateggy.topk", "3"], "strateggy = {'topk': 3}: no such field; nearest: strategy"),
        (["--strategy.topk", "many"], "strategy.topk = 'many': must be a whole number or null"),
        (
            ["--model.args", "{layers: 2}"],
            """model.args = '{layers: 2}': must be names with values, in a shell as JSON: '{"name": 1}'""",
        ),
        (["--strategy.topk", "0"], "strategy.topk = 0: must be greater than 0"),
        (["--strategy.inner_steps", "0"], "strategy.inner_steps = 0: must be greater than 0"),
        (["--inner.lr", "nan"], "inner.lr = nan: must be greater than 0"),
        (["--inner.optimizer", "lion"], "inner.optimizer = 'lion': must be adamw, sgd or adopt"),
        (["--inner.betas", "[0.9]"], "inner.betas[1]: is missing; must be a number"),
        (["--run.resume", "perhaps"], "run.resume = 'perhaps': must be true, false or auto"),
        (["--checkpoint.every.x", "1"], "checkpoint.every = {'x': 1}: must be a whole number"),
        (["--faults", '[{"do": "kill", "replica": 0}]'], "faults[0].round: is missing; must be a whole number"),
        (["--fleet.quorum", "9"], "fleet.quorum = 9: must be at most fleet.replicas = 2"),
        (["--fleet.replicas", "many"], "fleet.replicas = 'many': must be a whole number or a list of 2"),
        (["--fleet.replicas", "[1, 2, 3]"], "fleet.replicas = [1, 2, 3]: must be a whole number or a list of 2"),
        (["--fleet.replicas", "[1, x]"], "fleet.replicas = '[1, x]': must be a whole number or a list of 2"),
        (
            ["--fleet.replicas", "[3, 2]"],
            "fleet.replicas = [3, 2]: must be a whole number of at least 1, or [min, max] of such",
        ),
        (["--run.name"], "--run.name = '': needs a value after it (--help run says more)"),
        (["topk"], "command line = 'topk': must be --SECTION.FIELD VALUE (--help says more)"),
        (
            ["--faults", '[{"do": "kill", "replica": 5, "round": 1}]'],
            "faults[0].replica = 5: must be less than fleet.replicas = 2",
        ),
    ],
)
def test_a_mistake_is_one_line(argv, line):
    assert [found.replace("= 64:", "= '64':") for found in problems(*argv)] == [line]


@pytest.mark.parametrize("argv", [["--no-such-thing"], ["--no-such-thing", "--inner.steps", "4"], ["--run.nmae"]])
def test_a_field_that_does_not_exist_is_told_so_before_it_is_asked_for_a_value(argv):
    (line,) = problems(*argv)
    assert "no such field" in line
    assert "needs a value" not in line


def test_what_the_strategy_says_is_said():
    assert "dct_momentum" in problems("--strategy.name", "nonsense")[0]
    (line,) = problems("--strategy.chunk_size", "8", "--strategy.topk", "65")
    assert line.startswith("strategy.topk = 65: ")
    assert "64" in line


GROWS = ["--fleet.replicas", "[2, 3]", "--faults"]


@pytest.mark.parametrize(
    ("argv", "begins"),
    [
        (
            ["--faults", '[{"do": "drop", "replica": 0, "round": 1}]'],
            "faults[0].do = 'drop': must be kill, hang, nan, ",
        ),
        (
            ["--faults", '[{"do": "kill", "replica": 0, "round": 1, "colour": 1}]'],
            "faults[0].colour = 1: no such field; ",
        ),
        (
            ["--faults", '[{"random": {"rate": 0.1, "kinds": ["x"]}}]'],
            "faults[0].random.kinds[0] = 'x': must be kill, ",
        ),
        (["--faults", '[{"random": {"seed": 1}}]'], "faults[0].random.rate: is missing; must be a number"),
        (["--faults", "[5]"], "faults[0] = 5: must be a section with do, replica, "),
        (
            ["--faults", '[{"do": "slow", "replica": 0, "round": 1}]', "--fleet.transport", "local"],
            "faults[0].do = 'slow': needs fleet.transport: ray",
        ),
        (
            ["--faults", '[{"do": "kill", "replica": 0, "round": 1, "whom": "node"}]', "--fleet.transport", "local"],
            "faults[0].whom = 'node': needs fleet.transport: ray",
        ),
        (
            ["--faults", '[{"do": "kill", "replica": 0, "round": 3, "phase": "checkpoint"}]'],
            "faults[0].round = 3: has no checkpoint (checkpoint.every = 10)",
        ),
        (
            ["--faults", '[{"do": "join", "replica": 1, "round": 3}]'],
            "faults[0].do = 'join': needs fleet.replicas: [min, max]",
        ),
        (
            [*GROWS, '[{"do": "join", "replica": 0, "round": 3}, {"do": "join", "replica": 2, "round": 4}]'],
            "faults[1].replica = 2: must leave fleet.replicas' min = 2 there until it joins, or no run could begin: 1",
        ),
        (
            [
                *GROWS,
                '[{"do": "leave", "replica": 0, "round": 2}, {"do": "join", "replica": 0, "round": 4}, '
                '{"do": "join", "replica": 2, "round": 3}]',
            ],
            "faults[2].replica = 2: must leave fleet.replicas' min = 2 there",
        ),
        (
            [*GROWS, '[{"do": "join", "replica": 2, "round": 3}, {"do": "join", "replica": 2, "round": 5}]'],
            "faults[1].round = 5: needs do: leave of replica 2 in an earlier round: it has joined by then",
        ),
        (
            [*GROWS, '[{"do": "join", "replica": 2, "round": 3, "phase": "voted"}]'],
            "faults.phase = 'voted': must be left out for do: join",
        ),
        (
            [*GROWS, '[{"do": "join", "replica": 2, "round": 99}]'],
            "faults[0].round = 99: is beyond the end of the run",
        ),
        (
            [*GROWS, '[{"random": {"rate": 0.1, "kinds": ["join"]}}]'],
            "faults.random.kinds = 'join': must be one or several of kill, ",
        ),
    ],
)
def test_a_mistake_in_the_fault_schedule_is_one_line(argv, begins):
    (line,) = problems(*argv)
    assert line.startswith(begins)


def test_every_mistake_is_said_with_its_source(file):
    path = file("inner: {steps: abc}\nfleet: {cohorts: [{replicas: 2, place: eu}]}\nnonsense: 3\n")
    lines = problems("--config", path, "--run.seed", "x", environment={"RAY_LOWCOMM_DATA__SEQUENCE_LENGTH": "-4"})
    assert sorted(lines) == sorted(
        [
            "run.seed = 'x': must be a whole number",
            "data.sequence_length = -4: must be greater than 0 (from RAY_LOWCOMM_DATA__SEQUENCE_LENGTH)",
            f"inner.steps = 'abc': must be a whole number (in {path})",
            f"fleet.cohorts[0].place = 'eu': no such field; there are: replicas, label_selector (in {path})",
            f"nonsense = 3: no such field; there are: {', '.join(members(TrainConfig))} (in {path})",
        ]
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("strategy: [1\nrun: 2\n", "is not valid YAML in line 2, column 4"),
        ("- 1\n", "must hold sections"),
        ("a: \x00", "is not valid YAML: unacceptable character"),
    ],
)
def test_bad_file(file, text, said):
    (line,) = problems("--config", file(text))
    assert said in line


def test_missing_file():
    assert problems("--config", "none.yaml") == [
        "--config = 'none.yaml': must be a readable YAML file: No such file or directory"
    ]


def test_yaml_round_trip(file):
    config = load(
        "--fleet.cohorts", '[{"replicas": 2}]', "--fleet.replicas", "[1, 2]",
        "--model.args.width", "8", "--inner.clip_norm", "null",
        "--faults", '[{"do": "nan", "replica": 1, "round": 3}]', "--run.name", "ä",
    )  # fmt: skip
    assert load("--config", file(to_yaml(config))) == config


def test_flatten_names_what_has_a_value():
    config = load(
        "--strategy.topk", "32", "--model.args.width", "8", "--faults", '[{"do":"nan","replica":1,"round":3}]'
    )
    flat = flatten(config)
    assert (flat["strategy.topk"], flat["model.args.width"], flat["faults.0.do"]) == (32, 8, "nan")
    assert flat["inner.betas"] == "[0.9, 0.99]"
    assert flat["run.resume"] == "false"
    assert "strategy.chunk_size" not in flat
    assert "strategy.chunk_size" in flatten(config.resolved())


def test_help_names_every_field(capsys):
    with pytest.raises(SystemExit) as caught:
        load("--strategy.topk", "3", "--help", "all")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for section, kind in members(TrainConfig).items():
        for name in members(kind) or {}:
            assert f"--{section}.{name} " in text
    assert "a start after [min, max]'s min" in " ".join(text.split())


def test_every_field_has_a_meaning():
    names = {f"{section}.{name}" for section, kind in members(TrainConfig).items() for name in members(kind) or {}}
    assert set(MEANINGS) == names | {"faults"}


def test_a_job_adds_fields_of_its_own(capsys):
    @dataclass(frozen=True)
    class Extra:
        trials: int = field(default=4, metadata={"help": "how many trials"})

    class JobConfig(TrainConfig):
        """Another job."""

        extra: Extra = Extra()
        dry_run: bool = Field(False, description="only say what would be done", exclude=True)

    config = load("--dry-run", "--extra.trials", "2", cls=JobConfig)
    assert (config.dry_run, config.extra.trials) == (True, 2)
    assert "dry_run" not in to_yaml(config)
    with pytest.raises(SystemExit):
        load("--help", "extra", "options", cls=JobConfig)
    text = capsys.readouterr().out
    assert "how many trials" in text
    assert "only say what would be done" in text


def test_a_config_made_in_code_reads_no_environment(monkeypatch):
    monkeypatch.setenv("RAY_LOWCOMM_RUN__SEED", "5")
    assert TrainConfig().run.seed == 0
    assert load_config([]).run.seed == 5
    given = TrainConfig(strategy=StrategySettings(topk=3))
    assert dataclasses.asdict(given.strategy) == dataclasses.asdict(replace(StrategySettings(), topk=3))


def test_types_are_found_by_path():
    assert describe(type_at(TrainConfig, ["fleet", "cohorts", 1, "replicas"])) == "a whole number"
    assert type_at(TrainConfig, ["fleet", "nothing"]) is None


def test_a_run_that_is_made_longer_or_shorter_goes_on_with_the_share_that_it_began_with(tmp_path):
    short = load("--inner.steps", "320")
    assert short.strategy.topk is None
    assert short.resolved().strategy.topk == 9830  # 20 rounds, 15% of 256 x 256
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(short))
    assert load("--config", str(file), "--inner.steps", "3200").resolved().strategy.topk == 1520  # a run of its own
    longer = load("--run.resume", "--inner.steps", "3200", base=lambda given: str(file))
    assert longer.resolved().strategy.topk == 9830
    file.write_text(to_yaml(longer))
    assert load("--run.resume", "--inner.steps", "9600", base=lambda given: str(file)) == longer.model_copy(
        update={"inner": replace(longer.inner, steps=9600)}
    )
    given = load("--run.resume", "--strategy.topk", "500", base=lambda given: str(file))
    assert given.resolved().strategy.topk == 500
    file.write_text(to_yaml(load("--inner.steps", "3200")))
    for steps in ("6400", "320"):
        assert (
            load("--run.resume", "--inner.steps", steps, base=lambda given: str(file)).resolved().strategy.topk == 1520
        )


SHARDED = ("--fleet.shards_per_replica", "2", "--fleet.resources_per_replica.CPU", "2")


def test_what_shards_cannot_divide_is_refused_before_anything_starts():
    assert problems(*SHARDED, "--inner.batch_size", "3") == [
        "inner.batch_size = 3: must be a multiple of fleet.shards_per_replica = 2: it is the replica's, and each shard "
        "takes its part"
    ]
    assert problems(*SHARDED, "--model.sharding", "none") == [
        "model.sharding = 'none': must be fsdp2 or ddp with fleet.shards_per_replica = 2"
    ]
    assert problems("--model.sharding", "fsdp") == ["model.sharding = 'fsdp': must be fsdp2, ddp, none or null"]


def test_shards_hold_parts_unless_told_otherwise():
    config = load(*SHARDED)
    assert config.model.sharded_as(config.fleet.shards_per_replica) == "fsdp2"
    assert load(*SHARDED, "--model.sharding", "ddp").model.sharded_as(2) == "ddp"
    assert TrainConfig().model.sharded_as(1) == "none"
    assert load("--model.sharding", "fsdp2").model.sharded_as(1) == "fsdp2"
