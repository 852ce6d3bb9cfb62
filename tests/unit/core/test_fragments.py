"""Fragments of a layout: every element in one, about equal, whole layers, and states by whole tensors."""

from typing import Any

import pytest
import torch

from ray_lowcomm.core.chunks import ChunkPlan
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.fragments import Fragment, cut, joined, layer_of, whole
from ray_lowcomm.core.layout import Layout
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.models.byte_gpt import ByteGPT
from tests.contract.models import MODELS, tied


def _layout(*shapes: tuple[int, ...], names: tuple[str, ...] = ()) -> Layout:
    return Layout(names or tuple(f"t{i}" for i in range(len(shapes))), shapes)


def _of(model: torch.nn.Module) -> Layout:
    return Tracks(model, torch.optim.SGD(model.parameters(), lr=0.1)).layout


AWKWARD: dict[str, Layout] = {
    "one matrix": _layout((7, 3)),
    "one vector": _layout((11,)),
    "scalars": _layout((), (), (), ()),
    "empty": _layout((0,), (3, 0), (4, 4), (0, 5), (4,), (0,)),
    "prime": _layout((127, 13), (127,), (2, 127)),
    "4-d": _layout((16, 3, 3, 3), (16,), (8, 16, 1, 1)),
    "one is large": _layout((1000, 4), (3,), (5, 5), ()),
    "layers": _layout(*[(8, 8)] * 12, names=tuple(f"blocks.{i // 2}.{'ab'[i % 2]}" for i in range(12))),
    **{name: _of(model()) for name, model in MODELS.items() if name != "compiled"},
}


def _fragments(layout: Layout, **options: Any) -> list[tuple[Fragment, ...]]:
    found = []
    for count in range(1, 9):
        try:
            found.append(cut(layout, count, **options))
        except SettingError:
            break
    assert found
    return found


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("order", ["strided", "sequential"])
@pytest.mark.parametrize("rows", [1, 4])
def test_every_element_is_in_exactly_one_fragment(name: str, order: str, rows: int) -> None:
    layout = AWKWARD[name]
    for fragments in _fragments(layout, order=order, rows=rows):
        places = [torch.arange(layout.numel)[at] for fragment in fragments for at in fragment.slices]
        assert torch.cat([*places, torch.arange(0)]).sort().values.tolist() == list(range(layout.numel))
        assert sorted({piece.tensor for f in fragments for piece in f.pieces}) == list(range(len(layout.shapes)))
        assert all(fragment.layout.numel for fragment in fragments)
        assert fragments == cut(layout, len(fragments), order, rows)  # type: ignore[arg-type]
        for i, fragment in enumerate(fragments):
            assert (fragment.index, fragment.count, fragment.whole) == (i, len(fragments), layout)
            assert [at.stop - at.start for at in fragment.slices] == list(fragment.layout.sizes)
            assert len(set(fragment.layout.names)) == len(fragment.pieces)


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("rows", [2, 4])
def test_tiles_are_the_same_as_uncut(name: str, rows: int) -> None:
    layout = AWKWARD[name]
    position = torch.arange(layout.numel, dtype=torch.float64)

    def tiles(part: Layout, flat: torch.Tensor) -> set[tuple[float, ...]]:
        groups = ChunkPlan.tiles(part, rows).groups
        return {tuple(chunk.reshape(-1).tolist()) for group in groups for chunk in group.whole.gather(flat)}

    for fragments in _fragments(layout, rows=rows):
        parts = [(f.layout, torch.cat([position[at] for at in f.slices])) for f in fragments]
        assert tiles(layout, position) == set().union(*(tiles(part, flat) for part, flat in parts))


@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("order", ["strided", "sequential"])
def test_fragments_of_the_byte_gpt_are_equal_to_a_tenth(rows: int, order: str) -> None:
    layout = _of(ByteGPT())
    for count in (2, 4, 8):
        fair = layout.numel / count
        sizes = [f.layout.numel for f in cut(layout, count, order, rows)]  # type: ignore[arg-type]
        assert all(0.9 * fair <= size <= 1.1 * fair for size in sizes)


