"""What a replica offers to those that join, as it comes out of an object store that nobody may write to."""

import pickle

import torch

from ray_lowcomm.transport import ray_transport
from ray_lowcomm.transport.ray_transport import RayTransport


def test_an_offered_state_comes_back_as_it_was_and_can_be_written_to(monkeypatch):
    monkeypatch.setattr(ray_transport.ray, "put", lambda value: pickle.dumps(value, protocol=5))
    monkeypatch.setattr(ray_transport.ray, "get", lambda stored, timeout: pickle.loads(stored))
    state = {
        "plain": torch.randn(3, 4),
        "half": torch.randn(5).to(torch.bfloat16),
        "turned": torch.arange(6).reshape(2, 3).t(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 3),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
    }
    expected = {name: value.clone() for name, value in state.items()}
    transport = RayTransport.__new__(RayTransport)
    reference, size = transport.offer(state)
    assert size == sum(value.numel() * value.element_size() for value in state.values())
    state["plain"].zero_()  # training goes on
    back = transport.fetch(reference)
    assert back.keys() == expected.keys()
    for name, value in expected.items():
        assert back[name].dtype == value.dtype
        assert back[name].shape == value.shape
        assert torch.equal(back[name], value)
        back[name].fill_(1)
