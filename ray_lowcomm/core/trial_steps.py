"""What an optimizer will keep for its parameters, found before its first step: a copy of it takes steps on tiny ones.

The copy shares no state, hooks, attributes or parameters with the optimizer, and draws no random numbers of others.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ray_lowcomm.core import randomness
from ray_lowcomm.core.nested import copied
from ray_lowcomm.core.optimizers import inner_optimizers

_SIDES = (3, 4, 5, 2, 6, 7)  # of tiny parameters; no two alike, so that no other shape is taken for the parameter's
_STEPS = 2


@dataclass(frozen=True)
class Kind:
    """Parameters that their optimizer treats alike: its group, number of dimensions, dtype, device."""

    group: int
    dims: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps for a parameter of a kind: `state` is that of an example, `moments` are the names of the
    floating tensors in its shape, and whether they have negative values."""

    state: dict[str, Any]
    moments: dict[str, bool]

    @property
    def others(self) -> tuple[str, ...]:
        """Names of what is neither a moment nor a single number or text: lists, tensors of other shapes or dtypes."""
        return tuple(n for n, v in self.state.items() if n not in self.moments and not is_single(v))


def kinds_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, Kind]]:
    """Each parameter with its kind."""
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            yield p, Kind(number, p.dim(), p.dtype, p.device)


def kept_after_steps(optimizer: torch.optim.Optimizer) -> dict[Kind, Kept]:
    """What the optimizer will keep for each kind of its parameters, {} for a kind for which it keeps nothing.

    Raises:
        Exception: whatever the optimizer raises on parameters that are not its own, or on being copied.
    """
    if inside := inner_optimizers(optimizer):
        raise TypeError(f"it steps {type(inside[0]).__name__}")
    random = randomness.random_state()
    try:
        return _tried(optimizer, seeded=False)
    except Exception:  # it may read what it made when it was made, as Adagrad does
        if not optimizer.state:
            raise
        return _tried(optimizer, seeded=True)
    finally:
        randomness.set_random_state(random)


def kept_by_now(optimizer: torch.optim.Optimizer) -> dict[Kind, Kept]:
    """What there is in the state already. Of any value it is taken that it may be negative."""
    kept: dict[Kind, Kept] = {}
    for parameter, kind in kinds_of(optimizer):
        state = optimizer.state.get(parameter)
        if state:
            kept[kind] = Kept(state, {n: True for n, v in state.items() if is_moment(v, parameter) and v.dim() > 0})
    return kept


def is_moment(value: object, parameter: Tensor) -> TypeGuard[Tensor]:
    """Whether a value of an optimizer's state can be a moment of this parameter."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape


def is_single(value: object) -> bool:
    """Whether it is a number, a text, None, or a 0-d tensor."""
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, bool | int | float | str | None)


def _tried(optimizer: torch.optim.Optimizer, *, seeded: bool) -> dict[Kind, Kept]:
    examples = {kind: parameter for parameter, kind in reversed(list(kinds_of(optimizer)))}
    tiny = {kind: _tiny(kind) for kind in examples}
    # of a 0-d parameter a moment and a count look alike: a vector in the same group tells them apart
    beside = {kind: _tiny(Kind(kind.group, 1, kind.dtype, kind.device)) for kind in tiny if kind.dims == 0}
    twin = _copy(optimizer, {kind: [p, *([beside[kind]] if kind in beside else [])] for kind, p in tiny.items()})
    if seeded:
        for kind, p in tiny.items():
            own, example = optimizer.state.get(examples[kind], {}), examples[kind]
            for one in (p, *([beside[kind]] if kind in beside else [])):
                twin.state[one] = {n: _blank(v, example, one) for n, v in own.items()}
    step = type(optimizer).step  # not the instance's: a scheduler puts one of its own there
    for _ in range(_STEPS):
        step(twin)
    kept = {}
    for kind, p in tiny.items():
        like = beside.get(kind, p)
        signs = {n: bool((v < 0).any()) for n, v in twin.state.get(like, {}).items() if is_moment(v, like)}
        state = dict(twin.state.get(p, {}))
        kept[kind] = Kept(state, {n: sign for n, sign in signs.items() if is_moment(state.get(n), p)})
    return kept


def _copy(optimizer: torch.optim.Optimizer, tiny: dict[Kind, list[nn.Parameter]]) -> torch.optim.Optimizer:
    twin = type(optimizer).__new__(type(optimizer))
    nobody = nn.Parameter(torch.empty(0))
    known: dict[int, Any] = {id(p): nobody for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "step"):
            continue
        hooks = name.startswith("_optimizer_") and isinstance(value, OrderedDict)
        vars(twin)[name] = OrderedDict() if hooks else copy.deepcopy(value, known)
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for number, group in enumerate(optimizer.param_groups):
        settings = {n: v for n, v in group.items() if n not in ("params", "param_names")}
        mine = [p for kind, ps in tiny.items() if kind.group == number for p in ps]
        twin.param_groups.append(copied(settings) | {"params": mine})
    return twin


def _tiny(kind: Kind) -> nn.Parameter:
    """A parameter of that kind, with values and gradients of both signs."""
    shape = tuple(_SIDES[i % len(_SIDES)] for i in range(kind.dims))
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
    place = {"dtype": kind.dtype, "device": kind.device}
    parameter = nn.Parameter(((count % 3) - 0.8).view(shape).to(**place))  # type: ignore[call-overload]
    parameter.grad = ((0.5 + 0.01 * count) * (1 - 2 * (count % 2))).view(shape).to(**place)  # type: ignore[call-overload]
    return parameter


def _blank(value: Any, example: nn.Parameter, tiny: nn.Parameter) -> Any:
    return torch.zeros_like(tiny, dtype=value.dtype) if is_moment(value, example) else copied(value)
