"""A run's fault schedule among its other settings: what cannot be, what would change nothing, and what it comes to."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.fault import ONLY_FOR, Fault, RandomFaults, by_round, expanded, held_back, idle_field
from ray_lowcomm.rounds import count_rounds, has_round

TAGS = ("a fault", "random faults")  # in the path of a problem; no field can have such a name


def _tag(entry: object) -> str:
    drawn = isinstance(entry, RandomFaults) or (isinstance(entry, Mapping) and "random" in entry)
    return TAGS[drawn]


FaultEntry = Annotated[Annotated[Fault, Tag(TAGS[0])] | Annotated[RandomFaults, Tag(TAGS[1])], Discriminator(_tag)]
"""One entry of the list: a fault, or ``{"random": …}``."""


def check(config: Any) -> None:
    """Refuse what cannot be done in a run of `config`, with the reason."""
    for number, entry in enumerate(config.faults):
        kinds = (entry.do,) if isinstance(entry, Fault) else entry.random.kinds
        place = f"faults[{number}]"
        if isinstance(entry, Fault):
            _check_one(config, place, entry)
        name = f"{place}.do" if isinstance(entry, Fault) else f"{place}.random.kinds"
        if "slow" in kinds and config.fleet.transport == "local":
            raise SettingError(name, "slow", "needs fleet.transport: ray: with local inner steps take no time")
        if "corrupt" in kinds and config.fleet.collective == "nccl":
            raise SettingError(name, "corrupt", "needs fleet.collective: gloo: NCCL has no checksums that would notice")
    _check_joins(config)


def _check_one(config: Any, place: str, fault: Fault) -> None:
    fleet = config.fleet
    if fault.replica >= fleet.max_replicas:
        allowed = f"must be less than fleet.replicas = {fleet.max_replicas}"
        raise SettingError(f"{place}.replica", fault.replica, allowed)
    if fault.shard >= fleet.shards_per_replica:
        allowed = f"must be less than fleet.shards_per_replica = {fleet.shards_per_replica}"
        raise SettingError(f"{place}.shard", fault.shard, allowed)
    if fault.whom != "replica" and fleet.transport == "local":
        raise SettingError(f"{place}.whom", fault.whom, "needs fleet.transport: ray: with local all is one process")
    if fault.do == "join" and not fleet.elastic:
        raise SettingError(f"{place}.do", "join", "needs fleet.replicas: [min, max]: of others all are there at once")


def _check_joins(config: Any) -> None:
    """Who joins must be away until then, and a run, which may have to begin anew at any time, must be able to without
    all that are away."""
    numbers = [number for number, entry in enumerate(config.faults) if isinstance(entry, Fault)]
    faults: list[Fault] = [config.faults[number] for number in numbers]
    fleet, fired, useful = config.fleet, set[int](), set[int]()
    for happens in [*by_round(faults), None]:
        away = held_back(faults, fired)
        if (there := fleet.max_replicas - len(away)) < fleet.min_replicas:
            least = f"must leave fleet.replicas' min = {fleet.min_replicas} there until it joins, or no run could begin"
            last = max(away.values())
            raise SettingError(f"faults[{numbers[last]}].replica", faults[last].replica, f"{least}: {there} would be")
        useful |= set(away.values())
        fired |= set() if happens is None else {happens}
    drawn = any(isinstance(entry, RandomFaults) and "leave" in entry.random.kinds for entry in config.faults)
    for number, fault in enumerate(faults):
        if fault.do == "join" and number not in useful and not drawn:
            allowed = f"needs do: leave of replica {fault.replica} in an earlier round: it has joined by then"
            raise SettingError(f"faults[{numbers[number]}].round", fault.round, allowed)


def refuse_idle(config: Any, rounds_vary: bool) -> None:
    """Refuse what would change nothing in a run of `config`, whose strategy is resolved."""
    for number, fault in enumerate(config.faults):
        if not isinstance(fault, Fault):
            continue
        if name := idle_field(fault):
            allowed = f"has no effect with do: {fault.do}: set do to {' or '.join(ONLY_FOR[name])}, or leave it out"
            raise SettingError(f"faults[{number}].{name}", getattr(fault, name), allowed)
        if not rounds_vary and not has_round(config, fault.round):
            allowed = "is beyond the end of the run, which has fewer rounds: must be a round that there is"
            raise SettingError(f"faults[{number}].round", fault.round, allowed)
        every = config.checkpoint.every
        saves = every and fault.round % every == 0
        if fault.phase == "checkpoint" and not saves and not rounds_vary and has_round(config, fault.round + 1):
            allowed = f"has no checkpoint (checkpoint.every = {every}): must be a round that writes one, or the last"
            raise SettingError(f"faults[{number}].round", fault.round, allowed)


def faults_of(config: Any) -> tuple[Fault, ...]:
    """The schedule of a run of `config`, whose strategy is resolved, with all that is drawn."""
    drawn = any(isinstance(entry, RandomFaults) for entry in config.faults)
    return expanded(config.faults, config.fleet.max_replicas, count_rounds(config) if drawn else 0)
