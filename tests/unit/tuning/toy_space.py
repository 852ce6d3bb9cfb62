"""A space small enough to reason about, and a searcher that draws what a test says."""

from ray import tune
from ray.tune.search import Searcher

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.settings import InnerSettings
from ray_lowcomm.tuning.space import Space

BASE = TrainConfig(inner=InnerSettings(steps=32))


def domains(base):
    return {"strategy.inner_steps": tune.choice([4, 8]), "strategy.outer_lr": tune.uniform(0.4, 1.0)}


def refuse(config):
    lr = config.strategy.outer_lr
    return f"outer_lr {lr:g} > 0.9" if lr is not None and lr > 0.9 else None


SPACE = Space("toy", "for tests", domains, refuse=refuse)


class Scripted(Searcher):
    """Gives the samples of a list, and keeps what it is told."""

    def __init__(self, samples):
        super().__init__(metric=None, mode=None)
        self.samples, self.told = list(samples), []

    def suggest(self, trial_id):
        return self.samples.pop(0) if self.samples else Searcher.FINISHED

    def on_trial_complete(self, trial_id, result=None, error=False):
        self.told.append((trial_id, result, error))


def sample(steps, lr):
    return {"strategy.inner_steps": steps, "strategy.outer_lr": lr}


def result(number, val_loss, *, step=None, bytes_up=1000, done=False):
    """As `LowCommTrainable` reports a round: 2 replicas of 16 x 64 tokens a step, H = 4."""
    step = 4 * number if step is None else step
    return {
        "outer_round": number,
        "step": step,
        "tokens": step * 2 * 16 * 64,
        "loss": val_loss + 0.5,
        "val_loss": val_loss,
        "bytes_up": bytes_up * number,
        "bytes_down": bytes_up * number,
        "members": 2,
        "done": done,
        "time_total_s": 2.5 * number,
        "training_iteration": number,
    }
