"""A replica's synchronisable tensors as flat vectors: `params`, `grads` and the moments of its optimizer."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.layout import Layout
from ray_lowcomm.core.memory import Spare
from ray_lowcomm.core.moments import Moments
from ray_lowcomm.core.names import trainable_parameters, work_dtype
from ray_lowcomm.core.optimizers import Optimizers

PARAMS, GRADS = "params", "grads"


class Tracks:
    """Reads and writes the tracks of one model and its optimizers.

    All vectors are flat [n] over the trainable parameters, in `layout.dtype` (float32, or float64 for a model that has
    float64 parameters), on the parameters' device.

    A parameter of lower precision has a master copy in that dtype: what was last written to it. Reading returns the
    parameter + what rounding took from the master when it was loaded, so that rounding is never taken for training, and
    small outer updates are not swallowed.

    `spare` is where a vector as long as the model goes that nobody uses any more: the next need not be fresh memory.

    A gradient that is None travels as −0.0 throughout. In a weighted sum it yields to any other value and to +0.0, so
    the mean is −0.0 throughout only where no replica has a gradient; writing that leaves the parameter without one.
    """

    def __init__(
        self, model: nn.Module, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Optimizers
    ) -> None:
        self.parameters = trainable_parameters(model)
        self.optimizers = Optimizers(optimizers)
        self.moments = Moments(self.optimizers)
        self.spare = Spare()
        self._tensors = list(self.parameters.values())
        self.layout = Layout.of({k: p.data for k, p in self.parameters.items()}, work_dtype(self._tensors))
        self._masters = {
            i: p.detach().to(self.layout.dtype, copy=True)
            for i, p in enumerate(self._tensors)
            if p.dtype != self.layout.dtype
        }

    def check(self, tracks: tuple[str, ...]) -> None:
        """Raise SettingError unless the optimizer has these tracks."""
        have = (PARAMS, GRADS, *self.moments.names)
        for track in tracks:
            if track not in have:
                raise SettingError("track", track, f"{self.optimizers.name} has {', '.join(have)}")

    def read(self, track: str, out: Tensor | None = None) -> Tensor:
        """A flat vector [n] with the current values, `out` if given; (negative) zeros where there is no state
        (gradient) yet."""
        return self.layout.flatten(self.each(track), out)

    def each(self, track: str) -> Iterator[Tensor]:
        """The same tensor by tensor, in the tensors' shapes: not to be written to, as there may be no copy."""
        for i, parameter in enumerate(self._tensors):
            if track == PARAMS:
                yield self._parameter(i, parameter).detach()
            elif track == GRADS:
                yield _gradient(parameter)
            else:
                yield self.moments.read(parameter, track)

    def write(self, track: str, flat: Tensor) -> None:
        """Set the track to `flat` [n], cast to the tensors' dtypes."""
        parts = self.layout.split(flat)
        if track == GRADS:
            _set_gradients(self._tensors, parts)
            return
        with torch.no_grad():
            for i, (parameter, part) in enumerate(zip(self._tensors, parts, strict=True)):
                if track == PARAMS:
                    self._set_parameter(i, parameter, part)
                else:
                    self.moments.write(parameter, track, part)

    def room(self) -> Tensor:
        """A flat vector [n] of the caller's own, with any content, from `spare`."""
        like = self._tensors[0].detach().new_empty(1, dtype=self.layout.dtype)
        return self.spare.take(like.expand(self.layout.numel))

    def below(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """`flat` [n] minus the parameters: in `out` [n] if given, else in a vector from `spare`, the caller's own."""
        out = self.spare.take(flat) if out is None else out
        for i, (p, of, to) in enumerate(
            zip(self._tensors, self.layout.split(flat), self.layout.split(out), strict=True)
        ):
            torch.sub(of, self._parameter(i, p).detach(), out=to)
        return out

    def add(self, flat: Tensor, alpha: float = 1.0) -> None:
        """Add `alpha` times `flat` [n] to the parameters, without a copy of all of them."""
        with torch.no_grad():
            for i, (parameter, part) in enumerate(zip(self._tensors, self.layout.split(flat), strict=True)):
                if i in self._masters:
                    self._set_parameter(i, parameter, self._parameter(i, parameter).add(part, alpha=alpha))
                else:
                    parameter.add_(part, alpha=alpha)

    def masters(self) -> dict[str, Tensor]:
        """Master copies of low-precision parameters by name, for the replica's local state."""
        names = self.layout.names
        return {names[i]: master for i, master in self._masters.items()}

    def load_masters(self, masters: dict[str, Tensor]) -> None:
        """Put back what `masters` returned; the parameters themselves are loaded apart."""
        for i, master in self._masters.items():
            master.copy_(masters[self.layout.names[i]])

    def _parameter(self, index: int, parameter: nn.Parameter) -> Tensor:
        master = self._masters.get(index)
        if master is None:
            return parameter
        lost = master - master.to(parameter.dtype).to(master.dtype)
        return parameter.detach().to(master.dtype) + lost

    def _set_parameter(self, index: int, parameter: nn.Parameter, part: Tensor) -> None:
        if index in self._masters:
            self._masters[index].copy_(part)
        parameter.copy_(part)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.full_like(parameter, -0.0)
    return parameter.grad + 0.0  # makes +0.0 of −0.0


def _set_gradients(parameters: list[nn.Parameter], parts: list[Tensor]) -> None:
    # A parameter that no replica used must stay without a gradient, or weight decay would move it. One with a gradient
    # of zeros must keep it, as in training without replicas. The rule looks only at the mean: all decide alike.
    absent = torch.stack([((part == 0) & part.signbit()).all() for part in parts]).tolist()
    for parameter, part, missing in zip(parameters, parts, absent, strict=True):
        if missing:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = part.to(parameter.dtype, copy=True)
        else:
            parameter.grad.copy_(part)
