from ray_lowcomm.tuning.listeners import Kept
from ray_lowcomm.tuning.trials import Trial

TRIAL = Trial(1, "a", "finished")


def test_results_are_written_after_each_trial():
    written, said = [], []
    kept = Kept(lambda: written.append(1), said.append)
    kept.started(TRIAL)
    kept.reported(TRIAL, {})
    assert written == []
    kept.ended(TRIAL)
    kept.ended(TRIAL)
    assert (len(written), said) == (2, [])


def test_a_disk_that_is_full_does_not_end_the_sweep():
    def write():
        raise OSError("[Errno 28] No space left on device")

    said = []
    kept = Kept(write, said.append)
    kept.ended(TRIAL)
    kept.ended(TRIAL)
    assert said == ["the results so far cannot be written, the sweep goes on: [Errno 28] No space left on device"]
