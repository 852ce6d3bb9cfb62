"""Weights from elsewhere into a model: each difference is named, and nothing is changed unless all of it fits."""

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.guards import all_finite
from ray_lowcomm.core.names import clean_name, model_state
from ray_lowcomm.core.sharding import local, part_of

_LISTED = 5


def copy_into(model: nn.Module, given: Mapping[str, Tensor], what: str) -> tuple[str, ...]:
    """Copy weights and buffers `given` by name into `model`, in its dtypes and on its device.

    Names count without what torch.compile and DistributedDataParallel put into them; of tensors that share memory in
    the model one is enough. Of a tensor that is distributed here this process takes its part of the whole one that is
    given. `what` names the source in messages. Returns what the user should know.

    Raises:
        ModelError: they do not fit, with every difference; nothing was changed.
    """
    wanted, clean = model_state(model), {clean_name(name): tensor for name, tensor in given.items()}
    problems = [text for text in _problems(wanted, clean) if text]
    if problems:
        raise ModelError(f"{what} does not fit the model: {'; '.join(problems)}")
    with torch.no_grad():
        for name, tensor in clean.items():
            here = part_of(wanted[name])
            local(wanted[name]).copy_(tensor[here.slices])
    return rounded(wanted, clean, what)


def differences(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """How tensors `given` by name differ from those `wanted`: in names, shapes, and whether they are floating-point.

    One text for each kind of difference, with some of the names; of those that are wanted, and share memory, one is
    enough. Only names, shapes and dtypes of `given` matter.
    """
    both = [name for name in given if name in wanted]
    filled = {_place(wanted[name]) for name in both}
    missing = [n for n, t in wanted.items() if n not in given and _place(t) not in filled]
    other_shape = [n for n in both if given[n].shape != wanted[n].shape]
    other_kind = [n for n in both if given[n].is_floating_point() != wanted[n].is_floating_point()]
    texts = (
        _listing("missing", missing),
        _listing("unexpected", [name for name in given if name not in wanted]),
        _listing(
            "other shapes",
            [f"{n} ({list(given[n].shape)} there, {list(wanted[n].shape)} in the model)" for n in other_shape],
        ),
        _listing("other types", [f"{n} ({given[n].dtype} there, {wanted[n].dtype} in the model)" for n in other_kind]),
    )
    return [text for text in texts if text]


def _problems(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Iterable[str]:
    yield from differences(wanted, given)
    fitting = [
        n
        for n, t in given.items()
        if n in wanted and t.shape == wanted[n].shape and t.is_floating_point() == wanted[n].is_floating_point()
    ]
    yield _listing("tied in the model and different there", _untied(wanted, given, fitting))
    floating = [n for n in fitting if given[n].is_floating_point()]
    yield _listing("not finite", [n for n in floating if not all_finite(given[n]) and all_finite(local(wanted[n]))])


def _untied(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], names: Iterable[str]) -> list[str]:
    """Pairs of names that are one tensor in the model and two different ones among those given."""
    first: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    pairs = []
    for name in names:
        other = first.setdefault(_place(wanted[name]), name)
        if other != name and not torch.equal(given[name], given[other]):
            pairs.append(f"{other} and {name}")
    return pairs


def _place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    """Where a tensor lies. Empty ones lie nowhere, so they are told apart by nothing: each is its own."""
    held = local(tensor)
    address = held.data_ptr() if held.numel() else id(tensor)
    return address, tensor.shape, tensor.stride()


def rounded(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], what: str) -> tuple[str, ...]:
    """A remark on values that were rounded."""
    pairs = Counter(
        (str(t.dtype).removeprefix("torch."), wanted[n].dtype) for n, t in given.items() if _loses(t, wanted[n])
    )
    texts = [f"{count} from {old} to {str(new).removeprefix('torch.')}" for (old, new), count in pairs.items()]
    return (f"{what}: tensors were rounded to the model's types: {', '.join(texts)}",) if texts else ()


def _loses(tensor: Tensor, into: Tensor) -> bool:
    return tensor.dtype != into.dtype and torch.promote_types(tensor.dtype, into.dtype) != into.dtype


def _listing(kind: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{kind}: {', '.join(names[:_LISTED])}{more}"
