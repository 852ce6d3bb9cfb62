import pytest

from ray_lowcomm.runtime.labels import matches

EUROPE = {"ray.io/region": "eu", "ray.io/market-type": "spot"}


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, True),
        ({"ray.io/region": "eu"}, True),
        ({"ray.io/region": "us"}, False),
        ({"ray.io/region": "eu", "ray.io/market-type": "on-demand"}, False),
        ({"ray.io/region": "!us"}, True),
        ({"ray.io/region": "!eu"}, False),
        ({"ray.io/region": "in(us, eu)"}, True),
        ({"ray.io/region": "!in(us, eu)"}, False),
        ({"team": "a"}, False),
        ({"team": "!a"}, True),
    ],
)
def test_rules_of_a_selector(selector, expected):
    assert matches(EUROPE, selector) is expected
