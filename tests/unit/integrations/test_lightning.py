"""Lightning's Trainer as a replica's loop, with the real library, against a Trainer of its own."""

import pytest
import torch

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import Fault
from ray_lowcomm.integrations.data import Resumable

from .runs import assert_alike, fit, flat, in_shards

lightning = pytest.importorskip("lightning")

from ray_lowcomm.integrations.lightning import LowCommCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library: how a loader could be faster


class Module(lightning.LightningModule):
    def __init__(self, dropout=0.0, scheduled=True):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout))
        self.head, self.scheduled = torch.nn.Linear(8, 1), scheduled

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.head(self.net(x)) - y).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self.scheduled:
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rows(count=40):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    return list(zip(x, x.sum(1, keepdim=True), strict=True))


def loader_of(data, shuffle=True):
    order = torch.Generator().manual_seed(3)
    return torch.utils.data.DataLoader(data, batch_size=4, shuffle=shuffle, generator=order)


def trainer_of(**changes):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return lightning.Trainer(**{"accelerator": "cpu", "gradient_clip_val": 0.5, **quiet, **changes})


def loop_of(module=Module, data=None, options=None, loader=None, **changes):
    def loop(context):
        model = module()
        trainer = trainer_of(callbacks=[LowCommCallback(context, **(options or {}))], **changes)
        trainer.fit(model, loader or loader_of(rows() if data is None else data))
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        return model, {"step": trainer.global_step, "lr": rate}

    return loop


@pytest.mark.parametrize("strategy", ["local_sgd", "ddp"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_replica_ends_where_the_trainer_alone_does(tmp_path, strategy, accumulate):
    """Over several epochs, whose last optimizer step has fewer micro-batches; with a schedule, and clipped."""
    left = fit(loop_of(accumulate_grad_batches=accumulate), tmp_path, replicas=1, strategy=strategy)
    alone, trainer = Module(), trainer_of(max_steps=12, accumulate_grad_batches=accumulate)
    trainer.fit(alone, loader_of(rows()))
    parameters, _, seen = left.ends[0]
    torch.testing.assert_close(parameters, flat(alone), rtol=1e-6, atol=1e-7)
    assert seen == pytest.approx({"step": 12, "lr": 1e-3})
    assert trainer.optimizers[0].param_groups[0]["lr"] == seen["lr"]
    assert not torch.allclose(parameters, flat(Module()), atol=1e-3)
    assert left.summary["inner_steps"] == 12


def test_the_loss_is_the_mean_over_the_micro_batches(tmp_path):
    losses = []

    class Seen(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            losses.append(loss.item())
            return loss

    left = fit(loop_of(Seen, accumulate_grad_batches=4), tmp_path, replicas=1, steps=3, strategy="local_sgd")
    # an epoch of ten: 4, 4 and 2
    steps = [losses[:4], losses[4:8], losses[8:]]
    assert left.summary["train_loss"] == pytest.approx(sum(sum(s) / len(s) for s in steps) / 3, rel=1e-6)


@pytest.mark.parametrize("strategy", ["diloco", "topk_diloco", {"name": "diloco", "overlap_steps": 2}, "ddp"])
def test_replicas_end_alike(tmp_path, strategy):
    def loop(context):
        share = rows()[context.index :: context.replicas]
        options = {"tokens": lambda batch: len(batch[0])}
        return loop_of(data=share, options=options, accumulate_grad_batches=2)(context)

    left = fit(loop, tmp_path, strategy=strategy)
    assert_alike(left, own=strategy == "topk_diloco")
    assert left.summary["status"] == "finished"
    assert {seen["step"] for _, _, seen in left.ends.values()} == {12}
    assert left.summary["tokens"] == 2 * 4 * 20


def test_one_that_is_killed_comes_back_and_all_end_alike(tmp_path):
    """As does one that has begun anew, and takes more steps than the run has."""
    left = fit(loop_of(), tmp_path, steps=20, faults=(Fault("kill", 1, 2, "inner"), Fault("nan", 0, 4)))
    assert_alike(left)
    assert left.summary["status"] == "finished"
    assert left.summary["lost_inner_steps"] > 0
    assert {seen["step"] for _, _, seen in left.ends.values()} == {20}


def test_a_resumed_run_goes_on_with_the_next_batch(tmp_path):
    """In the middle of an epoch, with dropout: bit for bit what the whole run has."""

    def loop(context):
        share = torch.utils.data.DataLoader(rows(48)[context.index :: 2], batch_size=4, shuffle=True)
        loader = Resumable(share)
        model = lambda: Module(dropout=0.3, scheduled=False)  # noqa: E731
        options = {"local_stateful": {"data": loader}}
        return loop_of(model, loader=loader, options=options, accumulate_grad_batches=2)(context)

    whole = fit(loop, tmp_path / "whole", steps=16)
    fit(loop, tmp_path / "parts", steps=8)
    resumed = fit(loop, tmp_path / "parts", steps=16, resume=True)
    for index, (parameters, digest, seen) in whole.ends.items():
        assert torch.equal(resumed.ends[index][0], parameters)
        assert resumed.ends[index][1:] == (digest, seen)
    assert resumed.summary["train_loss"] == whole.summary["train_loss"]


def test_its_checkpoints_are_switched_off_and_said_to_be(tmp_path):
    def with_saving(context):
        saving = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path / "own")
        model = Module()
        trainer = trainer_of(callbacks=[LowCommCallback(context), saving], enable_checkpointing=True)
        trainer.fit(model, loader_of(rows()))
        return model, None

    left = fit(with_saving, tmp_path, steps=4)
    assert not (tmp_path / "own").exists()
    assert any("ModelCheckpoint is switched off" in text for text in left.notices)


class Manual(Module):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "changes", "said"),
    [
        (Module, {"max_steps": 7}, "max_steps = 7: the run has 12 steps; leave max_steps out"),
        (Manual, {"gradient_clip_val": None}, "manual optimization steps optimizers on its own"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, module, changes, said):
    with pytest.raises(FleetError, match=said):
        fit(loop_of(module, **changes), tmp_path, replicas=1)


def test_shards_of_a_replica_are_refused(tmp_path):
    with pytest.raises(FleetError, match="shards_per_replica = 2: a trainer trains a model that is whole"):
        fit(in_shards(loop_of()), tmp_path, replicas=1)


def test_its_own_resume_is_refused(tmp_path):
    alone = trainer_of(max_steps=2)
    alone.fit(Module(), loader_of(rows()))
    alone.save_checkpoint(tmp_path / "last.ckpt")

    def loop(context):
        trainer = trainer_of(callbacks=[LowCommCallback(context)])
        trainer.fit(Module(), loader_of(rows()), ckpt_path=str(tmp_path / "last.ckpt"))

    with pytest.raises(FleetError, match=r"trainer\.fit\(ckpt_path=…\) has no place in a fleet"):
        fit(loop, tmp_path, replicas=1)
