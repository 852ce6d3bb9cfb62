import pytest
import torch

from ray_lowcomm.core.staging import to_device, to_host


def test_what_is_on_the_cpu_stays_as_it_is():
    tensor = torch.arange(5.0)
    assert to_host(tensor) is tensor
    assert to_device(tensor, "cpu") is tensor


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_there_and_back_through_pinned_memory(dtype):
    tensor = torch.arange(3 << 20).reshape(3, -1).to(dtype)
    there = to_device(tensor, "cuda")
    assert there.device.type == "cuda"
    back = to_host(there.clone())
    assert back.is_pinned()
    assert torch.equal(back, tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_is_whole_although_the_gpu_is_busy():
    value = torch.ones(1 << 22, device="cuda")
    for _ in range(200):
        value = value * 1.0 + 1.0
    assert torch.equal(to_host(value), torch.full((1 << 22,), 201.0))
