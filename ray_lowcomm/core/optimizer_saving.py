"""All that the inner optimizers of a replica know, saved, handed to a joiner and taken over: whatever their classes.

What an optimizer holds for a parameter goes by the parameter's name, so a run may go on with the same parameters in
another order. Settings in `param_groups` (learning rate, betas, decay) are as the program makes them; saved are those
that have changed since, by a learning rate scheduler or by the optimizer itself, and so are numbers that the optimizer
keeps as attributes. An optimizer with a `state_dict` of its own is saved by that, as a whole.

Of parameters that are distributed (`DTensor`) the state of this process's parts is named, saved and taken over.
"""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ray_lowcomm.core.errors import CheckpointError, ModelError
from ray_lowcomm.core.names import clean_name
from ray_lowcomm.core.nested import copied, pack, tensors_in, unpack
from ray_lowcomm.core.optimizers import Optimizers, inner_optimizers
from ray_lowcomm.core.parts import mesh_of

PACKED = "all"


class OptimizerState:
    """The state of a model's `optimizers`; to be made while their settings are as the program made them.

    Raises:
        ModelError: what cannot be saved, by name, or an optimizer that does not fit the model.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._parameters = {clean_name(name): p for name, p in model.named_parameters()}
        self._names = {p: name for name, p in self._parameters.items()}
        _check_owners(self._names, optimizers)
        for optimizer in optimizers:
            _check_steps(optimizer)
        self._settings = [[copied(_settings(group)) for group in o.param_groups] for o in optimizers]
        self._numbers = [copied(_numbers(o)) for o in optimizers]
        self._attributes = [_hidden(o) for o in optimizers]
        self.check()

    def check(self) -> None:
        """ModelError, by name, on anything that cannot be saved. To be called again after the first step: most of the
        state exists only then."""
        try:
            self.tensors()
        except CheckpointError as error:
            raise ModelError(f"the optimizer cannot be saved or given to a replica that joins: {error}") from error
        for optimizer, before in zip(self._optimizers, self._attributes, strict=True):
            changed = [name for name, tensors in _hidden(optimizer).items() if tensors != before.get(name)]
            if changed and not _saves_itself(optimizer):
                raise ModelError(
                    f"{type(optimizer).__name__} keeps tensors in its attribute {changed[0]!r}, which nobody sees: "
                    "keep them in its `state`, or give it a state_dict and a load_state_dict of its own"
                )

    def reset(self) -> None:
        """Forget moments and counts, as if the optimizers had just been made; their settings stay."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def settings(self) -> list[dict[str, Any]]:
        """A copy of the settings of all groups, learning rates among them."""
        return [copied(_settings(group)) for group in self._optimizers.param_groups]

    def set(self, settings: list[dict[str, Any]]) -> None:
        """Put back what `settings` returned."""
        for group, values in zip(self._optimizers.param_groups, settings, strict=True):
            _set(group, values)

    def tensors(self, moments: bool = True) -> dict[str, Tensor]:
        """All of it as named tensors, which are not copied. Without `moments` nothing of what it keeps for parameters:
        who loads that begins with none."""
        return pack([self._saved(i, optimizer, moments) for i, optimizer in enumerate(self._optimizers)], PACKED)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` returned, in this process or another; no memory is shared with it.

        Raises:
            CheckpointError: it is of other optimizers or parameters.
        """
        saved = unpack(tensors, PACKED, mesh_of(self._parameters))
        if len(saved) != len(self._optimizers.all):
            raise CheckpointError(f"the saved state has {len(saved)} optimizers, here are {len(self._optimizers.all)}")
        for number, (optimizer, state) in enumerate(zip(self._optimizers, saved, strict=True)):
            if "whole" in state:
                optimizer.load_state_dict(copied(state["whole"]))
            else:
                self._load(number, optimizer, state)

    def _saved(self, number: int, optimizer: torch.optim.Optimizer, moments: bool) -> dict[str, Any]:
        if _saves_itself(optimizer):
            return {"whole": optimizer.state_dict()}
        state = optimizer.state if moments else {}
        of_parameters = {self._names[p]: s for p, s in state.items() if isinstance(p, nn.Parameter) and s}
        groups = zip(optimizer.param_groups, self._settings[number], strict=False)
        return {
            "held": [[self._names[p] for p in group["params"]] for group in optimizer.param_groups],
            "settings": [_changed(_settings(group), made) for group, made in groups],
            "numbers": _changed(_numbers(optimizer), self._numbers[number]),
            "state": of_parameters,
            "other": {key: value for key, value in optimizer.state.items() if not isinstance(key, nn.Parameter)},
        }

    def _load(self, number: int, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        held = [[self._names[p] for p in group["params"]] for group in optimizer.param_groups]
        if [sorted(names) for names in held] != [sorted(names) for names in saved["held"]]:
            before, now = _first_difference(saved["held"], held)
            raise CheckpointError(
                f"{type(optimizer).__name__} held {before} where the state was saved, and holds {now} here: make it "
                "over the same parameters, in the same groups"
            )
        optimizer.state.clear()
        for name, state in saved["state"].items():
            parameter = self._parameters[name]
            optimizer.state[parameter] = {k: _placed(v, parameter, optimizer) for k, v in state.items()}
        for key, value in saved["other"].items():
            optimizer.state[key] = copied(value)
        for group, made, changed in zip(optimizer.param_groups, self._settings[number], saved["settings"], strict=True):
            _set(group, made | changed)
        _set(vars(optimizer), self._numbers[number] | saved["numbers"])


def _check_owners(names: Mapping[nn.Parameter, str], optimizers: Optimizers) -> None:
    """ModelError on a parameter that is not of the model, or that two optimizers step."""
    seen: set[nn.Parameter] = set()
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                where = f"group {number} of {type(optimizer).__name__}"
                if parameter not in names:
                    raise ModelError(
                        f"{where} holds a parameter of shape {list(parameter.shape)} that is not of the model, so "
                        "nobody would exchange or save it: make it part of the model that is wrapped"
                    )
                if parameter in seen:
                    raise ModelError(f"{where} holds {names[parameter]!r}, which is stepped twice: give it to one")
                seen.add(parameter)


def _check_steps(optimizer: torch.optim.Optimizer) -> None:
    """ModelError on one that hides others, or that cannot be stepped without a closure."""
    name = type(optimizer).__name__
    inside = [other for other in inner_optimizers(optimizer) if other.state is not optimizer.state]
    if inside and not _saves_itself(optimizer):
        kinds = " and ".join(type(other).__name__ for other in inside)
        raise ModelError(
            f"{name} holds {kinds}, whose state is not in its own: give a list, context.wrap(model, [first, second]), "
            f"or give {name} a state_dict and a load_state_dict of its own"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ModelError(f"{name} cannot step without a closure: take an optimizer that steps on gradients")


def _saves_itself(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


@cache
def _usual() -> frozenset[str]:
    """Attributes that torch and its schedulers give any optimizer. The first optimizer of a process loads torch's
    compiler, which takes a second."""
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.empty(0))]))) | {"_step_count", "_opt_called"}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer counts in attributes of its own."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _usual()}
    plain = (bool, int, float, str)
    return {n: v for n, v in own.items() if isinstance(v, plain) or (isinstance(v, Tensor) and v.dim() == 0)}


def _hidden(optimizer: torch.optim.Optimizer) -> dict[str, list[tuple[int, int]]]:
    """Identity and version of the tensors in attributes, but for parameters and numbers."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _usual() | _numbers(optimizer).keys()}
    found = {n: [t for t in tensors_in(v) if not isinstance(t, nn.Parameter)] for n, v in own.items()}
    return {name: [(id(t), t._version) for t in tensors] for name, tensors in found.items() if tensors}


def _changed(now: dict[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in now.items() if name not in made or not _same(value, made[name])}


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _set(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        old = target.get(name)
        if isinstance(old, Tensor) and isinstance(value, Tensor) and old.shape == value.shape:
            old.copy_(value)  # a compiled or captured step reads it where it is
        else:
            target[name] = copied(value)


def _placed(value: Any, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> Any:
    """A copy where the optimizer has it: with its parameter; counts on the CPU unless it is fused or capturable (torch
    issue 103256)."""
    if isinstance(value, Tensor):
        on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        return value.to(parameter.device if value.dim() or on_device else "cpu", copy=True)
    if isinstance(value, dict):
        return {key: _placed(inner, parameter, optimizer) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_placed(inner, parameter, optimizer) for inner in value)
    return value


def _first_difference(before: list[list[str]], now: list[list[str]]) -> tuple[str, str]:
    if len(before) != len(now):
        return f"{len(before)} groups", f"{len(now)}"
    number = next(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if sorted(a) != sorted(b))
    gone, new = set(before[number]) - set(now[number]), set(now[number]) - set(before[number])
    return f"{sorted(gone) or 'no others'} in group {number}", f"{sorted(new) or 'none of them'}"
