import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.settings import ModelSettings
from ray_lowcomm.models import ByteGPT, SmallCNN, build, check_loss

FACTORIES = """
import torch
from torch import nn

class Inner:
    make = staticmethod(lambda width=2: nn.Linear(width, width))

def good(width, bias=True):
    return nn.Linear(width, width, bias=bias)

def raises():
    raise RuntimeError("no such\\nthing")

def nothing():
    pass

number = 3
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "users_models.py").write_text(FACTORIES)
    (tmp_path / "users_broken.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("users_models", None)


def test_by_name_with_defaults_of_the_data():
    text = build(ModelSettings(args={"width": 32}), {"vocab_size": 300, "sequence_length": 64})
    assert isinstance(text, ByteGPT)
    assert text.embedding.weight.shape == (300, 32)
    images = build(ModelSettings(name="small_cnn"), {"channels": 3, "classes": 7})
    assert isinstance(images, SmallCNN)
    assert images.head.out_features == 7


def test_args_go_before_defaults_but_must_hold_the_data():
    model = build(ModelSettings(args={"vocab_size": 320}), {"vocab_size": 300})
    assert model.embedding.num_embeddings == 320
    with pytest.raises(ModelError, match=r"model.args.vocab_size = 256: the data set needs at least 300"):
        build(ModelSettings(args={"vocab_size": 256}), {"vocab_size": 300})


def test_a_factory_of_the_user(factories):
    settings = ModelSettings(name="users_models:good", args={"width": 3, "bias": False})
    assert build(settings, {"vocab_size": 9}).weight.shape == (3, 3)
    assert build(ModelSettings(name="users_models:Inner.make")).weight.shape == (2, 2)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("gpt9", {}, "model.name = 'gpt9': must be one of byte_gpt, small_cnn, hf:CONFIG_DIR or module:factory"),
        ("byte_gpt", {"depth": 2}, "unexpected keyword argument 'depth'; its arguments: layers, width, heads"),
        ("byte_gpt", {"width": "wide"}, "the factory raised TypeError: "),
        ("byte_gpt", {"width": 30, "heads": 4}, "must be a multiple of model.args.heads = 4"),
        ("no_such_module:f", {}, "cannot import 'no_such_module': ModuleNotFoundError: No module named"),
        ("users_broken:f", {}, "cannot import 'users_broken': ModuleNotFoundError: No module named 'not_there_at_all'"),
        (":f", {}, "cannot import '': ValueError"),
        ("users_models:missing", {}, "module 'users_models' has no 'missing'"),
        ("users_models:number", {}, "'number' is a int, not a function"),
        ("users_models:good", {}, "missing a required argument: 'width'; its arguments: width, bias"),
        ("users_models:raises", {}, "the factory raised RuntimeError: no such thing"),
        ("users_models:nothing", {}, "must return a torch.nn.Module; it returned None"),
        ("hf:no/such/folder", {}, "hf:no/such/folder"),
    ],
)
def test_what_cannot_be_built_is_one_clear_line(factories, name, args, message):
    with pytest.raises(ModelError) as caught:
        build(ModelSettings(name=name, args=args))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, "it returned None"),
        (1.5, "it returned a float"),
        ({"loss": 1, "logits": 2}, "it returned a dict with keys loss, logits"),
        (nn.Linear(1, 1), "it returned a torch.nn.modules.linear.Linear"),
        (torch.zeros(3, 2, requires_grad=True), r"a tensor of shape \[3, 2\] and type float32"),
        (torch.zeros(1, requires_grad=True), r"shape \[1\]"),
        (torch.tensor(3), r"shape \[\] and type int64"),
        (torch.tensor(3.0), "without a gradient"),
    ],
)
def test_what_is_no_loss(loss, message):
    with pytest.raises(ModelError, match=message):
        check_loss(loss)


def test_a_loss():
    loss = torch.zeros(3, requires_grad=True).sum()
    assert check_loss(loss) is loss


SMALL = {"layers": 1, "width": 8}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("folder", [True, False])
def test_starting_from_given_weights(tmp_path, prefix, folder):
    given = ByteGPT(**SMALL)
    path = tmp_path / ("model.safetensors" if folder else "other.safetensors")
    save_file({prefix + name: tensor.double() for name, tensor in given.state_dict().items()}, path)
    model = build(ModelSettings(args=SMALL, init_from=str(tmp_path if folder else path)))
    assert model.head.weight.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(given.parameters(), model.parameters(), strict=True))


def test_tied_weights_and_buffers(tmp_path):
    given = build(ModelSettings(args={**SMALL, "tied": True}))
    state = {name: tensor for name, tensor in given.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    model = build(ModelSettings(args={**SMALL, "tied": True}, init_from=str(tmp_path)))
    assert torch.equal(model.head.weight, given.embedding.weight)

    images = SmallCNN(width=2)
    images({"image": torch.randn(4, 1, 8, 8), "label": torch.zeros(4, dtype=torch.int64)})
    save_file(images.state_dict(), tmp_path / "cnn.safetensors")
    settings = ModelSettings(name="small_cnn", args={"width": 2}, init_from=str(tmp_path / "cnn.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(images.buffers(), build(settings).buffers(), strict=True))


def test_weights_that_do_not_fit(tmp_path):
    state = ByteGPT(**SMALL).state_dict()

    def problem(state):
        save_file(state, tmp_path / "model.safetensors")
        with pytest.raises(ModelError) as caught:
            build(ModelSettings(args=SMALL, init_from=str(tmp_path)))
        return str(caught.value)

    missing = problem({"head.weight": state["head.weight"]})
    assert "missing: embedding.weight, " in missing
    assert missing.endswith("and 6 more")
    assert problem({**state, "extra": torch.zeros(1)}).endswith("unexpected: extra")
    assert problem({**state, "norm.bias": torch.zeros(3)}).endswith(
        "other shapes: norm.bias ([3] there, [8] in the model)"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "no such file or folder"),
        ("", "the folder has no model.safetensors"),
        ("damaged", "not a readable safetensors file"),
    ],
)
def test_weights_that_cannot_be_read(tmp_path, name, message):
    (tmp_path / "damaged").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=message):
        build(ModelSettings(args=SMALL, init_from=str(tmp_path / name)))
