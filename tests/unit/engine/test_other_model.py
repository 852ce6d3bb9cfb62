"""A checkpoint that another model has made is refused with every difference, and nothing of it is taken over."""

from itertools import pairwise

import pytest
from torch import nn

from .local_run import Setup
from .test_resume import VARIANTS


class Scaled(nn.Module):
    """What copy_ would fill by broadcasting: `size` scales, saved of a model with one."""

    def __init__(self, size, buffer=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.scale = nn.Linear(1, size, bias=False)
        if buffer:
            self.register_buffer(buffer, self.scale.weight.detach().clone())

    def forward(self, x):
        return self.body(x) * self.scale.weight.mean()


def layers(*sizes):
    return lambda: nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


MODELS = {
    "fewer layers": (layers(6, 8, 8, 1), layers(6, 8, 1), ["unexpected: 2.bias, 2.weight", "other shapes: 1.bias"]),
    "more layers": (layers(6, 8, 1), layers(6, 8, 1, 1), ["missing: 2.weight, 2.bias"]),
    "one for many": (lambda: Scaled(1), lambda: Scaled(4), ["scale.weight ([1, 1] there, [4, 1] in the model)"]),
}


@pytest.mark.parametrize("variant", ["ddp", "local_adam", "diloco", "topk", "dct_buffer", "dct_paper", "desloc"])
@pytest.mark.parametrize("case", MODELS)
def test_every_difference_is_named(tmp_path, case, variant):
    saved, other, differences = MODELS[case]
    setup = Setup(str(tmp_path), VARIANTS[variant], replicas=1, model=saved)
    assert not setup.go().failure
    setup.model, setup.steps = other, 24
    failure = setup.go(resume=True).failure
    assert "does not fit: " in failure
    assert all(difference in failure for difference in differences)


@pytest.mark.parametrize("policy", ["average", "first", "local"])
def test_buffers_are_looked_at_too(tmp_path, policy):
    setup = Setup(str(tmp_path), VARIANTS["diloco"], 2, model=lambda: Scaled(1, "mean"), buffers=policy)
    assert not setup.go().failure
    setup.model, setup.steps = (lambda: Scaled(1, "ema")), 24
    failure = setup.go(resume=True).failure
    assert "buffers missing: ema; buffers unexpected: mean: another model?" in failure


def test_more_replicas_name_all_of_it_too(tmp_path):
    setup = Setup(str(tmp_path), VARIANTS["diloco"], replicas=1, model=layers(6, 8, 1))
    assert not setup.go().failure
    setup.model, setup.steps, setup.replicas = layers(6, 7, 1), 24, 2
    assert "does not fit: " in setup.go(resume=True).failure
