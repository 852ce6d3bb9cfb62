import itertools

import pytest
from ray import tune

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.tuning.draws import accepted, grid_samples, grid_size, random_samples
from ray_lowcomm.tuning.screen import MAX_DRAWS, Screen
from ray_lowcomm.tuning.space import Space
from tests.unit.tuning.toy_space import BASE, SPACE, domains


def screen(space=SPACE):
    refused = []
    return Screen(BASE, space, refused.append), refused


def test_random_samples_are_of_the_seed():
    first, again, other = (list(itertools.islice(random_samples(domains(BASE), seed), 20)) for seed in (1, 1, 2))
    assert first == again != other
    assert {s["strategy.inner_steps"] for s in first} == {4, 8}
    assert all(0.4 <= s["strategy.outer_lr"] <= 1 for s in first)


def test_the_grid_has_every_point_once():
    space = {"a": tune.choice(["x", "y"]), "b": tune.uniform(0, 1), "c": tune.loguniform(1, 100), "d": 7}
    points = list(grid_samples(space, 0))
    assert grid_size(space) == len(points) == 2 * 3 * 3
    assert {(p["a"], p["b"], round(p["c"], 9), p["d"]) for p in points} == set(
        itertools.product("xy", (0, 0.5, 1), (1, 10, 100), (7,))
    )
    assert [p["a"] for p in points[:9]].count("x") not in (0, 9)  # the first half is spread over all of it


@pytest.mark.parametrize(
    ("domain", "values"),
    [
        (tune.randint(2, 11), [2, 6, 10]),  # Tune leaves the end out
        (tune.randint(2, 4), [2, 3]),
        (tune.quniform(0, 1, 0.25), [0, 0.5, 1]),
        (tune.qrandint(0, 20, 5), [0, 10, 20]),
        (tune.lograndint(1, 101), [1, 10, 100]),
        (tune.grid_search([3, 1]), [1, 3]),
    ],
)
def test_grid_of_a_domain(domain, values):
    assert sorted(p["a"] for p in grid_samples({"a": domain}, 0)) == pytest.approx(values)


@pytest.mark.parametrize("domain", [tune.sample_from(lambda spec: 3), tune.randn(0, 1)])
def test_a_function_has_no_grid(domain):
    with pytest.raises(SettingError, match="a of this space is drawn by a function and has no grid"):
        list(grid_samples({"a": domain}, 0))


def test_what_is_refused_is_drawn_again():
    judge, refused = screen()
    samples, reason = accepted(random_samples(domains(BASE), 0), judge, 30)
    assert len(samples) == 30
    assert all(s["strategy.outer_lr"] <= 0.9 for s in samples)
    assert refused
    assert all(one.reason == f"outer_lr {one.fields['strategy.outer_lr']:g} > 0.9" for one in refused)
    assert reason in {one.reason for one in refused}


def test_the_search_for_more_ends():
    few = Space("few", "", lambda base: {"strategy.inner_steps": tune.choice([4, 8])})
    judge, refused = screen(few)
    samples, reason = accepted(random_samples(few.domains(BASE), 0), judge, 5, MAX_DRAWS)
    assert sorted(s["strategy.inner_steps"] for s in samples) == [4, 8]
    assert reason == "the same settings as an earlier trial"
    assert refused == []  # repetitions are no news

    nothing = Space("nothing", "", domains, refuse=lambda config: "never")
    judge, refused = screen(nothing)
    assert accepted(random_samples(domains(BASE), 0), judge, 5, MAX_DRAWS) == ([], "never")
    assert len(refused) == MAX_DRAWS


def test_settings_that_cannot_be_are_refused():
    wrong = Space("wrong", "", lambda base: {"strategy.topk": tune.choice([70000])})
    judge, refused = screen(wrong)
    samples, reason = accepted(grid_samples(wrong.domains(BASE), 0), judge, 9)
    assert samples == []
    assert reason.startswith("strategy.topk = 70000: ")
    assert refused[0].fields == {"strategy.topk": 70000}
