import pytest

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.core.settings import RunSettings
from ray_lowcomm.core.wording import worded
from ray_lowcomm.runtime.run_folder import RunFolder


def test_a_resume_of_nothing_says_what_begins_a_run(tmp_path):
    with pytest.raises(CheckpointError, match="has no whole checkpoint to go on from; ") as caught:
        RunFolder(RunSettings(name="none", output_dir=str(tmp_path), resume=True)).__enter__()
    begins = "begins a run where there is none"
    assert worded(str(caught.value), "command").endswith(f"from; --run.resume auto {begins}")
    assert worded(str(caught.value), "program").endswith(f'from; run={{"resume": "auto"}} {begins}')


def test_a_resume_of_what_is_damaged_does_not_advise_to_begin_anew(tmp_path):
    folder = tmp_path / "torn" / "checkpoints" / "round_000002"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError) as caught:
        RunFolder(RunSettings(name="torn", output_dir=str(tmp_path), resume=True)).__enter__()
    assert "begins a run" not in str(caught.value)
