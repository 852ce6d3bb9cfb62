"""Parts of tensors: what an entry is kept for, what two parts have in common, what a file says of them."""

import json

import pytest
import torch

from ray_lowcomm.core.parts import Placing, Target, marked, marks, overlap, parameter_of, region_of, whole_part
from ray_lowcomm.core.sharding import Part

NAMES = {"0", "w", "state", "anchor", "blocks.0.w", "odd/name", "exp_avg"}


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("parameters/blocks.0.w", "blocks.0.w"),
        ("masters/odd/name", "odd/name"),
        ("parameters/unknown", None),
        ("strategy/anchor/w", "w"),
        ("strategy/anchor/anchor", "anchor"),
        ("strategy/exp_avg/anchor/odd/name", "odd/name"),
        ("strategy/shard_owners", None),
        ("strategy/owner_residual/values", None),
        ("optimizer/all", None),
        ("optimizer/all/0/state/0/exp_avg", "0"),
        ("optimizer/all/0/state/state/step", "state"),
        ("optimizer/all/1/state/odd/name/exp_avg", "odd/name"),
        ("optimizer/all/0/settings/0/lr", None),
        ("optimizer/all/0/whole/state/0/exp_avg", None),
        ("stateful/average/module.w", "w"),
        ("stateful/average/n_averaged", None),
        ("buffers/w", None),
        ("random/cpu", None),
    ],
)
def test_what_an_entry_is_kept_for(entry, name):
    assert parameter_of(entry, NAMES) == name


@pytest.mark.parametrize("shape", [(7,), (5, 3), (4, 6, 2)])
@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 0)])
def test_parts_cut_one_way_put_together_are_those_cut_another_way(shape, dims):
    before, after = (dim % len(shape) for dim in dims)
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    for count, others in ((2, 3), (3, 2), (4, 1), (1, 4)):
        for wanted, expected in cut(whole, others, after):
            made = torch.full(wanted.size, -1.0)
            for held, values in cut(whole, count, before):
                found = overlap(held, wanted)
                if found is not None:
                    inside, here = found
                    region_of(made, here).copy_(region_of(values, inside))
            assert torch.equal(made, expected)


def cut(whole, count, dim):
    """(part, values) of each of `count`, as torch.chunk cuts; those for whom nothing is left have nothing."""
    chunks, at, found = list(whole.chunk(count, dim)), 0, []
    chunks += [whole.narrow(dim, 0, 0)] * (count - len(chunks))
    for chunk in chunks:
        start = tuple(at if d == dim else 0 for d in range(whole.dim()))
        found.append((Part(tuple(whole.shape), start, tuple(chunk.shape)), chunk))
        at += chunk.shape[dim]
    return found


def test_what_is_in_the_shape_of_a_distributed_parameter_is_marked():
    wanted = {
        "w": Target(Part((4, 3), (2, 0), (2, 3)), Placing((4, 3), (0,))),
        "whole": Target(whole_part((5,))),
    }
    moment, step, plain = torch.zeros(2, 3), torch.zeros(()), torch.zeros(5)
    state = {"optimizer/all/0/state/w/exp_avg": moment, "optimizer/all/0/state/w/step": step, "parameters/whole": plain}
    found = marks(state, wanted)
    assert found.keys() == {"optimizer/all/0/state/w/exp_avg"}
    assert marked(found["optimizer/all/0/state/w/exp_avg"], (2, 3)) == wanted["w"].part
    assert marked(None, (2, 3)) is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", json.dumps({"shape": [4], "start": [0]}), json.dumps({"shape": [4, 3], "start": [3, 0]})],
)
def test_a_mark_that_makes_no_sense_is_refused(text):
    with pytest.raises(ValueError, match=r"which part it holds|outside of the whole"):
        marked(text, (2, 3))
