import pytest
from ray import tune
from ray.tune.search import BasicVariantGenerator, Searcher

from ray_lowcomm.config import load_config
from ray_lowcomm.core.errors import FleetError, SettingError
from ray_lowcomm.tuning.objective import Values
from ray_lowcomm.tuning.screen import MAX_DRAWS, Screen
from ray_lowcomm.tuning.search import ScreenedSearch, drawing
from ray_lowcomm.tuning.settings import SweepConfig
from ray_lowcomm.tuning.space import Space
from tests.unit.tuning.toy_space import BASE, SPACE, Scripted, domains, result, sample


def screened(samples, names=("val_loss",), target=None, steps=None):
    said, refused, inner = [], [], Scripted(samples)
    search = ScreenedSearch(inner, Screen(BASE, SPACE, refused.append), Values(names, target, steps), said.append)
    search.set_search_properties(None, None, {**domains(BASE), "strategy.inner_steps": 4})
    return search, inner, said, refused


def make(*argv, space=SPACE, resumed=False):
    config = load_config(["--space", "toy", "--inner.steps", "32", *argv], SweepConfig, {})
    said = []
    draw = drawing(config, space.domains(BASE), Screen(BASE, space, lambda one: None), said.append, resumed)
    return draw, said


def test_a_refused_sample_is_drawn_again_and_told():
    search, inner, said, refused = screened([sample(4, 0.95), sample(4, 0.99), sample(4, 0.5)])
    assert search.suggest("a") == sample(4, 0.5)
    assert inner.told == [("draw 1", None, False), ("draw 2", None, False)]  # Tune's OptunaSearch makes that 'pruned'
    assert [one.reason for one in refused] == ["outer_lr 0.95 > 0.9", "outer_lr 0.99 > 0.9"]
    search.on_trial_result("a", result(1, 3.0))
    search.on_trial_complete("a", result(2, 2.5))
    assert inner.told[2:] == [("draw 3", {"val_loss": 2.5}, False)]
    assert said == []


def test_a_repeated_sample_gets_the_result_of_the_first():
    search, inner, _, refused = screened(
        [sample(4, 0.5), sample(4, 0.5), sample(8, 0.5), sample(4, 0.5), sample(8, 0.6)]
    )
    search.suggest("a")
    search.suggest("b")
    assert inner.told == [("draw 2", None, True)]  # a has none yet: as if it had not been drawn
    search.on_trial_complete("a", result(2, 2.5))
    search.suggest("c")
    assert inner.told[1:] == [("draw 1", {"val_loss": 2.5}, False), ("draw 4", {"val_loss": 2.5}, False)]
    assert refused == []


def test_what_is_fixed_in_the_space_is_in_the_sample():
    search, *_ = screened([{"strategy.outer_lr": 0.5}])
    assert search.suggest("a") == sample(4, 0.5)


def test_a_search_in_vain_ends_with_a_line():
    search, inner, said, refused = screened([sample(4, 0.95)] * (MAX_DRAWS + 5))
    assert search.suggest("a") == Searcher.FINISHED
    assert said == [f"the search ends: {MAX_DRAWS} samples in a row were refused, the last because outer_lr 0.95 > 0.9"]
    assert len(refused) == MAX_DRAWS


@pytest.mark.parametrize(("error", "told"), [(False, None), (True, None)])
def test_a_trial_without_a_value_is_told_so(error, told):
    search, inner, *_ = screened([sample(4, 0.5)])
    search.suggest("a")
    search.on_trial_complete("a", None, error=error)
    assert inner.told == [("draw 1", told, error)]


def test_bytes_of_a_stopped_trial_are_those_of_a_whole_one():
    search, inner, *_ = screened([sample(4, 0.5), sample(8, 0.5)], ("val_loss", "bytes_up"), steps=32)
    search.suggest("a")
    search.suggest("b")
    search.on_trial_complete("a", result(2, 3.0))  # 8 of 32 steps
    search.on_trial_complete("b", result(8, 2.0, done=True))
    assert [told[1] for told in inner.told] == [
        {"val_loss": 3.0, "bytes_up": 8000.0},
        {"val_loss": 2.0, "bytes_up": 8000.0},
    ]