def test_what_can_be_cut_anywhere_is_equal_to_a_tenth() -> None:
    for layout in (_layout((1000, 4), (3,), (5, 5), ()), _layout((50, 5), (50,), (50, 5)), _of(ByteGPT())):
        for count in (2, 3, 5, 8):
            sizes = [fragment.layout.numel for fragment in cut(layout, count)]
            assert max(sizes) - min(sizes) <= 0.2 * layout.numel / count


def test_layers_go_round_the_fragments_or_one_after_the_other() -> None:
    def layers(order: str) -> list[list[int]]:
        fragments = cut(AWKWARD["layers"], 3, order)  # type: ignore[arg-type]
        return [sorted({int(name.split(".")[1]) for name in f.layout.names}) for f in fragments]

    assert layers("strided") == [[0, 3], [1, 4], [2, 5]]
    assert layers("sequential") == [[0, 1], [2, 3], [4, 5]]


def test_a_layer_is_a_numbered_block_or_a_top_module() -> None:
    names = {
        "blocks.3.attention.weight": "blocks.3",
        "0.weight": "0",
        "model.layers.11.mlp.0.weight": "model.layers.11",
        "embedding.weight": "embedding",
        "gate": "gate",
        "conv1.weight": "conv1",
        "parts.0": "parts",
    }
    assert {name: layer_of(name) for name in names} == names


def test_more_parts_than_can_be_made_are_refused_with_how_many_can() -> None:
    with pytest.raises(SettingError, match=r"strategy\.fragments = 4: must be at most 3: the trainable tensors of"):
        cut(_layout((2, 2), (), (2,)), 4, rows=4)
    with pytest.raises(SettingError, match=r"strategy\.fragments = 5: must be at most 4"):
        cut(_layout((), (), (), ()), 5)
    with pytest.raises(SettingError, match=r"strategy\.fragments = 2: must be at most 1"):
        cut(_layout(), 2)


def test_tied_weights_are_cut_once() -> None:
    layout = _of(tied())
    assert "2.weight" not in layout.names
    names = [name for fragment in cut(layout, 2) for name in fragment.layout.names]
    assert not any(name.startswith("2.weight") for name in names)


@pytest.mark.parametrize("name", AWKWARD)
def test_states_are_of_whole_tensors_whatever_the_fragments(name: str) -> None:
    layout = AWKWARD[name]
    flat = torch.randn(layout.numel)
    state = layout.named(flat, "anchor/") | layout.named(flat * 2, "residual/") | {"other/x": torch.ones(2)}
    for fragments in _fragments(layout):
        parts = [fragment.divided(state) for fragment in fragments]
        for fragment, part in zip(fragments, parts, strict=True):
            assert set(part) == {p + n for p in ("anchor/", "residual/") for n in fragment.layout.names} | {"other/x"}
            mine = fragment.layout.flatten([part[f"anchor/{n}"] for n in fragment.layout.names])
            assert torch.equal(mine, torch.cat([flat[at] for at in fragment.slices]))
        again = joined(fragments, parts)
        assert again.keys() == state.keys()
        assert all(torch.equal(again[key], value) and again[key].shape == value.shape for key, value in state.items())
        back = torch.full_like(flat, torch.nan)
        for fragment, part in zip(fragments, parts, strict=True):
            fragment.put(fragment.layout.flatten([part[f"anchor/{n}"] for n in fragment.layout.names]), back)
        assert torch.equal(back, flat)


def test_a_tensor_of_another_shape_is_left_for_who_loads_it() -> None:
    layout = _layout((8, 2), (8, 2))
    fragment = cut(layout, 4)[1]
    assert fragment.layout.names == ("t0[4:8]",)
    assert fragment.divided({"anchor/t0": torch.ones(3)})["anchor/t0[4:8]"].shape == (3,)


def test_all_of_a_layout_is_a_fragment_with_the_same_layout() -> None:
    layout = AWKWARD["4-d"]
    assert whole(layout).layout == layout
