"""Which settings of a sweep's base its trials have from elsewhere."""

from itertools import islice

from ray_lowcomm.config_sources import all_names
from ray_lowcomm.tuning.settings import SweepConfig, base_of
from ray_lowcomm.tuning.space import Space, guarded

SAMPLES = 16  # a space may set other fields in one sample than in the next
PLACED_BY = frozenset({"fleet.address", "fleet.resources_per_replica"})  # a trial, whatever its transport


def drawn_names(config: SweepConfig, space: Space) -> frozenset[str]:
    """Dotted names of the fields that `space` draws or sets, and of those by which trials find their place.

    All names, if nothing can be drawn: that is said when the sweep begins.
    """
    from ray_lowcomm.tuning.draws import random_samples

    space = guarded(space)
    try:
        samples = islice(random_samples(space.domains(base_of(config)), config.run.seed), SAMPLES)
        return PLACED_BY.union(*(space.fields(sample) for sample in samples))
    except Exception:  # a space is anybody's code
        return all_names(SweepConfig)
