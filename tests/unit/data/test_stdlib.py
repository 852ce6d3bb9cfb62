import sysconfig
import time

import numpy as np
import pytest

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data import load
from ray_lowcomm.data.split import RowSplit, choose_validation, score_names, score_numbers


def test_the_standard_library_is_real_text_and_quick_to_load():
    start = time.perf_counter()
    train, validation = (load(DataSettings(), split) for split in ("train", "validation"))
    assert time.perf_counter() - start < 1.0
    assert 3e6 < train.tokens.nbytes < 15e6
    assert len(validation) == 512
    assert b"class OrderedDict(dict):" in train.tokens.tobytes() + validation.dataset.tokens.tobytes()
    assert b"site-packages/torch" not in train.tokens.tobytes()[:10_000]


def test_files_are_in_one_split_only(tmp_path, monkeypatch):
    for i in range(60):
        (tmp_path / f"module{i:02}.py").write_text(f"# module {i:02}\n" * 20)
    for folder in ("test", "site-packages", "config-3.11"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("# unwanted\n")
    (tmp_path / "_sysconfigdata_x.py").write_text("# unwanted\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    settings = DataSettings(validation_fraction=0.3, eval_samples=100_000)
    texts = [load(settings, split).tokens.tobytes() for split in ("train", "validation")]
    documents = [text.split(b"\0")[:-1] for text in texts]
    assert [text.count(b"unwanted") for text in texts] == [0, 0]
    assert len(documents[0]) + len(documents[1]) == 60
    assert 5 < len(documents[1]) < 30
    assert sorted(documents[0]) == documents[0]


def test_an_interpreter_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="holds no Python sources"):
        load(DataSettings(), "train")


def test_the_hash_never_changes():
    assert score_names(["os.py", "json/decoder.py"]) == pytest.approx([0.03858836, 0.05227235], abs=1e-7)
    # The first outputs of the reference implementation with seed 0.
    expected = np.array([0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F], dtype=np.uint64)
    assert score_numbers(np.arange(3)) == pytest.approx(expected / 2**64)


def test_no_side_is_empty():
    assert choose_validation(np.array([0.5, 0.3, 0.9]), 0.1).tolist() == [False, True, False]
    assert choose_validation(np.array([0.05, 0.03]), 0.1).tolist() == [False, True]
    for rows in range(2, 60):
        mask = RowSplit(rows, 0.05).is_validation(np.arange(rows))
        assert 0 < mask.sum() < rows


def test_rows_of_a_block_stay_together():
    mask = RowSplit(1000, 0.3, block=10).is_validation(np.arange(1000)).reshape(100, 10)
    assert (mask == mask[:, :1]).all()
    assert 15 < mask[:, 0].sum() < 45
