"""What one shard takes of a replica's resources."""

import math
from collections.abc import Mapping

from ray_lowcomm.core.errors import SettingError

LEAST = 1e-4  # Ray counts in ten thousandths


def share(resources: Mapping[str, float], shards: int) -> dict[str, float]:
    """An equal part of each, so that all parts together are not more than there is."""
    if shards == 1:
        return dict(resources)
    return {name: math.floor(amount / shards / LEAST + 1e-6) * LEAST for name, amount in resources.items()}


def check_share(resources: Mapping[str, float], shards: int) -> None:
    """Refuse what cannot be divided.

    Raises:
        SettingError: with the resource and the number of shards.
    """
    of = f"fleet.shards_per_replica = {shards}"
    for name, amount in resources.items():
        if name == "GPU" and shards > 1 and amount % shards:
            allowed = f"must be a multiple of {of}: each shard has whole GPUs"
            raise SettingError("fleet.resources_per_replica.GPU", amount, allowed)
        if amount and amount / shards < LEAST - 1e-9:
            allowed = f"must be at least {shards * LEAST:g}, {LEAST:g} for each shard of {of}"
            raise SettingError(f"fleet.resources_per_replica.{name}", amount, allowed)
