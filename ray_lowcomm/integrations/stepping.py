"""How a trainer that calls `optimizer.step()` itself is made to go through `Replica.step`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ray_lowcomm.engine.replica import Replica

Tokens = Callable[[Any], int]  # of a batch
SHARDED = (
    "fleet.shards_per_replica = {}: a trainer trains a model that is whole in one process; leave it out, or write a "
    "loop with context.wrap and fully_shard"
)


class ReplicaOptimizer(torch.optim.Optimizer):
    """What a trainer holds in the place of its optimizer: it has its groups and state, and its `step` is the replica's.

    Everything but `step` is that of `inner`, the optimizer that the replica steps.
    """

    def __init__(self, inner: torch.optim.Optimizer, take: Callable[[], None]) -> None:
        # not Optimizer's: groups and state would be copies
        self.inner, self._take = inner, take

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of `inner`."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of `inner`."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of `inner`."""
        return self.inner.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run `closure`, if there is one, and one step of the replica; returns what `closure` did."""
        result = None if closure is None else closure()
        self._take()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """That of `inner`."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into `inner`."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To `inner`, which the replica refuses at its next step."""
        self.inner.add_param_group(param_group)


class Turns:
    """The turns of a trainer's loop: losses of the micro-batches, and one `Replica.step` for all of them.

    The step's loss is the sum of theirs, or the mean.
    """

    def __init__(self, replica: Replica, *, mean: bool = False) -> None:
        self.replica, self._mean = replica, mean
        self._loss: Tensor | None = None
        self._batches = self._tokens = 0
        self._stepped = False

    @property
    def begun(self) -> bool:
        """Whether a micro-batch of the next step has been seen."""
        return self._batches > 0

    def see(self, loss: Tensor, tokens: int = 0) -> None:
        """A micro-batch, with its `loss`, 0-d."""
        loss = loss.detach()
        self._loss = loss.clone() if self._loss is None else self._loss + loss
        self._batches, self._tokens = self._batches + 1, self._tokens + tokens

    def take(self) -> None:
        """The step of what has been seen; none, if nothing has been or the run is over."""
        loss, batches, tokens = self._loss, self._batches, self._tokens
        self._loss, self._batches, self._tokens = None, 0, 0
        if loss is not None and not self.replica.finished:
            self.replica.step(loss / batches if self._mean else loss, tokens)
        self._stepped = True

    def over(self) -> bool:
        """At the end of a turn: whether the run is, after what is due has been done."""
        if not self._stepped:
            return False  # in the middle of an accumulation gradients are under way
        self._stepped = False
        return self.replica.finished


def merged(own: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `context.wrap`: an integration's `own`, and a user's above them; dictionaries and tuples of both."""
    result = {**own, **options}
    for name in ("stateful", "local_stateful"):
        result[name] = {**own.get(name, {}), **options.get(name, {})}
    result["remarks"] = (*own.get("remarks", ()), *options.get("remarks", ()))
    return result
