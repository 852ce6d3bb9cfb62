"""``python -m jobs.train --dry-run``: what a run would do and cost."""

from rich.console import Console
from rich.table import Table

from ray_lowcomm import strategies
from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.strategies.contract import Strategy


def print_dry_run(config: TrainConfig) -> None:
    """Build model and data here, propose every round's messages once, and print the sums."""
    table = Table(show_header=False, box=None)
    for name, value in estimate(config).items():
        table.add_row(name, value)
    Console().print(table)


def estimate(config: TrainConfig) -> dict[str, str]:
    """Lines of the table, by name."""
    from ray_lowcomm.data import in_order, load
    from ray_lowcomm.default_loop import make_optimizer
    from ray_lowcomm.engine.buffers import BufferSync
    from ray_lowcomm.models import build, check_loss

    settings = strategies.resolve(config.strategy)
    dataset = load(config.data, "train")
    model = build(config.model, getattr(dataset, "model_defaults", None))
    batch = next(iter(in_order(dataset, config.inner.batch_size)))
    check_loss(model(batch))
    tracks = Tracks(model, make_optimizer(model, config.inner))
    buffers = BufferSync(model, config.model.buffers)
    per_round = _payloads(settings, tracks, buffers, config)
    world, steps = config.fleet.replicas, config.inner.steps
    total = sum(size for size, _ in per_round) if world > 1 else 0
    wire = sum(cost for _, cost in per_round) if world > 1 else 0
    ddp = 2 * tracks.layout.nbytes * (world - 1) // world * steps
    tokens = steps * config.inner.batch_size * config.inner.accumulate * dataset.tokens_per_sample
    return {
        "model": f"{config.model.name}, {tracks.layout.numel:,} trainable parameters ({_bytes(tracks.layout.nbytes)})",
        "data": f"{config.data.name}, {len(dataset):,} samples; {tokens:,} tokens per replica",
        "fleet": f"{world} replicas of {dict(config.fleet.resources_per_replica)}, transport {config.fleet.transport}",
        "strategy": f"{settings.name}: {len(per_round)} rounds in {steps} inner steps",
        "sent per round": f"{_bytes(total // max(1, len(per_round)))} on average, {_bytes(total)} in all, per replica",
        "on the wire": f"{_bytes(wire)} in all each way, per replica; DDP: {_bytes(ddp)}",
        "memory": f"about {_bytes(_memory(settings, tracks, config))} per replica, without activations",
    }


def _payloads(
    settings: StrategySettings, tracks: Tracks, buffers: object, config: TrainConfig
) -> list[tuple[int, int]]:
    """(payload bytes, wire bytes) of each round of the run."""
    schedule = strategies.schedule(settings, strategies.moments_of(tracks), config.run.seed, config.inner.steps)
    strategy = strategies.build(settings, tracks)
    sizes: dict[str, tuple[int, bool]] = {}
    rounds, step, world = [], 0, config.fleet.replicas
    while (following := schedule.next_step(step)) is not None:
        step, sent, wire = following, 0, 0
        for op in schedule.ops(step):
            if op.track not in sizes:
                sizes[op.track] = _size_of(strategy, op)
            size, gathered = sizes[op.track]
            sent += size
            wire += size * (world - 1) if gathered else 2 * size * (world - 1) // world
        rounds.append((sent, wire))
    return rounds


def _size_of(strategy: Strategy, op: object) -> tuple[int, bool]:
    proposal = strategy.propose(op)  # type: ignore[arg-type]
    strategy.discard(proposal.id)
    return proposal.payload.nbytes, proposal.payload.combine == "gather"


def _memory(settings: StrategySettings, tracks: Tracks, config: TrainConfig) -> int:
    """Parameters, gradients, moments, and what the strategy keeps (anchor, outer momentum, residual)."""
    size = tracks.layout.nbytes
    moments = len(strategies.moments_of(tracks))
    strategy = strategies.build(settings, tracks)
    kept = sum(t.numel() * t.element_size() for t in (strategy.shared_state() | strategy.local_state()).values())
    return size * (2 + moments) + (0 if strategy.replicated else kept)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"
