"""Plain data with tensors in it: packed into named tensors, and back."""

import collections
import enum
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.core.nested import copied, pack, unpack


def _through_a_file(value):
    return unpack(load(save({k: v.contiguous() for k, v in pack(value, "x").items()})), "x")


PLAIN = [
    None,
    True,
    3,
    -0.1,
    float("inf"),
    "naïve / text",
    b"\x00\xff",
    (1, [2, {"a": (3,)}], {4, 5}),
    {1: "int", "1": "text", None: 0, (2, "b"): 1, 0.5: []},
    {},
    torch.bfloat16,
    torch.device("cpu"),
    [torch.float32, [[]]],
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_comes_back_equal_and_of_the_same_types(value):
    back = _through_a_file(value)
    assert back == value
    assert type(back) is type(value)


def test_tensors_come_back_bit_for_bit_wherever_they_are():
    value = {
        "weights": torch.randn(3, 2, dtype=torch.float64),
        "more": [torch.tensor(3), (torch.ones(0), torch.tensor([True]), torch.randn(2).bfloat16())],
        1: torch.tensor(1.0),
        "1": torch.tensor(2.0),  # the same path as the entry before
        "strided": torch.arange(6).reshape(2, 3).t(),
    }
    back = _through_a_file(value)
    assert torch.equal(back["weights"], value["weights"])
    assert back["more"][0].item() == 3
    assert back["more"][1][0].shape == (0,)
    assert torch.equal(back["more"][1][2], value["more"][1][2])
    assert (back[1].item(), back["1"].item()) == (1.0, 2.0)
    assert torch.equal(back["strided"], value["strided"])


def test_nan_comes_back_as_nan():
    assert np.isnan(_through_a_file({"best": float("nan")})["best"])


def test_subclasses_come_back_as_what_they_are_based_on():
    class Mode(enum.IntEnum):
        MIN = 1

    Milestones = collections.Counter({5: 1})
    Point = collections.namedtuple("Point", "x y")
    value = {"mode": Mode.MIN, "milestones": Milestones, "point": Point(1, 2), "ordered": collections.OrderedDict(a=1)}
    back = _through_a_file(value)
    assert back == {"mode": 1, "milestones": {5: 1}, "point": (1, 2), "ordered": {"a": 1}}
    assert type(back["mode"]) is int


def test_numpy_comes_back():
    back = _through_a_file({"array": np.arange(6.0).reshape(2, 3), "number": np.float32(0.5), "flag": np.bool_(True)})
    assert isinstance(back["array"], np.ndarray)
    assert back["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert back["number"] == 0.5
    assert back["flag"] is True


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"lambdas": [lambda step: 1.0]}, r"x/lambdas/0 is a function, which cannot be saved: numbers"),
        ({"lock": threading.Lock()}, r"x/lock is a _thread\.lock, which"),
        ([torch.ones(2).to_sparse()], r"x/0 is a tensor that is not dense"),
        (torch.ones(2, device="meta"), r"x is a tensor that is on the meta device"),
        (torch.ones(2, dtype=torch.complex64), r"x is a tensor that is complex"),
        ({frozenset({1}): 2}, r"x has a frozenset as a key"),
    ],
)
def test_what_is_not_plain_is_named(value, said):
    with pytest.raises(CheckpointError, match=said):
        pack(value, "x")


def test_what_is_missing_or_damaged_is_an_error():
    packed = pack({"a": torch.ones(2)}, "x")
    with pytest.raises(CheckpointError, match="'x' is missing or damaged"):
        unpack({"x": packed["x"]}, "x")
    with pytest.raises(CheckpointError, match="'y' is missing"):
        unpack(packed, "y")
    with pytest.raises(CheckpointError, match="'x' is missing or damaged"):
        unpack(packed | {"x": packed["x"][:-1]}, "x")


def test_a_copy_shares_no_tensor():
    value = {"a": [torch.ones(2)], "b": (1, "text")}
    twin = copied(value)
    value["a"][0].zero_()
    assert twin["a"][0].tolist() == [1, 1]
    assert twin["b"] == (1, "text")
