"""What Tune is told of a round."""

import math

from ray_lowcomm.tuning.trial_results import result_of

RECORD = {"round": 3, "step": 48, "members": [0, 2], "loss": 2.5, "bytes_up": 10, "bytes_down": 20}
TOTALS = {"tokens": 960, "val_loss": 2.25, "val_loss_start": 5.5, "bytes_up": 30, "bytes_down": 60}


def test_sums_are_those_of_the_run_so_far():
    assert result_of(RECORD, TOTALS) == {
        "outer_round": 3,
        "step": 48,
        "tokens": 960,
        "loss": 2.5,
        "val_loss": 2.25,
        "bytes_up": 30,
        "bytes_down": 60,
        "members": 2,
    }


def test_before_the_first_evaluation_the_loss_before_training_counts():
    assert result_of(RECORD, {**TOTALS, "val_loss": None})["val_loss"] == 5.5


def test_a_loss_that_nobody_knows_is_there_all_the_same():
    found = result_of({**RECORD, "loss": None}, {**TOTALS, "val_loss": None, "val_loss_start": None})
    assert math.isnan(found["val_loss"])
    assert math.isnan(found["loss"])
