"""The ``Trainer`` of Hugging Face transformers as the train loop of a replica. Needs the extra ``[hf]``."""

import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.engine.member import Context
from ray_lowcomm.integrations.data import Resumable
from ray_lowcomm.integrations.stepping import SHARDED, ReplicaOptimizer, Tokens, Turns, merged

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ModelError(f"LowCommCallback needs transformers: pip install 'ray_lowcomm[hf]' ({error})") from error

_APART = 1_000_003  # between two replicas' seeds of the order of the data; epochs count up from them


class LowCommCallback(TrainerCallback):
    """Makes a `trainer` the loop of the replica of `context`.

    Before ``trainer.train()`` call ``trainer.add_callback(LowCommCallback(context, trainer))``.

    The run's `steps` are the trainer's `max_steps`; `max_grad_norm` is what the replica clips with, and the learning
    rate scheduler is saved and handed on with it. With an `eval_dataset` the run's validation loss is the trainer's,
    and so are the numbers of its `compute_metrics`. The final model is written by ``save_pretrained``, of peft the
    adapters. Saving and resuming is the run's; the trainer's own is switched off. `state.global_step` is the nominal
    step.

    Each replica shuffles in an order of its own; give it its share of the data, ``dataset.shard(context.replicas,
    context.index)``. A run that is resumed goes on with the next batch.

    `tokens`, a function of the inputs of a micro-batch, says how much it weighs; by default it is the number of labels
    that count, or of samples where the trainer does not know it. `options` go to ``context.wrap``.

    Raises:
        ModelError: a trainer that cannot be one replica's loop, and what to change.
    """

    def __init__(self, context: Context, trainer: Any, *, tokens: Tokens | None = None, **options: Any) -> None:
        _check(trainer, context)
        self._context, self._trainer, self._tokens, self._options = context, trainer, tokens, options
        self._turns: Turns | None = None
        self._data: Resumable | None = None
        self._remarks = _without_saving(trainer.args)
        trainer.args.max_steps = context.steps
        seed = trainer.args.seed if trainer.args.data_seed is None else trainer.args.data_seed
        trainer.accelerator.dataloader_config.data_seed = seed + _APART * context.index
        self._intercept()

    # ---- what the trainer calls ---------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Join the fleet; from here on an optimizer step is the replica's."""
        if state.global_step > 0:
            raise ModelError(
                "trainer.train(resume_from_checkpoint=…) has no place in a fleet: leave it out, and go on with "
                "LowCommTrainer(…, run={'resume': True})"
            )
        trainer = self._trainer
        accelerated = trainer.optimizer
        inner = accelerated.optimizer
        if isinstance(inner, ReplicaOptimizer):
            raise ModelError("trainer.train() was called twice: a fleet trains once")
        replica = self._context.wrap(trainer.model, inner, **merged(self._parts(), self._options))
        # what it clips, the trainer shall not clip before: with ddp the mean of all gradients is clipped
        args.max_grad_norm = 0.0
        self._turns = turns = Turns(replica)
        accelerated.optimizer = ReplicaOptimizer(inner, turns.take)
        replica.settle()
        self._tell(state)
        # where its mean losses begin
        trainer._initial_global_step = trainer._globalstep_last_logged = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do what is due after a step, and stop where the run does."""
        if self._turns is None:
            return
        # its own limit counts steps that are taken again after a failure, too
        others_stop = control.should_training_stop and state.global_step < state.max_steps
        over = self._turns.over()
        self._tell(state)
        control.should_training_stop = over or others_stop

    # ---- what it is made of -------------------------------------------------------------------------------------

    def _tell(self, state: Any) -> None:
        assert self._turns is not None, "the fleet is joined before"
        state.global_step = self._turns.replica.step_number
        if self._data is not None:
            state.epoch = self._data.epochs

    def _parts(self) -> dict[str, Any]:
        """Options of `context.wrap`, of what the trainer has."""
        trainer, context = self._trainer, self._context
        clip = trainer.args.max_grad_norm
        return {
            "clip_norm": float(clip) if clip and math.isfinite(clip) else None,
            "stateful": {"lr_scheduler": trainer.lr_scheduler},
            "local_stateful": {} if self._data is None else {"trainer.data": self._data},
            "evaluate": self._evaluate if _evaluates(trainer) else None,
            "export": self._export if _exports(trainer, context) else None,
            "remarks": self._remarks,
        }

    def _intercept(self) -> None:
        """Of what the trainer keeps to itself: losses, the data loader, and how many epochs it would make."""
        trainer = self._trainer
        training_step, loader, values = (
            trainer.training_step,
            trainer.get_train_dataloader,
            trainer.set_initial_training_values,
        )

        def seen(model: nn.Module, inputs: Any, num_items_in_batch: Any = None, *args: Any, **kwargs: Any) -> Tensor:
            tokens = self._count(inputs, num_items_in_batch)
            loss: Tensor = training_step(model, inputs, num_items_in_batch, *args, **kwargs)
            if self._turns is not None:
                self._turns.see(loss, tokens)
            return loss

        def resumable() -> Resumable:
            self._data = Resumable(loader())
            return self._data

        trainer.training_step, trainer.get_train_dataloader = seen, resumable
        # the run says when it is over: a replica that began anew may need more epochs than its steps
        trainer.set_initial_training_values = lambda *args, **kwargs: (sys.maxsize, *values(*args, **kwargs)[1:])

    def _count(self, inputs: Any, items: Any) -> int:
        if self._tokens is not None:
            return self._tokens(inputs)
        if items is not None:  # of all micro-batches of a step together
            return 0 if self._turns is None or self._turns.begun else int(items)
        first = next((value for value in dict(inputs).values() if isinstance(value, Tensor) and value.dim()), None)
        return 0 if first is None else len(first)

    def _evaluate(self, model: nn.Module) -> dict[str, float]:
        trainer = self._trainer
        only_loss = True if trainer.compute_metrics is None else None
        output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation", prediction_loss_only=only_loss)
        numbers = {name: value for name, value in output.metrics.items() if isinstance(value, int | float)}
        return {"val_loss" if name == "eval_loss" else name: value for name, value in numbers.items()}

    def _export(self, model: nn.Module, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        written: tuple[Any, ...] = (model, self._trainer.processing_class)
        for thing in written:
            if hasattr(thing, "save_pretrained"):
                thing.save_pretrained(folder)


def _evaluates(trainer: Any) -> bool:
    return trainer.eval_dataset is not None and not isinstance(trainer.eval_dataset, dict)


def _exports(trainer: Any, context: Context) -> bool:
    return hasattr(trainer.model, "save_pretrained") and "://" not in context.spec.directory


def _without_saving(args: Any) -> tuple[str, ...]:
    """Switch the trainer's checkpoints off; a remark for who has asked for them."""
    usual = {f.name: f.default for f in fields(args) if f.name in ("save_strategy", "save_steps")}
    wanted = str(getattr(args.save_strategy, "value", args.save_strategy))
    args.save_strategy = "no"
    if wanted == "no" or (wanted == usual["save_strategy"] and args.save_steps == usual["save_steps"]):
        return ()
    return (f"save_strategy = {wanted!r} is switched off: checkpoints are the run's, see checkpoint.every",)


def _check(trainer: Any, context: Context) -> None:
    args = trainer.args
    reasons = {
        f"max_steps = {args.max_steps}: the run has {context.steps} steps; leave max_steps out": (
            args.max_steps not in (-1, context.steps)
        ),
        "fp16 needs a gradient scaler, which the trainer keeps to itself: take bf16=True": args.fp16,
        "auto_find_batch_size begins the training again, which a fleet cannot: set per_device_train_batch_size": (
            args.auto_find_batch_size
        ),
        "load_best_model_at_end needs the trainer's own checkpoints, which are switched off: leave it out": (
            args.load_best_model_at_end
        ),
        f"a replica is one process with one device, and this trainer has {max(args.world_size, args.n_gpu)}: set "
        "fleet.replicas, and fleet.resources_per_replica": args.world_size > 1 or args.n_gpu > 1,
        SHARDED.format(context.shards): context.shards > 1,
        "deepspeed and fsdp shard the model: each replica must hold all of it": (
            trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        ),
    }
    for reason, wrong in reasons.items():
        if wrong:
            raise ModelError(reason)
