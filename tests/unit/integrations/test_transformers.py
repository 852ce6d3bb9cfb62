"""The Trainer of transformers as a replica's loop, with the real library, against a Trainer of its own."""

import pytest
import torch

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import Fault

from .runs import assert_alike, fit, flat, in_shards

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ray_lowcomm.integrations.transformers import LowCommCallback  # noqa: E402

TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def tiny(**changes):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, **changes))


def rows(count=40):
    """Sequences of different lengths in one width: what counts is not the same in all micro-batches."""
    tokens = torch.randint(64, (count, 12), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    for i in range(count):
        labels[i, 4 + i % 9 :] = -100
    return [{"input_ids": one, "labels": label} for one, label in zip(tokens, labels, strict=True)]


def arguments(folder, **changes):
    settings = {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "logging_strategy": "no", "max_grad_norm": 0.5}
    args = {"use_cpu": True, "disable_tqdm": True, **settings, **changes}
    return transformers.TrainingArguments(str(folder / "trainer"), **args)


def trainer_of(folder, model=tiny, data=None, **changes):
    keys = ("eval_dataset", "compute_metrics")
    rest = {name: changes.pop(name) for name in keys if name in changes}
    data = rows() if data is None else data
    return transformers.Trainer(model(), arguments(folder, **changes), train_dataset=data, **rest)


def loop_of(folder, options=None, **changes):
    def loop(context):
        trainer = trainer_of(folder, **changes)
        trainer.add_callback(LowCommCallback(context, trainer, **(options or {})))
        trainer.train()
        rate = trainer.lr_scheduler.get_last_lr()[0]
        return trainer.model, {"step": trainer.state.global_step, "epoch": trainer.state.epoch, "lr": rate}

    return loop


@pytest.mark.parametrize(("strategy", "accumulate"), [("local_sgd", 1), ("local_sgd", 3), ("ddp", 3)])
def test_one_replica_ends_where_the_trainer_alone_does(tmp_path, strategy, accumulate):
    """Over several epochs, whose last optimizer step has fewer micro-batches; with a schedule, and clipped."""
    changes = {"gradient_accumulation_steps": accumulate, "lr_scheduler_type": "cosine", "warmup_steps": 3}
    left = fit(loop_of(tmp_path, **changes), tmp_path, replicas=1, strategy=strategy)
    alone = trainer_of(tmp_path, max_steps=12, save_strategy="no", **changes)
    done = alone.train()
    parameters, _, seen = left.ends[0]
    torch.testing.assert_close(parameters, flat(alone.model), rtol=1e-6, atol=1e-7)
    expected = {"step": 12, "epoch": alone.state.epoch, "lr": alone.lr_scheduler.get_last_lr()[0]}
    assert seen == pytest.approx(expected)
    assert not torch.allclose(parameters, flat(tiny()), atol=1e-3)
    assert sum(left.losses) / len(left.losses) == pytest.approx(done.training_loss, rel=1e-5)
    assert left.summary["inner_steps"] == 12


@pytest.mark.parametrize("strategy", ["diloco", "topk_diloco", {"name": "diloco", "overlap_steps": 2}, "ddp"])
def test_replicas_end_alike(tmp_path, strategy):
    """On shares of twenty samples, five batches and three steps an epoch: four epochs."""

    def loop(context):
        share = rows()[context.index :: context.replicas]
        return loop_of(tmp_path, data=share, gradient_accumulation_steps=2)(context)

    left = fit(loop, tmp_path, strategy=strategy)
    assert_alike(left, own=strategy == "topk_diloco")
    assert left.summary["status"] == "finished"
    assert {(seen["step"], seen["epoch"]) for _, _, seen in left.ends.values()} == {(12, 4.0)}
    assert left.summary["tokens"] == 4 * sum(int((row["labels"][1:] != -100).sum()) for row in rows())


def test_one_that_is_killed_comes_back_and_all_end_alike(tmp_path):
    """As does one that has begun anew, and takes more steps than the trainer's limit."""
    left = fit(loop_of(tmp_path), tmp_path, steps=20, faults=(Fault("kill", 1, 2, "inner"), Fault("nan", 0, 4)))
    assert_alike(left)
    assert left.summary["status"] == "finished"
    assert left.summary["lost_inner_steps"] > 0
    assert {seen["step"] for _, _, seen in left.ends.values()} == {20}


def test_a_resumed_run_goes_on_with_the_next_batch(tmp_path):
    """In the middle of an epoch, with dropout: bit for bit what the whole run has."""
    changes = {"lr_scheduler_type": "constant", "gradient_accumulation_steps": 2, "data": rows(48)}
    loop = loop_of(tmp_path, model=lambda: tiny(attention_dropout=0.3), **changes)
    whole = fit(loop, tmp_path / "whole", steps=16)
    fit(loop, tmp_path / "parts", steps=8)
    resumed = fit(loop, tmp_path / "parts", steps=16, resume=True)
    for index, (parameters, digest, seen) in whole.ends.items():
        assert torch.equal(resumed.ends[index][0], parameters)
        assert resumed.ends[index][1:] == (digest, seen)
    assert whole.ends[0][2]["epoch"] == pytest.approx(16 * 8 / 48)
    assert resumed.summary["train_loss"] == whole.summary["train_loss"]


def test_its_evaluation_and_its_model_are_the_run_s(tmp_path):
    def accuracy(prediction):
        return {"positions": float(prediction.label_ids.shape[1])}

    loop = loop_of(tmp_path, eval_dataset=rows(8), compute_metrics=accuracy)
    left = fit(loop, tmp_path, eval_every=1)
    again = transformers.LlamaForCausalLM.from_pretrained(f"{left.path}/model")
    assert torch.equal(flat(again), left.ends[0][0])
    alone = trainer_of(tmp_path, model=lambda: again, eval_dataset=rows(8))
    assert left.summary["val_loss"] == pytest.approx(alone.evaluate()["eval_loss"], rel=1e-5)
    assert left.summary["metrics"]["eval_positions"] == 12


def test_tokens_and_options_are_the_user_s(tmp_path):
    loop = loop_of(tmp_path, {"tokens": lambda inputs: inputs["input_ids"].numel(), "remarks": ("mine",)})
    left = fit(loop, tmp_path, steps=4)
    assert left.summary["tokens"] == 2 * 4 * 4 * 12
    assert any("mine" in text for text in left.notices)


def test_its_checkpoints_are_switched_off_and_said_to_be(tmp_path):
    left = fit(loop_of(tmp_path, save_strategy="steps", save_steps=1), tmp_path, steps=4)
    assert not list((tmp_path / "trainer").glob("checkpoint-*"))
    assert any("save_strategy = 'steps' is switched off" in text for text in left.notices)
    quiet = fit(loop_of(tmp_path), tmp_path, steps=4)
    assert not any("save_strategy" in text for text in quiet.notices)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_steps": 7}, "max_steps = 7: the run has 12 steps; leave max_steps out"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size begins the training again"),
        (
            {
                "load_best_model_at_end": True,
                "save_strategy": "epoch",
                "eval_strategy": "epoch",
                "eval_dataset": rows(4),
            },
            "load_best_model_at_end needs the trainer's own checkpoints",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, changes, said):
    with pytest.raises(FleetError, match=said):
        fit(loop_of(tmp_path, **changes), tmp_path, replicas=1)


def test_shards_of_a_replica_are_refused(tmp_path):
    with pytest.raises(FleetError, match="shards_per_replica = 2: a trainer trains a model that is whole"):
        fit(in_shards(loop_of(tmp_path)), tmp_path, replicas=1)


def test_its_own_resume_is_refused(tmp_path):
    alone = trainer_of(tmp_path, max_steps=2, save_steps=2)
    alone.train()

    def loop(context):
        trainer = trainer_of(tmp_path)
        trainer.add_callback(LowCommCallback(context, trainer))
        trainer.train(resume_from_checkpoint=True)

    with pytest.raises(FleetError, match="resume_from_checkpoint=… has no place in a fleet".replace("…", ".*")):
        fit(loop, tmp_path, replicas=1)
