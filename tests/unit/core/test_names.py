"""Which parameters take part and under which name."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.names import clean_name, model_state, named_buffers, trainable_parameters, work_dtype


class Wrapper(nn.Module):
    """Names as DistributedDataParallel makes them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_clean_name_drops_wrapper_parts_wherever_they_stand() -> None:
    assert clean_name("_orig_mod.0.weight") == "0.weight"
    assert clean_name("module._orig_mod.block.module.weight") == "block.weight"
    assert clean_name("modules.0.my_module.weight") == "modules.0.my_module.weight"
    assert clean_name("module") == "module"


def test_wrapped_compiled_and_bare_models_have_the_same_names() -> None:
    bare = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    for wrapped in (Wrapper(bare), torch.compile(bare, backend="eager"), Wrapper(torch.compile(bare, backend="eager"))):
        assert list(trainable_parameters(wrapped)) == list(trainable_parameters(bare))
        assert list(named_buffers(wrapped)) == list(named_buffers(bare))
        assert list(model_state(wrapped)) == list(bare.state_dict())


def test_tied_parameter_counts_once_under_its_first_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert list(trainable_parameters(model)) == ["0.weight", "0.bias"]


def test_frozen_parameters_take_no_part() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    assert list(trainable_parameters(model)) == ["1.weight", "1.bias"]


def test_model_without_a_trainable_parameter_is_refused() -> None:
    with pytest.raises(ModelError, match="no trainable parameter"):
        trainable_parameters(nn.Linear(2, 2).requires_grad_(False))


def test_two_parameters_with_one_clean_name_are_refused() -> None:
    model = Wrapper(nn.Linear(2, 2))
    model.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(ModelError, match=r"'weight'.*rename"):
        trainable_parameters(model)


def test_only_persistent_buffers_take_part_and_a_shared_one_once() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[1].running_mean = model[0].running_mean
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert list(named_buffers(model)) == [
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
        "1.running_var",
        "1.num_batches_tracked",
    ]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_dtypes_that_cannot_be_averaged_are_refused(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2, dtype=dtype))
    with pytest.raises(ModelError, match=r"float16, bfloat16, float32, float64"):
        trainable_parameters(model)


def test_meta_parameters_are_refused() -> None:
    with pytest.raises(ModelError, match="meta device"):
        trainable_parameters(nn.Linear(2, 2, device="meta"))


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Odd(torch.Tensor):
    """A subclass that nothing is known of."""


def test_distributed_parameters_are_taken_and_other_subclasses_refused(mesh) -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh))
    assert list(trainable_parameters(model)) == ["weight", "bias"]
    model.bias = nn.Parameter(model.bias.data.as_subclass(Odd))
    with pytest.raises(ModelError, match=r"'bias' is a Odd: of subclasses only DTensor"):
        trainable_parameters(model)


def test_work_dtype_is_float32_unless_something_is_float64() -> None:
    half, single, double = (torch.zeros(1, dtype=d) for d in (torch.bfloat16, torch.float32, torch.float64))
    assert work_dtype([half]) == work_dtype([half, single]) == work_dtype([]) == torch.float32
    assert work_dtype([half, double]) == torch.float64
