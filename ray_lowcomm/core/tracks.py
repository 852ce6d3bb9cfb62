"""A replica's synchronisable tensors as flat vectors: `params`, `grads` and the moments of its optimizer."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.fragments import Fragment, whole
from ray_lowcomm.core.layout import Layout
from ray_lowcomm.core.memory import Spare
from ray_lowcomm.core.moments import Moments
from ray_lowcomm.core.names import clean_name, trainable_parameters, work_dtype
from ray_lowcomm.core.optimizers import Optimizers
from ray_lowcomm.core.sharding import Shard, exchanged, local
from ray_lowcomm.core.track import Gradients, MomentTrack, OptimizerMoment, Parameters, Track, Vector

PARAMS, GRADS = "params", "grads"


class TrackSet(Protocol):
    """The tracks of one model and its optimizers, as strategies are built on them."""

    @property
    def layout(self) -> Layout:
        """That of the trainable parameters."""
        ...

    @property
    def moments(self) -> Moments:
        """Of the optimizers."""
        ...

    @property
    def optimizers(self) -> Optimizers:
        """The inner ones."""
        ...

    def part(self, fragment: Fragment | None = None) -> Track:
        """The parameters, or a fragment of them."""
        ...

    def gradients(self) -> Vector:
        """The gradients of the parameters."""
        ...

    def moment(self, name: str) -> MomentTrack:
        """A moment of the optimizers."""
        ...


class Tracks:
    """Reads and writes the tracks of one model and its optimizers.

    All vectors are flat [n] over the trainable parameters, in `layout.dtype` (float32, or float64 for a model that has
    float64 parameters), on the parameters' device. `params` are the parameters (see `Parameters`), `spare` is of all
    tracks.

    Of a model that several processes hold parts of, this one's `shard` has what it exchanges: its parts of the
    parameters in `exchanged`, n elements in all. `parameters` are all that are trainable, `frozen` the others.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Optimizers,
        shard: Shard | None = None,
    ) -> None:
        self.parameters = trainable_parameters(model)
        self.frozen = {clean_name(name): p for name, p in model.named_parameters() if not p.requires_grad}
        self.shard = shard or Shard()
        self.exchanged = exchanged(self.parameters, self.shard)
        self.optimizers = Optimizers(optimizers)
        self.moments = Moments(self.optimizers)
        self.spare = Spare()
        self._tensors = list(self.exchanged.values())
        work = work_dtype(list(self.parameters.values()))
        self.layout = Layout.of({k: local(p) for k, p in self.exchanged.items()}, work)
        self._masters = {
            i: local(p).to(self.layout.dtype, copy=True)
            for i, p in enumerate(self._tensors)
            if p.dtype != self.layout.dtype
        }
        self.params = Parameters(self._tensors, self._masters, whole(self.layout), self.spare)

    def check(self, tracks: tuple[str, ...]) -> None:
        """Raise SettingError unless the optimizer has these tracks."""
        have = (PARAMS, GRADS, *self.moments.names)
        for track in tracks:
            if track not in have:
                raise SettingError("track", track, f"{self.optimizers.name} has {', '.join(have)}")

    def part(self, fragment: Fragment | None = None) -> Track:
        """The parameters, or a fragment of them."""
        return self.params if fragment is None else Parameters(self._tensors, self._masters, fragment, self.spare)

    def gradients(self) -> Vector:
        """The gradients of the parameters."""
        return Gradients(self._tensors, self.layout)

    def moment(self, name: str) -> MomentTrack:
        """A moment of the optimizers."""
        self.check((name,))
        return OptimizerMoment(self._tensors, self.moments, name, self.layout, self.spare)

    def read(self, track: str, out: Tensor | None = None) -> Tensor:
        """A flat vector [n] with the current values, `out` if given; (negative) zeros where there is no state
        (gradient) yet."""
        return self.layout.flatten(self.each(track), out)

    def each(self, track: str) -> Iterator[Tensor]:
        """The same tensor by tensor, in the tensors' shapes: not to be written to, as there may be no copy."""
        return self._track(track).each()

    def write(self, track: str, flat: Tensor) -> None:
        """Set the track to `flat` [n], cast to the tensors' dtypes."""
        self._track(track).write(flat)

    def room(self) -> Tensor:
        """A flat vector [n] of the caller's own, with any content, from `spare`."""
        return self.params.room()

    def below(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """`flat` [n] minus the parameters: in `out` [n] if given, else in a vector from `spare`, the caller's own."""
        return self.params.below(flat, out)

    def add(self, flat: Tensor, alpha: float = 1.0) -> None:
        """Add `alpha` times `flat` [n] to the parameters, without a copy of all of them."""
        self.params.add(flat, alpha)

    def held(self) -> dict[str, Tensor]:
        """The parameters that are exchanged, by name, as tensors of this process: in the same memory."""
        return {name: local(p) for name, p in self.exchanged.items()}

    def masters(self) -> dict[str, Tensor]:
        """Master copies of low-precision parameters by name, for the replica's local state."""
        names = self.layout.names
        return {names[i]: master for i, master in self._masters.items()}

    def load_masters(self, masters: dict[str, Tensor]) -> None:
        """Put back what `masters` returned; the parameters themselves are loaded apart."""
        for i, master in self._masters.items():
            master.copy_(masters[self.layout.names[i]])

    def _track(self, track: str) -> Vector:
        if track == GRADS:
            return self.gradients()
        return self.params if track == PARAMS else self.moment(track)
