import math

import pytest
import torch

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.models import ByteGPT, check_loss


def batch(rows=3, length=20, vocab_size=256):
    torch.manual_seed(1)
    tokens = torch.randint(vocab_size, (rows, length + 1))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def test_size_and_first_loss():
    torch.manual_seed(0)
    model = ByteGPT()
    assert sum(p.numel() for p in model.parameters()) == 131_712
    assert list(model.buffers()) == []
    loss = check_loss(model(batch()))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_it_does_not_see_the_future():
    torch.manual_seed(0)
    model = ByteGPT(heads=4)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = batch()["input_ids"]
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 256
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.allclose(before[:, :12], after[:, :12], atol=1e-5)
    assert not torch.allclose(before[:, 12:], after[:, 12:], atol=1e-2)
    assert not torch.allclose(before[:, 5], before[:, 6], atol=1e-2)


def test_attention_prefers_what_is_near():
    bias = ByteGPT(heads=2)._attention_bias(4, torch.device("cpu"))
    far = float("-inf")
    assert bias[0, 0].tolist() == [[0, far, far, far], [-1, 0, far, far], [-2, -1, 0, far], [-3, -2, -1, 0]]
    assert bias[0, 1, 3].tolist() == [-1.5, -1, -0.5, 0]


def test_the_same_seed_gives_the_same_bits():
    def train():
        torch.manual_seed(3)
        model = ByteGPT(dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            model(batch()).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(), train())


def test_it_learns():
    torch.manual_seed(0)
    model = ByteGPT(layers=1, width=32, vocab_size=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    period = torch.arange(41) % 7
    data = {"input_ids": period[None, :-1].repeat(4, 1), "labels": period[None, 1:].repeat(4, 1)}
    for _ in range(60):
        optimizer.zero_grad()
        model(data).backward()
        optimizer.step()
    assert model(data).item() < 0.1


def test_tied_weights_are_one():
    model = ByteGPT(tied=True)
    assert model.head.weight is model.embedding.weight
    check_loss(model(batch())).backward()


def test_in_bfloat16():
    model = ByteGPT().to(torch.bfloat16)
    loss = check_loss(model(batch()))
    assert loss.dtype == torch.float32
    loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        check_loss(ByteGPT()(batch())).backward()


@pytest.mark.parametrize(
    ("args", "message"),
    [({"heads": 3}, "width = 64: must be a multiple of model.args.heads = 3"), ({"layers": 0}, "layers = 0")],
)
def test_sizes_that_make_no_model(args, message):
    with pytest.raises(ModelError, match=message):
        ByteGPT(**args)
