"""Data that is tokens already."""

import json
from dataclasses import replace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_lowcomm.core.errors import DataError, ModelError
from ray_lowcomm.core.settings import DataSettings, ModelSettings
from ray_lowcomm.data import load
from ray_lowcomm.data import runs as runs_module
from ray_lowcomm.models import build
from tests.unit.data.test_formats import WRITERS, refused


@pytest.fixture
def files(files, tmp_path):
    """With the cache where it is not taken for data, since the whole folder is read here."""
    return lambda path, **fields: replace(files(path, **fields), cache_dir=str(tmp_path / ".cache"))


DOCUMENTS = [[(i * 7 + k) % 300 for k in range(1 + i % 50)] for i in range(100)]


def tokens_of(dataset) -> list[int]:
    batch = dataset.batch(np.arange(len(dataset)))
    assert (batch["input_ids"][:, 1:] == batch["labels"][:, :-1]).all()
    return [int(batch["input_ids"][0, 0]), *batch["labels"].flatten().tolist()]


LISTS = [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16()), pa.large_list_view(pa.int16())]


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("kind", LISTS)
def test_documents_of_any_length_are_packed(tmp_path, files, suffix, kind):
    if suffix == ".parquet" and "view" in str(kind):
        kind = pa.list_(pa.uint32())
    WRITERS[suffix](tmp_path / f"train{suffix}", pa.table({"input_ids": pa.array(DOCUMENTS, kind), "id": range(100)}))
    WRITERS[suffix](tmp_path / f"valid{suffix}", pa.table({"input_ids": pa.array(DOCUMENTS[:20], kind)}))
    dataset = load(files(tmp_path), "train")
    run = [token for document in DOCUMENTS for token in document]
    assert tokens_of(dataset) == run[: len(dataset) * 16 + 1]
    assert len(run) - len(dataset) * 16 - 1 < 16
    assert dataset.model_defaults["vocab_size"] == 300
    assert load(files(tmp_path), "validation").model_defaults["vocab_size"] == 300


def test_windows_of_fixed_length_and_another_column(tmp_path, files):
    windows = pa.array((np.arange(640).reshape(40, 16) % 90).tolist(), pa.list_(pa.int32(), 16))
    pq.write_table(pa.table({"ids": windows, "input_ids": [["x"]] * 40}), tmp_path / "a.parquet")
    settings = files(tmp_path, tokens_column="ids", eval_samples=1000)
    train, validation = load(settings, "train"), load(settings, "validation")
    assert train.model_defaults["vocab_size"] == 90
    assert 35 <= len(train) + len(validation) < 40


def test_saved_and_by_name(tmp_path, files):
    rows = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    rows.save_to_disk(tmp_path / "saved")
    saved = load(files(tmp_path / "saved"), "train")
    (tmp_path / "hub").mkdir()
    rows.to_parquet(tmp_path / "hub" / "train.parquet")
    fields = {"sequence_length": 16, "validation_fraction": 0.2, "cache_dir": str(tmp_path / "cache")}
    hub = load(DataSettings(name=f"hf:{tmp_path / 'hub'}", **fields), "train")
    assert tokens_of(saved) == tokens_of(hub)
    assert saved.model_defaults["vocab_size"] == 300


def test_padding_is_left_out(tmp_path, files):
    padded = [[*document, *[0] * (50 - len(document))] for document in DOCUMENTS]
    mask = [[1] * len(document) + [0] * (50 - len(document)) for document in DOCUMENTS]
    labels = [[*document, *[-100] * (50 - len(document))] for document in DOCUMENTS]
    pq.write_table(pa.table({"input_ids": padded, "attention_mask": mask, "labels": labels}), tmp_path / "a.parquet")
    (tmp_path / "plain").mkdir()
    pq.write_table(pa.table({"input_ids": DOCUMENTS}), tmp_path / "plain" / "b.parquet")
    assert tokens_of(load(files(tmp_path / "a.parquet"), "train")) == tokens_of(
        load(files(tmp_path / "plain"), "train")
    )


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"input_ids": [[1, 2], [3, -7]]}, "b.parquet, row 2 holds the token -7; tokens are 0 to 2^31 - 1"),
        ({"input_ids": [[1, 2], [3, 2**31]]}, "b.parquet, row 2 holds the token 2147483648"),
        ({"input_ids": [[1, None], [3, 2]]}, "b.parquet, row 1 holds null among its tokens"),
        ({"input_ids": [[1.5], [3.5]]}, "column 'input_ids' holds lists of fractions"),
        ({"input_ids": ["a", "b"]}, "column 'input_ids' holds text (string) in "),
    ],
)
def test_what_is_no_token_is_named_by_file_and_row(tmp_path, files, columns, said):
    pq.write_table(pa.table({"input_ids": DOCUMENTS}), tmp_path / "a.parquet")
    pq.write_table(pa.table(columns), tmp_path / "b.parquet")
    assert said in refused(files(tmp_path))


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({"labels": [[1, 2], [-100, 4]]}, "row 2 has 'labels' other than its tokens"),
        ({"attention_mask": [[1, 1], [1]]}, "row 2 holds 2 tokens and 1 values of 'attention_mask'"),
    ],
)
def test_columns_beside_the_tokens_must_fit(tmp_path, files, beside, said):
    pq.write_table(pa.table({"input_ids": [[1, 2], [3, 4]], **beside}), tmp_path / "a.parquet")
    assert said in refused(files(tmp_path))


def test_a_vocabulary_that_is_too_small_names_file_and_row(tmp_path, files):
    pq.write_table(pa.table({"input_ids": DOCUMENTS}), tmp_path / "a.parquet")
    defaults = load(files(tmp_path), "train").model_defaults
    args = {"width": 16, "layers": 1, "heads": 1}
    row = 1 + next(i for i, document in enumerate(DOCUMENTS) if 299 in document)
    said = rf"vocab_size = 299: the data set needs at least 300: .*a\.parquet, row {row} holds 299"
    with pytest.raises(ModelError, match=said):
        build(ModelSettings(args={**args, "vocab_size": 299}), defaults)
    with pytest.raises(ModelError, match=said):
        build(ModelSettings(name="no.such:factory", args={"vocab_size": 299}), defaults)
    assert sum(p.shape[0] == 300 for p in build(ModelSettings(args=args), defaults).parameters())
    assert sum(p.shape[0] == 512 for p in build(ModelSettings(args={**args, "vocab_size": 512}), defaults).parameters())


def test_text_beside_tokens_is_said(tmp_path, files, texts):
    both = pa.table({"input_ids": DOCUMENTS, "text": texts[:100]})
    pq.write_table(both, tmp_path / "a.parquet")
    dataset = load(files(tmp_path), "train")
    assert dataset.model_defaults["vocab_size"] == 300
    assert ["the tokens are trained on" in remark for remark in dataset.remarks] == [True]
    dataset = load(files(tmp_path, tokens_column=None), "train")
    assert (dataset.model_defaults["vocab_size"], dataset.remarks) == (256, ())


def test_tokens_are_read_once(tmp_path, files, monkeypatch):
    pq.write_table(pa.table({"input_ids": DOCUMENTS}), tmp_path / "a.parquet")
    first = tokens_of(load(files(tmp_path), "train"))
    monkeypatch.setattr(runs_module.TokenRuns, "encode", lambda *args: pytest.fail("read again"))
    assert tokens_of(load(files(tmp_path), "train")) == first


def test_nothing_but_empty_documents(tmp_path, files):
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": []}) + "\n")
    with pytest.raises(DataError, match="column 'input_ids' holds no tokens"):
        load(files(tmp_path), "train")
