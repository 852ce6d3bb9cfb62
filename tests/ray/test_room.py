"""A fleet that the cluster can never place is refused, with the arithmetic, before anything waits for it."""

from dataclasses import replace

import pytest

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import CohortSettings, FleetSettings
from ray_lowcomm.runtime.cluster import _fits, _or_spread, check_room


def test_a_fleet_that_fits_is_let_in(ray_cluster):
    assert check_room(FleetSettings(replicas=8, resources_per_replica={"CPU": 1})) == ""
    assert check_room(FleetSettings(replicas=16, resources_per_replica={"CPU": 0.5})) == ""


def test_all_that_lacks_is_named(ray_cluster):
    with pytest.raises(FleetError, match=r"9 x 1 CPU = 9 CPU needed, 8 there; 9 x 2 GPU = 18 GPU needed, 0 there"):
        check_room(FleetSettings(replicas=9, resources_per_replica={"CPU": 1, "GPU": 2}))


def test_a_cohort_must_find_nodes_with_its_labels(ray_cluster):
    nowhere = CohortSettings(replicas=2, label_selector={"ray.io/region": "nowhere"})
    with pytest.raises(FleetError, match=r"label_selector = .*: 2 replicas needed, only 0 fit on nodes with such"):
        check_room(FleetSettings(replicas=3, cohorts=(CohortSettings(replicas=1), nowhere)))
    elsewhere = CohortSettings(replicas=2, label_selector={"ray.io/region": "!nowhere"})
    check_room(FleetSettings(replicas=2, cohorts=(elsewhere,)))


def test_of_an_elastic_fleet_the_least_number_must_fit(ray_cluster):
    assert check_room(FleetSettings(replicas=[4, 8])) == ""
    said = "fleet.replicas = [4, 16]: not all will find a place: 16 x 1 CPU = 16 CPU needed, 8 there"
    assert check_room(FleetSettings(replicas=[4, 16])) == said
    with pytest.raises(FleetError, match=r"\[9, 16\]: the cluster is too small: 9 x 1 CPU = 9 CPU needed, 8 there"):
        check_room(FleetSettings(replicas=[9, 16]))


def test_a_replica_must_fit_on_one_node():
    assert _fits({"CPU": 8, "GPU": 1}, {"CPU": 3, "GPU": 1}) == 1
    assert _fits({"CPU": 8}, {"CPU": 3, "GPU": 1}) == 0
    assert _fits({"CPU": 0.3}, {"CPU": 0.1}) == 3


def test_where_shards_would_fit_on_several_nodes_it_is_said():
    nodes = [{"CPU": 1.0}, {"CPU": 3.0}]
    settings = FleetSettings(replicas=2, shards_per_replica=2, resources_per_replica={"CPU": 2})
    assert "fleet.replica_spread = pack" in _or_spread(settings, nodes, 2)
    assert _or_spread(settings, nodes, 3) == ""
    assert _or_spread(replace(settings, replica_spread="pack"), nodes, 2) == ""
    assert _or_spread(replace(settings, shards_per_replica=1), nodes, 1) == ""
