"""Settings made in Python, without the configuration library, are checked just as well."""

import pickle
from typing import Any

import pytest

from ray_lowcomm.core import settings as s
from ray_lowcomm.core.errors import LowCommError, SettingError

BAD: list[tuple[type, dict[str, Any], str]] = [
    (s.StrategySettings, {"variant": "papr"}, r"strategy\.variant = 'papr': must be one of consistent, paper"),
    (s.StrategySettings, {"residual": "modell"}, r"strategy\.residual = 'modell': must be one of model, buffer"),
    (s.StrategySettings, {"reduce": "sum"}, r"strategy\.reduce .*one of replicas, senders"),
    (s.StrategySettings, {"periods": "often"}, r"strategy\.periods .*one of fixed, random"),
    (s.StrategySettings, {"outer_optimizer": "adam"}, r"strategy\.outer_optimizer .*one of none, sgd, nesterov"),
    (s.StrategySettings, {"inner_steps": 0}, r"strategy\.inner_steps = 0: must be greater than 0"),
    (s.StrategySettings, {"topk": -1}, r"strategy\.topk = -1"),
    (s.StrategySettings, {"outer_momentum": 1.0}, r"strategy\.outer_momentum = 1\.0: .*less than 1"),
    (s.StrategySettings, {"residual_decay": 1.5}, r"strategy\.residual_decay = 1\.5: must be between 0 and 1"),
    (s.ModelSettings, {"buffers": "mean"}, r"model\.buffers = 'mean': must be one of average, local, first"),
    (s.InnerSettings, {"optimizer": "lamb"}, r"inner\.optimizer .*one of adamw, sgd, adopt"),
    (s.InnerSettings, {"steps": 0}, r"inner\.steps = 0"),
    (s.InnerSettings, {"betas": (0.9, 1.0)}, r"inner\.betas"),
    (s.FleetSettings, {"transport": "mpi"}, r"fleet\.transport .*one of ray, local"),
    (s.FleetSettings, {"replicas": 2, "quorum": 3}, r"fleet\.quorum = 3: must be at most fleet\.replicas = 2"),
    (s.FleetSettings, {"replicas": 0}, r"fleet\.replicas = 0: must be a whole number of at least 1, or \[min, max\]"),
    (s.FleetSettings, {"replicas": [4, 2]}, r"fleet\.replicas = \[4, 2\]: must be a whole number of at least 1, or"),
    (s.FleetSettings, {"replicas": [0, 2]}, r"fleet\.replicas = \[0, 2\]: must be"),
    (s.FleetSettings, {"replicas": (1, 2, 3)}, r"fleet\.replicas = \[1, 2, 3\]: must be"),
    (s.FleetSettings, {"replicas": True}, r"fleet\.replicas = True: must be"),
    (s.FleetSettings, {"replicas": "4"}, r"fleet\.replicas = '4': must be"),
    (s.FleetSettings, {"replicas": [2, 4], "quorum": 5}, r"fleet\.quorum = 5: must be at most fleet\.replicas = 4"),
    (s.FleetSettings, {"replicas": [1, 3], "cohorts": (s.CohortSettings(2),)}, r"fleet\.replicas = 3: must equal .* 2"),
    (s.FleetSettings, {"replicas": [1, 2], "resources_per_replica": {"CPU": 0}}, r"more than 0 of something"),
    (
        s.FleetSettings,
        {"collective": "nccl"},
        r"fleet\.collective = 'nccl': needs GPUs: .*resources_per_replica\.GPU: 1",
    ),
    (s.FleetSettings, {"shards_per_replica": 0}, r"fleet\.shards_per_replica = 0: must be greater than 0"),
    (s.FleetSettings, {"replica_spread": "spread"}, r"fleet\.replica_spread .*one of pack, strict_pack"),
    (
        s.FleetSettings,
        {"shards_per_replica": 2, "resources_per_replica": {"CPU": 1, "GPU": 3}},
        r"resources_per_replica\.GPU = 3: must be a multiple of fleet\.shards_per_replica = 2: each",
    ),
    (
        s.FleetSettings,
        {"shards_per_replica": 3, "resources_per_replica": {"CPU": 1, "label": 0.0002}},
        r"resources_per_replica\.label = 0\.0002: must be at least 0\.0003, 0\.0001 for each shard",
    ),
    (
        s.FleetSettings,
        {"shards_per_replica": 2, "transport": "local"},
        r"shards_per_replica = 2: needs .*transport: ray",
    ),
    (s.Fault, {"do": "kill", "replica": 0, "round": 1, "shard": -1}, r"faults\.shard = -1: must be 0 or greater"),
    (s.Fault, {"do": "drop", "replica": 0, "round": 1}, r"faults\.do = 'drop': must be one of kill, hang, nan"),
    (s.Fault, {"do": "slow", "replica": 0, "round": 1, "factor": 1}, r"faults\.factor = 1: must be greater than 1"),
    (s.Fault, {"do": "full_disk", "replica": 0, "round": 1, "phase": "inner"}, r"faults\.phase = 'inner': must be ch"),
    (s.RunSettings, {"name": "a/b"}, r"run\.name"),
    (s.CheckpointSettings, {"keep": 0}, r"checkpoint\.keep"),
]


def _id(value: object) -> str:
    return str(value) if isinstance(value, dict) else ""


@pytest.mark.parametrize(("kind", "fields", "text"), BAD, ids=_id)
def test_bad_value_is_named_with_what_is_allowed(kind: type, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        kind(**fields)


def test_none_is_allowed_where_it_means_the_strategys_own_default() -> None:
    assert s.StrategySettings().variant is None
    for kind in (s.ModelSettings, s.InnerSettings, s.FleetSettings, s.RunSettings, s.DataSettings):
        kind()


def test_a_fleet_has_a_least_and_a_most() -> None:
    fixed, elastic, same = (s.FleetSettings(replicas=given) for given in (3, [2, 8], (3, 3)))  # type: ignore[arg-type]
    assert (fixed.min_replicas, fixed.max_replicas, fixed.elastic, fixed.size) == (3, 3, False, "3")
    assert (elastic.min_replicas, elastic.max_replicas, elastic.elastic, elastic.size) == (2, 8, True, "2 to 8")
    assert elastic.replicas == (2, 8)
    assert same == fixed


def test_setting_errors_survive_being_sent_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(SettingError("strategy.topk", 0, "must be more")))
    assert isinstance(error, LowCommError)
    assert (error.field, error.value, error.allowed) == ("strategy.topk", 0, "must be more")
    assert str(error) == "strategy.topk = 0: must be more"


def test_shards_have_equal_parts_of_what_their_replica_has() -> None:
    fleet = s.FleetSettings(shards_per_replica=3, resources_per_replica={"CPU": 4.0, "GPU": 6, "tag": 0.001, "none": 0})
    share = fleet.resources_per_shard
    assert share == pytest.approx({"CPU": 1.3333, "GPU": 2, "tag": 0.0003, "none": 0})
    assert all(3 * share[name] <= amount for name, amount in fleet.resources_per_replica.items())
    assert s.FleetSettings().resources_per_shard == {"CPU": 1.0}


def test_a_replica_is_on_one_node_unless_it_may_be_spread() -> None:
    whole = {"CPU": 4.0, "GPU": 2.0}
    one = s.FleetSettings(shards_per_replica=2, resources_per_replica=whole)
    assert (one.bundles, one.bundle) == (1, whole)
    spread = s.FleetSettings(shards_per_replica=2, resources_per_replica=whole, replica_spread="pack")
    assert (spread.bundles, spread.bundle) == (2, {"CPU": 2.0, "GPU": 1.0})
