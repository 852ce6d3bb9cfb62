import json
import time

import numpy as np
import pytest
import torch

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.data import Batches, ShardedSampler, dealt_in_order, in_order
from ray_lowcomm.data.samples import LabelledImages, Subset, TokenWindows, evenly_spaced


class Plain:
    """A user's own data set: one sample at a time."""

    tokens_per_sample = 1

    def __init__(self, shapes):
        self.shapes = shapes

    def __len__(self):
        return len(self.shapes)

    def __getitem__(self, index):
        return {"image": torch.full(self.shapes[index], float(index)), "label": torch.tensor(index)}


def make(dataset, replicas=1, index=0, batch_size=4):
    return Batches(dataset, ShardedSampler(len(dataset), replicas, index, seed=0), batch_size)


def windows(count=100, length=8):
    return TokenWindows(np.arange(count * length + 1, dtype=np.uint16), length, vocab_size=2**16)


def test_text_batches_hold_the_next_token_as_label():
    batches = make(windows())
    batch = next(batches)
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "input_ids": ((4, 8), torch.int64),
        "labels": ((4, 8), torch.int64),
    }
    assert torch.equal(batch["input_ids"] + 1, batch["labels"])
    assert batch["labels"].is_contiguous()
    assert batch["input_ids"].is_contiguous()
    assert batches.tokens == 32


def test_a_batch_is_its_samples():
    dataset = windows()
    batch = dataset.batch(np.array([3, 0, 7]))
    assert torch.equal(batch["input_ids"], torch.stack([dataset[i]["input_ids"] for i in (3, 0, 7)]))
    assert dataset[7]["input_ids"][0] == 56


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_parts_put_together_are_the_batches_of_one_process(shards):
    dataset = windows(30)
    whole = make(dataset, replicas=2, index=1, batch_size=4)
    parts = [Batches(dataset, ShardedSampler(30, 2, 1, seed=0), 4, shard, shards) for shard in range(shards)]
    for _ in range(9):
        batch, dealt = next(whole), [next(part) for part in parts]
        for name, wanted in batch.items():
            assert torch.equal(torch.cat([one[name] for one in dealt]), wanted)
        for part in parts:
            assert part.state_dict() == whole.state_dict()
            assert part.last.tolist() == whole.last.tolist()
    assert sum(part.tokens for part in parts) == whole.tokens


def test_a_batch_that_cannot_be_dealt_is_refused():
    with pytest.raises(ValueError, match=r"batch_size = 4: must be at least 1, and a multiple of 3"):
        Batches(windows(), ShardedSampler(100, 1, 0, seed=0), 4, 0, 3)


@pytest.mark.parametrize(("length", "batch_size", "shards"), [(17, 16, 2), (7, 4, 4), (5, 8, 2), (6, 2, 3), (3, 3, 1)])
def test_samples_in_order_are_dealt_once_in_as_many_batches_to_each(length, batch_size, shards):
    dataset = Plain([(1,)] * length)
    dealt = [list(dealt_in_order(dataset, batch_size, shard, shards)) for shard in range(shards)]
    assert {len(batches) for batches in dealt} == {-(-length // batch_size)}
    counted = [batch["label"][:size].tolist() for batches in zip(*dealt, strict=True) for batch, size in batches]
    assert sorted(number for numbers in counted for number in numbers) == list(range(length))
    assert all(len(batch["label"]) >= 1 for batches in dealt for batch, _ in batches)


def test_a_run_too_short_for_a_window_is_repeated():
    dataset = TokenWindows(np.frombuffer(b"abc", dtype=np.uint8), 8)
    assert len(dataset) == 1
    assert bytes(dataset[0]["labels"].tolist()) == b"bcabcabc"


def test_samples_of_a_users_data_set_are_stacked():
    batch = next(make(Plain([(1, 2, 2)] * 10)))
    assert batch["image"].shape == (4, 1, 2, 2)
    assert torch.equal(batch["image"][:, 0, 0, 0].long(), batch["label"])


def test_samples_of_different_shapes():
    with pytest.raises(DataError, match="different shapes"):
        next(in_order(Plain([(1, 2, 2), (1, 3, 3)]), 2))


@pytest.mark.parametrize(("length", "replicas", "index"), [(100, 3, 1), (2, 5, 4)])
def test_position_survives_json_exactly(length, replicas, index):
    first, second = (make(windows(length), replicas, index) for _ in range(2))
    for _ in range(7):
        next(first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(40):
        assert torch.equal(next(first)["input_ids"], next(second)["input_ids"])


def test_merged_positions_go_to_a_fleet_of_another_size():
    old = [make(windows(), 2, index) for index in range(2)]
    seen = [next(batches)["input_ids"][:, 0].tolist() for batches in old for _ in range(5)]
    merged = {"positions": {k: v for batches in old for k, v in batches.state_dict()["positions"].items()}}
    new = [make(windows(), 3, index) for index in range(3)]
    for batches in new:
        batches.load_state_dict(merged)
    seen += [next(batches)["input_ids"][:, 0].tolist() for batches in new for _ in range(5)]
    tokens = [token for batch in seen for token in batch]
    assert len(tokens) == 100
    assert len(set(tokens)) == 100


def test_position_of_another_data_set():
    state = make(windows(100)).state_dict()
    with pytest.raises(DataError, match="100 samples, this one has 90"):
        make(windows(90)).load_state_dict(state)


def test_in_order_is_everything_once():
    sizes = [len(batch["labels"]) for batch in in_order(windows(10), 4)]
    assert sizes == [4, 4, 2]


def test_evenly_spaced():
    subset = evenly_spaced(windows(100), 7)
    assert subset.indices.tolist() == [0, 14, 28, 42, 57, 71, 85]
    assert torch.equal(subset[2]["input_ids"], windows(100)[28]["input_ids"])
    assert evenly_spaced(windows(5), 7) is not subset
    assert len(evenly_spaced(windows(5), 7)) == 5


def test_subset_of_images():
    images = LabelledImages(torch.arange(6.0).reshape(6, 1, 1, 1), torch.arange(6), classes=6)
    subset = Subset(images, np.array([5, 2, 0]))
    assert subset.batch(np.array([2, 0]))["label"].tolist() == [0, 5]
    assert subset.model_defaults == {"channels": 1, "classes": 6}


def test_a_batch_costs_next_to_nothing():
    dataset = TokenWindows(np.zeros(2**20, dtype=np.uint8), 64)
    batches = make(dataset, batch_size=16)
    times = []
    for _ in range(500):
        start = time.perf_counter()
        next(batches)
        times.append(time.perf_counter() - start)
    assert np.median(times) < 100e-6
