"""The jobs' train function: a model by name on data by name. Knows no Ray: it runs wherever a replica lives."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ray_lowcomm.core import randomness
from ray_lowcomm.core.adopt import Adopt
from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.names import model_state, trainable_parameters, untied
from ray_lowcomm.core.settings import DataSettings, InnerSettings, ModelSettings
from ray_lowcomm.core.sharding import is_distributed, reshard
from ray_lowcomm.data import Batch, Batches, Dataset, ShardedSampler, dealt_in_order, load
from ray_lowcomm.data.samples import gather
from ray_lowcomm.engine.inside import Alone, Inside
from ray_lowcomm.engine.member import Context
from ray_lowcomm.models import Place, Sharded, build_at, loss_of


@dataclass(frozen=True)
class DefaultLoop:
    """A train function for `LowCommTrainer` from the sections model, data and inner. `config` is copied into model/."""

    model: ModelSettings
    data: DataSettings
    inner: InnerSettings
    config: str = ""

    def __call__(self, context: Context) -> None:
        """Train one replica to the end of the run, or one shard of it."""
        dataset = load(self.data, "train")
        notes: list[str] = []
        made = build_at(self._place(context), self.model, getattr(dataset, "model_defaults", None), notes.append)
        sampler = ShardedSampler(len(dataset), context.replicas, context.index, context.seed)
        batches = Batches(dataset, sampler, self.inner.batch_size, context.shard, context.shards)
        replica = context.wrap(
            made.model,
            make_optimizer(made.model, self.inner),
            schedule=schedule_of(self.inner),
            clip_norm=self.inner.clip_norm,
            evaluate=Evaluation(self.data, self.inner.batch_size, context.device, inside=context.host.inside),
            data=sampler,
            local_stateful={"data": batches},
            export=lambda trained, folder: export_model(trained, folder, self.config, context.shard),
            remarks=(*getattr(dataset, "remarks", ()), *notes),
        )
        casts = self.model.sharded_as(context.shards) == "fsdp2"  # FSDP2 does so itself
        autocast = nullcontext() if casts else autocast_of(self.inner, context.device)
        accumulate = self.inner.accumulate
        while not replica.finished:
            seen = []
            if accumulate == 1:
                loss = self._micro_step(made.trained, batches, autocast, context.device)
                loss.backward()
                seen.append(batches.last)
            else:
                loss = self._accumulated(made, batches, autocast, context.device, seen)
            bad = culprits(made.model, dataset, seen, context.device, search=context.shards == 1)
            replica.step(loss, batches.tokens * accumulate, bad)

    def _place(self, context: Context) -> Place:
        inside = context.host.inside
        nothing = torch.zeros(1, dtype=torch.float64)
        return Place(
            context.device,
            context.shard,
            context.shards,
            lambda: context.mesh,
            lambda: inside.total(nothing),
            reduced=self.inner.autocast,
        )

    def _micro_step(
        self, model: nn.Module, batches: Iterator[Batch], autocast: AbstractContextManager[Any], device: torch.device
    ) -> Tensor:
        with autocast:
            return loss_of(model, on_device(next(batches), device))

    def _accumulated(
        self,
        made: Sharded,
        batches: Batches,
        autocast: AbstractContextManager[Any],
        device: torch.device,
        seen: list[np.ndarray],
    ) -> Tensor:
        """Mean loss of `accumulate` micro-batches, whose mean gradient is left in the parameters; their samples go to
        `seen`."""
        total = torch.zeros((), device=device)
        for number in range(1, self.inner.accumulate + 1):
            with made.unsynced() if number < self.inner.accumulate else nullcontext():
                loss = self._micro_step(made.trained, batches, autocast, device) / self.inner.accumulate
                loss.backward()
            total += loss.detach()
            seen.append(batches.last)
        return total


def culprits(
    model: nn.Module, dataset: Dataset, seen: list[np.ndarray], device: torch.device, search: bool = True
) -> Callable[[], list[int]]:
    """Looks for the samples among those `seen` whose loss alone is not finite; all of them if there are none, or with
    `search` False: shards of a model cannot call it each by itself. Where the data set says so, they go by their rows
    in the files.

    Model and random state are left as they were.
    """

    def find() -> list[int]:
        samples = [int(number) for numbers in seen for number in numbers]
        found = (search and _not_finite(samples)) or samples
        rows = getattr(dataset, "row_numbers", range(len(dataset)))
        return [int(rows[number]) for number in found]

    def _not_finite(samples: list[int]) -> list[int]:
        training = [module for module in model.modules() if module.training]
        state = randomness.random_state()
        model.eval()
        with torch.no_grad():
            losses = [float(model(on_device(gather(dataset, np.array([number])), device))) for number in samples]
        for module in training:
            module.training = True
        randomness.set_random_state(state)
        reshard(model)
        return [number for number, loss in zip(samples, losses, strict=True) if not math.isfinite(loss)]

    return find


@dataclass
class Evaluation:
    """Mean validation loss per token on a fixed subset, read when it is first needed; and of a model with a method
    `metrics`, batch -> numbers that are means over the batch, these as well. Samples are dealt to the shards of a
    replica, which all call this, and all get the means over all samples."""

    settings: DataSettings
    batch_size: int
    device: torch.device
    dataset: Dataset | None = None
    inside: Inside = field(default_factory=Alone)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """The loss as `val_loss`, and the model's own metrics; the model is in eval mode."""
        if self.dataset is None:
            self.dataset = load(self.settings, "validation")
        totals: dict[str, float] = {}
        count, own = 0, getattr(model, "metrics", None)
        with torch.no_grad():
            dealt = dealt_in_order(self.dataset, 4 * self.batch_size, self.inside.shard, self.inside.shards)
            for batch, size in dealt:
                placed = on_device(batch, self.device)
                found = {"val_loss": model(placed), **(own(placed) if callable(own) else {})}
                for name, value in found.items():
                    _check_mean(name, value)
                    totals[name] = totals.get(name, 0.0) + float(value) * size
                count += size
        reshard(model)
        sums = self.inside.total(torch.tensor([count, *totals.values()], dtype=torch.float64)).tolist()
        return {name: total / sums[0] for name, total in zip(totals, sums[1:], strict=True)}


