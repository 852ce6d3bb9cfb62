"""Named tensors as one flat vector."""

import torch

from ray_lowcomm.core.layout import Layout


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0),
        "no_rows": torch.zeros(0, 4),
        "half": torch.arange(3).bfloat16(),
        "turned": torch.arange(6.0).view(2, 3).T,
        "cube": torch.arange(24.0).view(2, 3, 4),
    }


def test_flatten_and_split_are_inverse_for_any_shape_dtype_and_stride() -> None:
    tensors = _tensors()
    layout = Layout.of(tensors, torch.float32)
    flat = layout.flatten(tensors.values())
    assert flat.dtype == torch.float32
    assert flat.shape == (layout.numel,) == (34,)
    assert layout.nbytes == 4 * 34
    for part, tensor in zip(layout.split(flat), tensors.values(), strict=True):
        assert torch.equal(part, tensor.float())


def test_flat_vector_shares_no_memory_with_its_tensors() -> None:
    for tensors in ({"a": torch.ones(3)}, {"a": torch.ones(3), "b": torch.ones(2)}):
        layout = Layout.of(tensors, torch.float32)
        flat = layout.flatten(tensors.values())
        flat.zero_()
        assert tensors["a"].sum() == 3


def test_copy_to_casts_into_the_tensors_dtypes_and_strides() -> None:
    tensors = _tensors()
    layout = Layout.of(tensors, torch.float32)
    flat = torch.arange(34.0)
    layout.copy_to(flat, list(tensors.values()))
    assert torch.equal(layout.flatten(tensors.values()), flat)  # these whole numbers are exact in bf16
    assert tensors["half"].dtype == torch.bfloat16
    assert not tensors["turned"].is_contiguous()


def test_named_views_see_later_changes() -> None:
    layout = Layout.of({"a": torch.ones(2), "b": torch.ones(())}, torch.float32)
    flat = torch.zeros(3)
    named = layout.named(flat, "x/")
    flat[2] = 5
    assert list(named) == ["x/a", "x/b"]
    assert named["x/b"].item() == 5


def test_digest_tells_names_shapes_and_dtype_apart() -> None:
    one = Layout.of({"a": torch.ones(2, 3)}, torch.float32)
    others = [
        Layout.of({"b": torch.ones(2, 3)}, torch.float32),
        Layout.of({"a": torch.ones(3, 2)}, torch.float32),
        Layout.of({"a": torch.ones(2, 3)}, torch.float64),
        Layout.of({"a": torch.ones(2, 3), "b": torch.ones(0)}, torch.float32),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 5
    assert one.digest == Layout.of({"a": torch.zeros(2, 3)}, torch.float32).digest


def test_layout_of_nothing_is_empty() -> None:
    layout = Layout.of({}, torch.float32)
    assert layout.numel == 0
    assert layout.flatten([]).shape == (0,)
    assert layout.split(torch.empty(0)) == []
