"""Sweeps that never ran, in numbers that a real one could have left."""

import math
import random

from ray_lowcomm.tuning.trials import Point, Trial

STEPS, H = 800, 16


def sweep(count, *, seed=0, failed=1, replicas=2):
    """`count` trials of the DCT space: about half of them stopped early, the last `failed` of them failed."""
    draw = random.Random(seed)
    trials = []
    for number in range(1, count + 1):
        params = {
            "strategy.inner_steps": draw.choice([8, 16, 32, 64]),
            "strategy.topk": draw.choice([4, 16, 32, 64, 128]),
            "strategy.chunk_size": draw.choice([16, 32, 64]),
            "strategy.residual": draw.choice(["model", "buffer"]),
            "strategy.outer_lr": math.exp(draw.uniform(math.log(0.1), 0.0)),
            "strategy.outer_momentum": round(draw.uniform(0, 0.95), 3),
            "strategy.outer_optimizer": "nesterov",
        }
        if params["strategy.residual"] == "buffer":
            params["strategy.residual_decay"] = draw.choice([0.9, 0.95, 0.999])
        stop = draw.choice([2, 4, 8]) if draw.random() < 0.5 and count > 1 else None
        status = "failed" if number > count - failed else "stopped" if stop else "finished"
        trials.append(_trial(draw, number, status, params, 1 if status == "failed" else stop, replicas))
    return trials


def _trial(draw, number, status, params, evaluations, replicas):
    inner_steps = params["strategy.inner_steps"]
    density = params["strategy.topk"] / params["strategy.chunk_size"] ** 2
    floor = 1.7 + 0.25 * abs(math.log2(inner_steps / 16)) / 2 - 0.05 * math.log2(1 + 100 * density) / 6
    floor += 0.3 * abs(params["strategy.outer_lr"] - 0.6) + draw.uniform(0, 0.08)
    per_round = 0 if replicas == 1 else int(180_000 * density * 8) + 200
    history = []
    every = max(1, STEPS // inner_steps // 20)
    for index in range(1, STEPS // inner_steps + 1):
        step = index * inner_steps
        loss = floor + (5.55 - floor) * math.exp(-step / 120) + draw.gauss(0, 0.02)
        val_loss = loss + 0.03 if index % every == 0 else None
        history.append(Point(index, step, loss, val_loss, index * per_round, index * per_round * (replicas - 1)))
        if evaluations and index >= evaluations * every:
            break
    return Trial(
        number,
        f"a1b2c_{number:05d}",
        status,
        "replica 1 died in round 3 (SIGKILL) and could not be started again: no node has 4 CPUs" * (status == "failed"),
        params,
        metrics_of(history),
        tuple(history),
    )


def metrics_of(history):
    last = history[-1]
    val_loss = next((point.val_loss for point in reversed(history) if point.val_loss is not None), None)
    found = {
        "loss": last.loss,
        "val_loss": val_loss,
        "bytes_up": last.bytes_up,
        "bytes_down": last.bytes_down,
        "rounds": last.round,
        "step": last.step,
        "tokens": last.step * 16 * 64,
        "wall_s": last.step * 0.11,
    }
    return {name: float(number) for name, number in found.items() if number is not None}
