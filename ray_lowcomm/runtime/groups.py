"""Placement groups: how room on a cluster is asked for. What waits is what an autoscaler sees as demand."""

from collections.abc import Mapping
from typing import Any, Protocol

import ray


class Groups(Protocol):
    """Asks for room, and gives it back."""

    def ask(self, each: Mapping[str, float], label_selector: Mapping[str, str], count: int = 1, name: str = "") -> Any:
        """Ask for `count` bundles, all or none; returns the group, whose room may come at any time. It can be found by
        its name, which is free again once it is removed."""
        ...

    def ready(self) -> set[Any]:
        """Ids of the groups that have their room; one whose node dies is ready no more."""
        ...

    def remove(self, group: Any) -> None:
        """Give the room back, or ask no more."""


class RayGroups:
    """Ray's. They go with the job that this process belongs to, whatever becomes of the process."""

    def ask(self, each: Mapping[str, float], label_selector: Mapping[str, str], count: int = 1, name: str = "") -> Any:
        """See `Groups`."""
        bundle = {name: amount for name, amount in each.items() if amount > 0}
        selectors = [dict(label_selector)] * count if label_selector else None
        return ray.util.placement_group([bundle] * count, name=name, bundle_label_selector=selectors)

    def ready(self) -> set[Any]:
        """See `Groups`."""
        table = ray.util.placement_group_table()
        return {key for key, group in table.items() if group["state"] == "CREATED"}

    def remove(self, group: Any) -> None:
        """See `Groups`."""
        ray.util.remove_placement_group(group)
