"""``python -m jobs.train --dry-run``: what a run would do and cost."""

from collections.abc import Mapping
from dataclasses import replace

from ray_lowcomm import strategies
from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.remarks import said
from ray_lowcomm.core.settings import FleetSettings, StrategySettings
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.estimate import RunCost, replica_cost, run_cost, sizes_of_shards
from ray_lowcomm.fault_schedule import faults_of
from ray_lowcomm.footprint import Footprint, first_shard, footprint
from ray_lowcomm.models.sharding import blocks_to_prepare
from ray_lowcomm.process_size import CLIENT, process_bytes


def print_dry_run(config: TrainConfig) -> None:
    """Build model and data here, try them on a batch, look for room, and print the sums."""
    lines, remarks = estimate(config)
    from ray_lowcomm.runtime.cluster import look_for_room

    for name, value in lines.items():
        print(f"{name:<16}{value}")
    try:
        print(f"{'room':<16}{look_for_room(config.fleet)}")
    finally:  # where there is none, the sums hold for where there is
        for remark in remarks:
            print(remark)


def estimate(config: TrainConfig) -> tuple[dict[str, str], tuple[str, ...]]:
    """(what it would do and cost, line by line; what it would remark on at its start)."""
    from ray_lowcomm.data import in_order, load
    from ray_lowcomm.models import build, loss_of
    from ray_lowcomm.runtime import cohort  # noqa: F401  # Ray Train, which a process of a replica loads

    settings = strategies.resolve(config.strategy, config.inner.steps)
    dataset = load(config.data, "train")
    process = process_bytes() + CLIENT
    model = build(config.model, getattr(dataset, "model_defaults", None))
    batch = next(iter(in_order(dataset, config.inner.batch_size)))
    loss_of(model, batch)
    blocks_to_prepare(model, config.model)
    sizes = sizes_of_shards(model, config)
    costs = [run_cost(config, one) for one in sizes]
    cost, nbytes = replica_cost(costs), sum(one.layout.nbytes for one in sizes)
    shards, kind = len(sizes), config.model.sharded_as(len(sizes))
    world, steps = config.fleet.max_replicas, config.inner.steps
    total, wire = cost.moved["up"], max(cost.moved["wire_up"], cost.moved["wire_down"])
    coded = {"gather", "sharded"} & cost.collectives.keys()
    about = "about " if coded else ""  # how long coded indices become is not known before
    ddp = 2 * nbytes * (world - 1) // world * steps
    own = f", {_bytes(max(one.moved['up'] for one in costs))} a shard" if shards > 1 else ""
    numel = sum(one.layout.numel for one in sizes)
    tokens = steps * config.inner.batch_size * config.inner.accumulate * dataset.tokens_per_sample
    tracks, strategy, gathered = first_shard(model, config)
    needed = footprint(model, tracks, strategy, cost.room, world, config.checkpoint.every > 0, gathered)
    each = _bytes(total // max(1, cost.rounds))
    lines = {
        "model": f"{config.model.name}, {numel:,} trainable parameters ({_bytes(nbytes)})",
        "data": f"{config.data.name}, {len(dataset):,} samples; {tokens:,} tokens per replica",
        "fleet": f"{config.fleet.size} replicas of {dict(config.fleet.resources_per_replica)}, transport "
        + config.fleet.transport
        + (f"; {shards} shards each, {kind}" if shards > 1 else "")
        + (f"; the sums are for {world}" if config.fleet.elastic else ""),
        "strategy": f"{settings.name}: {cost.rounds} rounds in {steps} inner steps{_share(settings)}",
        "sent per round": f"{each} on average, {about}{_bytes(total)} in all a replica{own}",
        "on the wire": f"{about}{_bytes(wire)} in all each way, per replica; DDP: {_bytes(ddp)}",
        "who is late": _late(config, settings, cost),
        "who joins": f"fetches {_bytes(_of_joiner(config, strategy, tracks))} from all members together"
        + (", for its first shard" if shards > 1 else ""),
        "memory": _memory(replace(needed, process=process), config.fleet),
    }
    faults = faults_of(config.resolved())
    for number, fault in enumerate(faults):
        phase = f", {fault.phase}" if fault.phase else ""
        lines[f"fault {number}"] = f"{fault.what}, replica {fault.replica}, round {fault.round}{phase}"
    of_data: tuple[str, ...] = getattr(dataset, "remarks", ())
    return lines, config.remarks() + said(cost.remarks) + of_data


def _late(config: TrainConfig, settings: StrategySettings, cost: RunCost) -> str:
    """What a replica fetches that has missed rounds."""
    if strategies.straggler(settings, config.fleet) != "catch_up" or config.fleet.max_replicas == 1:
        return "is waited for, or starts again from the shared state"
    missed = cost.moved["down"] // max(1, cost.rounds)
    rounds = config.fleet.keep_rounds * (settings.fragments or 1)
    kept = f"which the others keep while it is away, {_bytes(rounds * missed)} for {rounds} rounds"
    return f"fetches about {_bytes(missed)} for each round that it has missed, {kept}"


def _of_joiner(config: TrainConfig, strategy: strategies.Strategy, tracks: Tracks) -> int:
    """Bytes of the shared state, and of the inner optimizer's where that is handed on."""
    averaged = strategies.algorithm(config.strategy.name).averages_moments
    handed_on = averaged or strategy.replicated or config.fleet.joiner_moments == "donor"
    shared = sum(value.numel() * value.element_size() for value in strategy.shared_state().values())
    return shared + handed_on * len(tracks.moments.names) * tracks.layout.nbytes


def _share(settings: StrategySettings) -> str:
    """How much of a chunk a round sends."""
    if settings.topk is None or settings.chunk_size is None:
        return ""
    chunk = settings.chunk_size**2
    return f", topk {settings.topk:,} of {chunk:,} ({settings.topk / chunk:.1%}) a round"


def _memory(needed: Footprint, fleet: FleetSettings) -> str:
    """At the peak, and what of."""
    trained = {
        "model": needed.model,
        "gradients": needed.gradients,
        "optimizer": needed.moments,
        "strategy": needed.strategy,
        "a round": needed.round if needed.round == needed.beside else needed.lent,
        "what is gathered in a step": 0 if needed.round == needed.beside else needed.gathered,
    }
    own_process = fleet.transport == "ray"
    beside = {
        "a checkpoint that is written": needed.checkpoint,
        "Python, torch and Ray": needed.process if own_process else 0,
    }
    of = "shard" if fleet.shards_per_replica > 1 else "replica"
    if not own_process or not fleet.resources_per_replica.get("GPU"):
        return _sum(trained | beside, f"per {of}")
    own = f"its process about {_bytes(sum(beside.values()))} of the machine's memory ({_parts(beside)})"
    unknown = "what CUDA takes of both, and copies of messages in the machine's memory"
    return f"{_sum(trained, f'on the GPU of each {of}')}; {own}. Not known here, and on top of these: {unknown}"


def _sum(parts: Mapping[str, int], where: str) -> str:
    return f"about {_bytes(sum(parts.values()))} {where} at its peak, without activations ({_parts(parts)})"


def _parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_bytes(size)}" for name, size in parts.items() if size)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"
