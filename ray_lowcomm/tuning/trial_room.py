"""What a trial holds while it lasts, and whether a cluster can ever give it."""

from dataclasses import dataclass
from typing import Any

import ray
from ray.tune import PlacementGroupFactory

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.errors import FleetError, LowCommError
from ray_lowcomm.core.settings import FleetSettings
from ray_lowcomm.runtime.cluster import check_room, surrounding_place
from ray_lowcomm.tuning.space import Sample, Space
from ray_lowcomm.tuning.trial_config import check_trial, trial_config

SLIVER = PlacementGroupFactory([{"CPU": 0.001}])


def trial_resources(config: TrainConfig) -> PlacementGroupFactory:
    """The placement group of one trial: the trial's own process, which needs nothing, and the bundles of each replica.

    With ``fleet.transport: local`` the replicas take turns in the trial's process: one bundle.
    """
    fleet = config.fleet
    if fleet.transport == "local":
        return PlacementGroupFactory([dict(fleet.resources_per_replica)])
    count = fleet.max_replicas * fleet.bundles
    selectors = [
        dict(cohort.label_selector) for cohort in fleet.cohorts for _ in range(cohort.replicas * fleet.bundles)
    ]
    more: dict[str, Any] = {"bundle_label_selector": selectors} if any(selectors) else {}
    return PlacementGroupFactory([{}] + [fleet.bundle] * count, **more)


def check_trial_fits(config: TrainConfig) -> None:
    """Refuse a trial that the cluster can never place, now or after growing; Ray must be connected.

    Raises:
        FleetError: with the arithmetic.
        ConfigError: a fleet that cannot be a trial at all.
    """
    check_trial(config)
    fleet = config.fleet
    if fleet.transport == "local":
        fleet = FleetSettings(replicas=1, resources_per_replica=dict(fleet.resources_per_replica))
    try:
        check_room(fleet)
    except FleetError as error:
        raise FleetError(f"a trial can never be placed: {error}") from None


def check_trial_has_room(config: TrainConfig) -> None:
    """In a trial's process: its placement group must have a bundle for each replica.

    Raises:
        FleetError: it has none; with the arithmetic where the cluster could not give it.
    """
    fleet = config.fleet
    if fleet.transport == "local" or surrounding_place(fleet) is not None:
        return
    check_trial_fits(config)
    raise FleetError(
        f"the trial's placement group has no room for {fleet.max_replicas} replicas of {fleet.resources_per_replica}: "
        "leave the resources that `trainable` asks for as they are"
    )


@dataclass(frozen=True)
class TrialResources:
    """From a sample to the trial's placement group, as `tune.with_resources` wants it.

    A trial that cannot be run gets a sliver: enough to start, and to say why it cannot. Asking for what will never be
    there would hold up the sweep for ever, and an error in here would end it.
    """

    base: TrainConfig
    space: Space | None

    def __call__(self, sample: Sample) -> PlacementGroupFactory:
        """The placement group of the trial with this sample."""
        try:
            config = trial_config(self.base, self.space, sample, ".", "trial")
            if ray.is_initialized():
                check_trial_fits(config)
        except LowCommError:
            return SLIVER
        return trial_resources(config)
