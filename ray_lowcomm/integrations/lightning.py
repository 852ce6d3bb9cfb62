"""Lightning's ``Trainer`` as the train loop of a replica. Needs the extra ``[lightning]``."""

from typing import Any

from torch import Tensor

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.engine.member import Context
from ray_lowcomm.integrations.stepping import SHARDED, ReplicaOptimizer, Tokens, Turns, merged

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import Checkpoint, ProgressBar
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ModelError(f"LowCommCallback needs lightning: pip install 'ray_lowcomm[lightning]' ({error})") from error


class LowCommCallback(Callback):
    """Makes a ``Trainer(callbacks=[LowCommCallback(context)])`` the loop of the replica of `context`.

    The run's `steps` are the trainer's `max_steps`, with as many epochs as that takes; `gradient_clip_val` is what the
    replica clips with, and learning rate schedulers are saved and handed on with it. Saving and resuming is the run's:
    the trainer's checkpoints are switched off, and its progress bar. `trainer.global_step` is the nominal step.

    Give each replica its share of the data: the trainer's sampler knows nothing of the fleet. A run that is resumed
    begins an epoch, unless the data loader is a `Resumable` (see `ray_lowcomm.integrations.data`), given to the trainer
    and to this, ``local_stateful={"data": loader}``.

    `tokens`, a function of a batch, says how much it weighs; by default all steps weigh the same. `options` go to
    ``context.wrap``.

    Raises:
        ModelError: a trainer or module that cannot be one replica's loop, and what to change.
    """

    def __init__(self, context: Context, *, tokens: Tokens | None = None, **options: Any) -> None:
        self._context, self._tokens, self._options = context, tokens, options
        self._turns: Turns | None = None
        self._remarks: tuple[str, ...] = ()
        self._batch_tokens = 0

    # ---- what the trainer calls ---------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take over limits and checkpoints, before schedulers ask how many steps there are."""
        if stage != "fit":
            return
        _check(trainer, pl_module, self._context)
        trainer.fit_loop.max_epochs, trainer.fit_loop.min_epochs = -1, 0
        _limit(trainer, self._context.steps)
        saving = [callback for callback in trainer.callbacks if isinstance(callback, Checkpoint)]
        # bars of several replicas overwrite each other, and two of rich cannot be in one process
        off = (Checkpoint, ProgressBar)
        trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, off)]
        if any(getattr(c, "monitor", None) or getattr(c, "dirpath", None) for c in saving):
            self._remarks = ("ModelCheckpoint is switched off: checkpoints are the run's, see checkpoint.every",)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the fleet; from here on an optimizer step is the replica's."""
        (inner,) = trainer.optimizers  # with automatic optimization there is no other
        replica = self._context.wrap(pl_module, inner, **merged(self._parts(trainer, pl_module), self._options))
        self._turns = Turns(replica, mean=True)
        trainer.optimizers = [ReplicaOptimizer(inner, self._turns.take)]
        # the run says when it is over: a replica that began anew may need more steps than it has
        _limit(trainer, -1)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop at once if the run is over already."""
        assert self._turns is not None, "the fleet is joined before"
        if trainer.global_step > 0:
            raise ModelError(
                "trainer.fit(ckpt_path=…) has no place in a fleet: leave it out, and go on with LowCommTrainer(…, "
                "run={'resume': True})"
            )
        trainer.should_stop = self._turns.replica.finished
        self._tell(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Weigh the batch."""
        self._batch_tokens = self._tokens(batch) if self._tokens is not None else 0

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """See the loss, which is divided already: by as many micro-batches as an epoch's last step may not have."""
        assert self._turns is not None, "the fleet is joined before"
        self._turns.see(loss * trainer.accumulate_grad_batches, self._batch_tokens)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Do what is due after a step, and stop where the run does."""
        assert self._turns is not None, "the fleet is joined before"
        if self._turns.over():
            trainer.should_stop = True
        self._tell(trainer)

    # ---- what it is made of -------------------------------------------------------------------------------------

    def _parts(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """Options of `context.wrap`, of what the trainer has."""
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        names = ["lr_scheduler", *(f"lr_scheduler_{i}" for i in range(1, len(schedulers)))]
        return {
            "clip_norm": _taken_clip_norm(trainer, pl_module),
            "stateful": dict(zip(names, schedulers, strict=False)),
            "remarks": self._remarks,
        }

    def _tell(self, trainer: Any) -> None:
        """The trainer counts steps by what its optimizer has done."""
        assert self._turns is not None, "the fleet is joined before"
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        progress.optimizer.step.total.completed = self._turns.replica.step_number


def _limit(trainer: Any, steps: int) -> None:
    trainer.fit_loop.epoch_loop.max_steps, trainer.fit_loop.epoch_loop.min_steps = steps, None


def _taken_clip_norm(trainer: Any, pl_module: Any) -> float | None:
    """The norm that the replica clips with from here on; None where it is left to the trainer."""
    value, by_norm = trainer.gradient_clip_val, str(trainer.gradient_clip_algorithm or "norm").endswith("norm")
    if not value or not by_norm or is_overridden("configure_gradient_clipping", pl_module):
        return None
    trainer.gradient_clip_val = None  # with ddp the mean of all gradients is clipped
    return float(value)


def _check(trainer: Any, pl_module: Any, context: Context) -> None:
    reasons = {
        "manual optimization steps optimizers on its own: use automatic_optimization, or write a loop with "
        "context.wrap": not pl_module.automatic_optimization,
        f"max_steps = {trainer.max_steps}: the run has {context.steps} steps; leave max_steps out": (
            trainer.max_steps not in (-1, context.steps)
        ),
        f"precision = {trainer.precision!r} needs a gradient scaler, which the trainer keeps to itself: take "
        "'bf16-mixed'": getattr(trainer.precision_plugin, "scaler", None) is not None,
        f"a replica is one process with one device, and this trainer has {trainer.world_size}: Trainer(devices=1), and "
        "set fleet.replicas": trainer.world_size > 1,
        SHARDED.format(context.shards): context.shards > 1,
    }
    for reason, wrong in reasons.items():
        if wrong:
            raise ModelError(reason)