def _check_mean(name: str, value: object) -> None:
    if isinstance(value, Tensor) and value.numel() != 1:
        what = "the loss" if name == "val_loss" else f"metric {name!r}"
        raise ModelError(f"{what} must be a 0-d tensor (the mean over the batch), got one of shape {list(value.shape)}")


def make_optimizer(model: nn.Module, inner: InnerSettings) -> torch.optim.Optimizer:
    """The inner optimizer; weight decay is for matrices only (biases, norms and scalars have none)."""
    parameters = list(trainable_parameters(model).values())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if inner.optimizer == "adopt":
        return Adopt(groups, lr=inner.lr, betas=inner.betas)
    # torch's own choice for DTensors is one operation after the other, each through python
    together = True if any(map(is_distributed, parameters)) else None
    if inner.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=inner.lr, momentum=inner.momentum, foreach=together)
    return torch.optim.AdamW(groups, lr=inner.lr, betas=inner.betas, foreach=together)


def schedule_of(inner: InnerSettings) -> Callable[[int], float]:
    """Multiplier of the learning rate at a nominal step: linear warm-up, then constant or cosine down to a tenth."""

    def multiplier(step: int) -> float:
        if step < inner.warmup_steps:
            return (step + 1) / inner.warmup_steps
        if inner.schedule == "constant":
            return 1.0
        done = (step - inner.warmup_steps) / max(1, inner.steps - inner.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

    return multiplier


def autocast_of(inner: InnerSettings, device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 autocast on CUDA, nothing elsewhere."""
    use = inner.autocast and device.type == "cuda"
    return torch.autocast("cuda", torch.bfloat16) if use else nullcontext()


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the model's device."""
    return batch if device.type == "cpu" else {k: v.to(device, non_blocking=True) for k, v in batch.items()}


def export_model(model: nn.Module, folder: str, config: str, shard: int = 0) -> None:
    """The weights as safetensors, and `config.yaml`; of a Hugging Face model also its own config, as `save_pretrained`
    writes it. All shards of a replica call this; the first one writes."""
    from ray_lowcomm.engine.exporting import save_model
    from ray_lowcomm.engine.storage import Storage
    from ray_lowcomm.models.huggingface import save_configs

    inner, leads = getattr(model, "hf_model", None), shard == 0
    sharded = any(map(is_distributed, model.parameters()))
    if inner is not None and "://" not in folder and not sharded:
        if leads:
            Path(folder).mkdir(parents=True, exist_ok=True)
            inner.save_pretrained(folder)
    elif inner is not None:
        save_model(Storage(folder), "", untied(inner), leads, metadata={"format": "pt"})
        if leads and "://" not in folder:
            save_configs(inner, folder)
    else:
        save_model(Storage(folder), "", model_state(model), leads)
    if config and leads:
        Storage(folder).write("config.yaml", config.encode())
