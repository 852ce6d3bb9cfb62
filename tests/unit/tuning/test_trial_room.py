"""What a trial asks of the cluster."""

import pytest

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.tuning.space import Space
from ray_lowcomm.tuning.trial_room import SLIVER, TrialResources, trial_resources


def config(**fleet):
    return TrainConfig.model_validate({"fleet": fleet})


def test_the_trials_process_asks_for_nothing_and_each_replica_has_a_bundle():
    found = trial_resources(config(replicas=3, resources_per_replica={"CPU": 0.5, "GPU": 0.25}))
    assert found.head_bundle_is_empty
    assert found.bundles == [{"CPU": 0.5, "GPU": 0.25}] * 3


def test_shards_share_their_replicas_bundle_or_have_one_each():
    shape = {"replicas": 2, "shards_per_replica": 4, "resources_per_replica": {"CPU": 8, "GPU": 4}}
    assert trial_resources(config(**shape)).bundles == [{"CPU": 8.0, "GPU": 4.0}] * 2
    assert trial_resources(config(**shape, replica_spread="pack")).bundles == [{"CPU": 2.0, "GPU": 1.0}] * 8


def test_replicas_that_take_turns_need_one_bundle():
    found = trial_resources(config(replicas=3, transport="local", resources_per_replica={"CPU": 2}))
    assert not found.head_bundle_is_empty
    assert found.bundles == [{"CPU": 2.0}]


def test_cohorts_stay_where_they_belong():
    cohorts = [{"replicas": 2, "label_selector": {"zone": "a"}}, {"replicas": 1}]
    found = trial_resources(config(replicas=3, cohorts=cohorts))
    assert found._bound.arguments["bundle_label_selector"] == [{"zone": "a"}, {"zone": "a"}, {}]


def test_resources_follow_the_trials_own_number_of_replicas():
    ask = TrialResources(TrainConfig(), None)
    assert len(ask({"fleet.replicas": 5}).bundles) == 5
    assert len(ask({}).bundles) == 2


@pytest.mark.parametrize("sample", [{"fleet.replicas": 0}, {"fleet.replicas": 3}, {"no.such": 1}])
def test_what_cannot_be_run_asks_for_a_sliver(sample):
    space = Space("odd", "refuses threes", dict, refuse=lambda c: "three" if c.fleet.max_replicas == 3 else None)
    assert TrialResources(TrainConfig(), space)(sample) == SLIVER
