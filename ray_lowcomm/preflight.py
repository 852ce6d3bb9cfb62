"""What needs no cluster is looked at before one is reached for: that the model can be made, and in as many fragments as
are wanted, that the data is there."""

import os
import sys
from collections.abc import Collection

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.settings import FleetSettings


def preflight(config: TrainConfig, drawn: Collection[str] | None = None) -> None:
    """Refuse a model or data that no replica could make or find. Cheap: no weights are made, and no data is read. Only
    with `strategy.fragments` the model is made, without weights where it can be, and the data are opened that its sizes
    are of.

    Where replicas run on other machines, which may have other files and modules, only what is known here is judged.
    `drawn` are the fields that the trials of a sweep have from elsewhere: a section with one is not looked at.

    Raises:
        ModelError: there is no such model, it cannot be imported, or does not take `model.args`; no such weights.
        DataError: there is no such source, no such files, or no package for them.
        SettingError: the model does not make so many fragments.
    """
    from ray_lowcomm import data, models  # torch takes a second to import

    sections = {name.partition(".")[0] for name in drawn or ()}
    in_this_process = drawn is None and config.fleet.transport == "local"  # a trial is an actor, whatever its transport
    here = in_this_process or cluster_is_here(config.fleet)
    if "model" not in sections:
        models.check(config.model, here)
    if "data" not in sections:
        data.check(config.data, here)
    if here and not sections & {"model", "data", "strategy"}:
        _check_fragments(config)


def _check_fragments(config: TrainConfig) -> None:
    from ray_lowcomm import estimate, strategies

    if (config.strategy.fragments or 1) > 1:
        settings = strategies.resolve(config.strategy, config.inner.steps)
        for sizes in estimate.shard_sizes(config):
            strategies.fragments_of(settings, sizes.layout)


def cluster_is_here(fleet: FleetSettings) -> bool:
    """Whether Ray will be started on this machine for the run, and not joined where it is."""
    ray = sys.modules.get("ray")
    joined = ray is not None and ray.is_initialized()
    return not joined and (fleet.address or os.environ.get("RAY_ADDRESS") or "local") == "local"
