"""Tune's search algorithms behind a screen: what is not worth a trial is drawn again."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray.tune.search import BasicVariantGenerator, SearchAlgorithm, Searcher
from ray.tune.search.sample import Domain

from ray_lowcomm.core.errors import FleetError, SettingError
from ray_lowcomm.tuning.draws import accepted, grid_samples, grid_size, random_samples
from ray_lowcomm.tuning.objective import Values
from ray_lowcomm.tuning.screen import MAX_DRAWS, Screen
from ray_lowcomm.tuning.settings import NUM_SAMPLES, SweepConfig


@dataclass(frozen=True)
class Drawing:
    """What `tune.run` needs to draw trials: the algorithm, and how many trials there may be."""

    algorithm: SearchAlgorithm | Searcher
    num_samples: int
    max_concurrent: int | None  # left to Tune; None where the algorithm sees to it


def most_trials(config: SweepConfig, domains: Mapping[str, Any]) -> int:
    """How many trials the sweep has, unless samples run out.

    Raises:
        SettingError: a grid of a space that has none.
    """
    if config.drawn_by != "grid":
        return config.num_samples or NUM_SAMPLES
    points = grid_size(domains)
    return min(points, config.num_samples or points)


def drawing(
    config: SweepConfig, domains: Mapping[str, Any], screen: Screen, say: Callable[[str], None], resumed: bool
) -> Drawing:
    """The search that `config` asks for. `say` gets one line if it ends early; a resumed one takes its old state.

    Raises:
        SettingError: the search cannot draw from this space.
        FleetError: all that was drawn was refused.
    """
    most = most_trials(config, domains)
    if config.drawn_by in ("tpe", "nsga2"):
        search = ScreenedSearch(_optuna(config, domains, most), screen, _values(config), say)
        return Drawing(search, most, config.max_concurrent)
    if resumed:
        return Drawing(BasicVariantGenerator(), most, None)
    if config.drawn_by == "grid":
        samples, reason = accepted(grid_samples(domains, config.run.seed), screen, most)
    else:
        samples, reason = accepted(random_samples(domains, config.run.seed), screen, most, MAX_DRAWS)
    if not samples:
        raise FleetError(f"no trial: everything that {config.drawn_by} drew was refused, at last because {reason}")
    if len(samples) < most:
        say(f"only {len(samples)} of {most} trials: there are no more that differ and are not refused")
    generator = BasicVariantGenerator(
        points_to_evaluate=[dict(sample) for sample in samples], max_concurrent=config.max_concurrent or 0
    )
    return Drawing(generator, len(samples), None)


def _values(config: SweepConfig) -> Values:
    return Values(tuple(config.objective.split(",")), config.target_loss, config.inner.steps)


def _optuna(config: SweepConfig, domains: Mapping[str, Any], most: int) -> Searcher:
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler: optuna.samplers.BaseSampler
    # Optuna's own numbers are for hundreds of trials: with 8 of them neither would ever learn from a result
    if config.drawn_by == "nsga2":
        sampler = optuna.samplers.NSGAIISampler(seed=config.run.seed, population_size=min(50, max(4, most // 4)))
    else:
        sampler = optuna.samplers.TPESampler(seed=config.run.seed, n_startup_trials=min(10, max(3, most // 3)))
    try:
        space = OptunaSearch.convert_search_space(dict(domains))
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise SettingError("search", config.drawn_by, f"cannot draw from this space, use random: {reason}") from None
    if not space:
        raise SettingError("space", config.space, "has nothing that varies")
    names = config.objective.split(",")
    metric, mode = (names, ["min"] * len(names)) if names[1:] else (names[0], "min")
    return OptunaSearch(space, metric=metric, mode=mode, sampler=sampler)


class ScreenedSearch(Searcher):
    """Draws from `searcher` until `screen` lets a sample pass, and tells it what became of each.

    A refused sample counts as pruned, so that it is avoided; a repeated one gets the result of the earlier trial, as
    far as that has one. After `MAX_DRAWS` in vain the search ends, and `say` gets one line.
    """

    def __init__(self, searcher: Searcher, screen: Screen, values: Values, say: Callable[[str], None]) -> None:
        super().__init__(metric=None, mode=None)
        self.searcher = searcher  # under this name Tune saves and restores it
        self._screen, self._values, self._say = screen, values, say
        self._keys: dict[str, str] = {}
        self._draws = 0

    def set_search_properties(self, metric: Any, mode: Any, config: dict[str, Any], **spec: Any) -> bool:
        """Metric and space are the searcher's from the start."""
        self._fixed = {name: value for name, value in config.items() if not _is_domain(value)}
        return True

    def suggest(self, trial_id: str) -> Any:
        """The sample of a new trial."""
        reason = ""
        for _ in range(MAX_DRAWS):
            self._draws += 1
            key = f"draw {self._draws}"
            drawn = self.searcher.suggest(key)
            if not isinstance(drawn, dict):
                return drawn
            sample = {**self._fixed, **drawn}
            refused = self._screen.refuse(sample, trial_id)
            if refused is None:
                self._keys[trial_id] = key
                return sample
            reason = refused
            self._tell_refused(key, self._screen.earlier(sample))
        self._say(f"the search ends: {MAX_DRAWS} samples in a row were refused, the last because {reason}")
        return Searcher.FINISHED

    def _tell_refused(self, key: str, earlier: str | None) -> None:
        if earlier is None:
            self.searcher.on_trial_complete(key)
        else:
            known = self._values.of(earlier)
            self.searcher.on_trial_complete(key, result=known, error=known is None)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """A result in mid-trial: noted only."""
        self._values.update(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """The end of a trial; the searcher gets its objectives, and 'pruned' if it has none."""
        if result:
            self._values.update(trial_id, result)
        key = self._keys.pop(trial_id, None)
        if key is not None:
            self.searcher.on_trial_complete(key, result=None if error else self._values.of(trial_id), error=error)

    def get_state(self) -> dict[str, Any]:
        """What Tune saves beside the searcher's own state."""
        state = {"keys": self._keys, "draws": self._draws, "seen": self._screen.seen, "values": self._values.by_trial}
        return copy.deepcopy(state | {"fixed": self._fixed})

    def set_state(self, state: dict[str, Any]) -> None:
        """Inverse of `get_state`."""
        self._keys, self._draws, self._fixed = state["keys"], state["draws"], state["fixed"]
        self._screen.seen.update(state["seen"])
        self._values.by_trial.update(state["values"])

    def save(self, checkpoint_path: str) -> None:
        """The searcher's own state."""
        self.searcher.save(checkpoint_path)

    def restore(self, checkpoint_path: str) -> None:
        """The searcher's own state."""
        self.searcher.restore(checkpoint_path)


def _is_domain(value: Any) -> bool:
    return isinstance(value, Domain) or (isinstance(value, dict) and "grid_search" in value)
