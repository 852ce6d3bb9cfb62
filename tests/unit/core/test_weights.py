"""Weights from elsewhere: all fits and is copied, or each difference is named and nothing is changed."""

import pytest
import torch
from torch import nn

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.weights import copy_into


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.norm = nn.BatchNorm1d(3)


def _given(model, **changes):
    state = {name: value.clone() + 1 for name, value in model.state_dict().items()}
    return {name: value for name, value in {**state, **changes}.items() if value is not None}


def _refused(model, given):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ModelError, match=r"^here does not fit the model: ") as caught:
        copy_into(model, given, "here")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix("here does not fit the model: ")


def test_what_fits_is_copied_buffers_included():
    model = Tied()
    given = _given(model)
    assert copy_into(model, given, "here") == ()
    assert all(torch.equal(value, given[name]) for name, value in model.state_dict().items())


def test_wrappers_in_names_do_not_count():
    model = Tied()
    given = {f"module._orig_mod.{name}": value for name, value in _given(model).items()}
    copy_into(torch.compile(model, backend="eager"), given, "here")
    assert torch.equal(model.norm.bias, given["module._orig_mod.norm.bias"])


def test_of_tied_tensors_one_is_enough_and_different_ones_are_refused():
    model = Tied()
    copy_into(model, _given(model, **{"second.weight": None}), "here")
    said = _refused(model, _given(model, **{"second.weight": torch.ones(3, 3) * 5}))
    assert said == "tied in the model and different there: first.weight and second.weight"


def test_every_difference_is_named_at_once():
    model = Tied()
    given = _given(
        model,
        **{
            "first.weight": torch.ones(2, 3),
            "second.weight": None,
            "norm.bias": None,
            "norm.running_var": torch.full((3,), float("nan")),
            "steps": torch.tensor(1.5),
            "extra": torch.ones(1),
            "more": torch.ones(1),
        },
    )
    assert _refused(model, given) == (
        "missing: norm.bias; unexpected: extra, more; other shapes: first.weight ([2, 3] there, [3, 3] in the model); "
        "other types: steps (torch.float32 there, torch.int64 in the model); not finite: norm.running_var"
    )


def test_of_many_differences_the_first_five_are_named_and_the_others_counted():
    assert _refused(nn.Linear(2, 2), {f"x{i}": torch.ones(1) for i in range(8)}) == (
        "missing: weight, bias; unexpected: x0, x1, x2, x3, x4 and 3 more"
    )


def test_rounding_is_said_and_widening_is_not():
    low = nn.Linear(2, 2).bfloat16()
    given = {name: value.float() + 0.001 for name, value in low.state_dict().items()}
    assert copy_into(low, given, "here") == (
        "here: tensors were rounded to the model's types: 2 from float32 to bfloat16",
    )
    assert torch.equal(low.weight, given["weight"].bfloat16())
    assert copy_into(nn.Linear(2, 2), low.state_dict(), "here") == ()


def test_values_that_are_infinite_in_the_model_itself_may_be_so():
    model = nn.Module()
    model.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    assert copy_into(model, {"mask": torch.tensor([-float("inf"), 0.0])}, "here") == ()


def test_empty_tensors_are_not_tied():
    model = nn.ParameterDict({"a": nn.Parameter(torch.empty(0)), "b": nn.Parameter(torch.empty(0))})
    assert _refused(model, {"a": torch.empty(0)}) == "missing: b"
