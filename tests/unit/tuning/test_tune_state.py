import json
import pickle

import pytest

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.tuning import tune_state
from ray_lowcomm.tuning.tune_state import StateCopies, has_state


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A sweep's folder as Tune leaves it after a resume: the state of two sessions."""
    monkeypatch.setattr(tune_state, "EVERY_S", 0.0)
    tune = tmp_path / "tune"
    tune.mkdir()
    for session in ("2026-01-01_00-00-00", "2026-01-02_00-00-00"):
        (tune / f"experiment_state-{session}.json").write_text(json.dumps({"session": session}))
        (tune / f"search_gen_state-{session}.json").write_bytes(pickle.dumps({"session": session}))
    return tmp_path


NEW = "experiment_state-2026-01-02_00-00-00.json"


def test_nothing_saved_yet(tmp_path):
    assert not has_state(str(tmp_path))
    assert not has_state(tmp_path.as_uri())


def test_whole_state(folder):
    assert has_state(str(folder))
    assert has_state(folder.as_uri())


@pytest.mark.parametrize("name", [NEW, "search_gen_state-2026-01-02_00-00-00.json"])
def test_a_torn_file_is_replaced_by_its_copy(folder, name):
    StateCopies(str(folder)).keep()
    path = folder / "tune" / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    StateCopies(str(folder)).keep()  # does not take the torn one
    assert has_state(str(folder))
    assert path.read_bytes() == whole


def test_a_torn_file_without_a_copy_is_said(folder):
    (folder / "tune" / NEW).write_text('{"session": "20')
    with pytest.raises(CheckpointError, match=f"{NEW} is torn: .* no copy"):
        has_state(str(folder))


def test_copies_are_not_made_all_the_time(folder, monkeypatch):
    monkeypatch.setattr(tune_state, "EVERY_S", 1000.0)
    StateCopies(str(folder)).keep()
    assert not (folder / "tune" / "last_whole").exists()