def test_a_loss_that_diverges_is_no_value():
    search, inner, *_ = screened([sample(4, 0.5)])
    search.suggest("a")
    search.on_trial_result("a", result(1, 2.0))
    search.on_trial_complete("a", result(2, float("inf")))
    assert inner.told == [("draw 1", None, False)]


def test_bytes_to_a_loss_are_those_of_the_first_round_that_reached_it():
    search, inner, *_ = screened([sample(4, 0.5), sample(4, 0.6)], ("bytes_to_loss",), 2.0)
    for trial, losses in {"a": (3.0, 2.0, 2.5, 1.0), "b": (3.0, 2.1, float("nan"), 2.2)}.items():
        search.suggest(trial)
        for number, loss in enumerate(losses, 1):
            search.on_trial_result(trial, result(number, loss))
        search.on_trial_complete(trial, result(4, losses[-1]))
    assert inner.told == [("draw 1", {"bytes_to_loss": 2000.0}, False), ("draw 2", None, False)]


def test_a_resumed_search_knows_what_it_knew():
    search, *_ = screened([sample(4, 0.5), sample(8, 0.5)])
    search.suggest("a")
    search.suggest("b")
    search.on_trial_complete("a", result(2, 2.5))
    again, inner, *_ = screened([sample(4, 0.5), sample(8, 0.7)])
    again.set_state(search.get_state())
    assert again.suggest("c") == sample(8, 0.7)
    assert inner.told == [("draw 3", {"val_loss": 2.5}, False)]
    again.on_trial_complete("b", result(3, 2.25))
    assert inner.told[1] == ("draw 2", {"val_loss": 2.25}, False)


@pytest.mark.parametrize("search", ["tpe", "nsga2"])
@pytest.mark.parametrize("objective", ["val_loss", "val_loss,bytes_up"])
def test_optuna_behind_the_screen(search, objective, tmp_path):
    """A loss that falls with outer_lr, of which more than 0.9 is refused: TPE's later draws are nearer to 0.9."""
    draw, said = make("--search", search, "--objective", objective, "--num-samples", "40")
    algorithm = draw.algorithm
    algorithm.set_search_properties(None, None, domains(BASE))
    drawn, pairs = [], set()
    for number in range(40):
        suggested = algorithm.suggest(str(number))
        pairs.add(tuple(suggested.values()))
        drawn.append(suggested["strategy.outer_lr"])
        if number == 20:  # in the middle it is saved and restored, as Tune does
            algorithm.save(str(tmp_path / "state"))
            state = algorithm.get_state()
            algorithm = make("--search", search, "--objective", objective, "--num-samples", "40")[0].algorithm
            algorithm.restore(str(tmp_path / "state"))
            algorithm.set_state(state)
        algorithm.on_trial_complete(str(number), result(1, 3 - drawn[-1]))
    assert max(drawn) <= 0.9
    assert len(pairs) == 40
    assert search == "nsga2" or sum(drawn[20:]) / 20 > sum(drawn[:10]) / 10
    assert said == []


def test_a_searcher_that_does_not_fit_the_space_says_so():
    odd = Space("odd", "", lambda base: {"strategy.topk": tune.sample_from(lambda spec: 3)})
    with pytest.raises(SettingError, match="search = 'tpe': cannot draw from this space, use random"):
        make(space=odd)
    fixed = Space("fixed", "", lambda base: {"strategy.topk": 3})
    with pytest.raises(SettingError, match="has nothing that varies"):
        make(space=fixed)


def test_random_and_grid_are_drawn_beforehand():
    draw, said = make("--search", "random", "--num-samples", "3", "--max-concurrent", "2")
    assert isinstance(draw.algorithm, BasicVariantGenerator)
    assert (draw.num_samples, draw.algorithm.max_concurrent, draw.max_concurrent) == (3, 2, None)
    draw, said = make("--search", "grid")
    assert draw.num_samples == 4  # 2 x 3 points, of which outer_lr = 1 is refused
    assert said == ["only 4 of 6 trials: there are no more that differ and are not refused"]
    draw, said = make("--search", "grid", "--num-samples", "4")
    assert said == []
    draw, said = make("--search", "grid", "--num-samples", "5")
    assert said == ["only 4 of 5 trials: there are no more that differ and are not refused"]
    never = Space("never", "", domains, refuse=lambda config: "too slow")
    with pytest.raises(FleetError, match="no trial: everything that random drew was refused, at last because too slow"):
        make("--search", "random", space=never)
