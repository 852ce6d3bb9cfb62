"""Text from real files of every kind, through the real `datasets`."""

import json
import os

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data import load
from ray_lowcomm.data import text as text_module
from ray_lowcomm.data.samples import Subset


def write(path, texts, column="text"):
    table = pa.table({column: texts, "source": ["here"] * len(texts)})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=50)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    elif path.suffix == ".json":
        path.write_text(json.dumps([{column: text, "source": "here"} for text in texts]))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({column: text, "source": "here"}) + "\n" for text in texts))
    else:
        path.write_text("".join(text + "\n" for text in texts))
    return path


def whole(dataset) -> bytes:
    """The text of a data set, its windows put together again."""
    batch = dataset.batch(np.arange(len(dataset)))
    return bytes([int(batch["input_ids"][0, 0])]) + bytes(batch["labels"].flatten().tolist())


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".jsonl", ".json", ".txt"])
def test_every_document_is_in_one_split_whole_and_in_order(tmp_path, files, texts, suffix):
    settings = files(write(tmp_path / f"data{suffix}", texts), eval_samples=10_000)
    end = b"\n" if suffix == ".txt" else b"\0"
    found = {name: whole(load(settings, name)) for name in ("train", "validation")}
    documents = {name: text.split(end)[:-1] for name, text in found.items()}
    assert documents["train"] + documents["validation"] != []
    expected = [text.encode() for text in texts]
    for name in documents:
        assert documents[name] == [text for text in expected if text in set(documents[name])]
    assert not set(documents["train"]) & set(documents["validation"])
    # What did not fill the last window of each split is all that may be missing.
    assert len(texts) - 2 <= sum(map(len, documents.values())) <= len(texts)
    assert 0.05 < len(documents["validation"]) / len(texts) < 0.4


def test_windows_are_memory_mapped_and_cached(tmp_path, files, texts, monkeypatch):
    settings = files(write(tmp_path / "data.parquet", texts))
    first = load(settings, "train")
    base = first._chunks[0]
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    assert not isinstance(base, np.ndarray), "the tokens were copied"
    monkeypatch.setattr(text_module._Grouper, "__call__", lambda *args: pytest.fail("made again"))
    assert whole(load(settings, "train")) == whole(first)
    assert list((tmp_path / "cache" / "ray_lowcomm").glob("*.arrow"))


def test_other_text_is_not_taken_from_the_cache(tmp_path, files, texts):
    settings = files(write(tmp_path / "data.jsonl", texts))
    first = whole(load(settings, "train"))
    write(tmp_path / "data.jsonl", [text.upper() for text in texts])
    os.utime(tmp_path / "data.jsonl", (1, 1))
    assert whole(load(settings, "train")) == first.upper()


def test_batches_over_many_chunks(tmp_path, files, texts):
    dataset = load(files(write(tmp_path / "data.jsonl", texts * 15)), "train")
    assert len(dataset._chunks) >= 3
    windows = np.concatenate(dataset._chunks)
    assert len(windows) == len(dataset)
    indices = np.random.default_rng(0).permutation(len(dataset))
    assert (dataset.batch(indices)["input_ids"].numpy() == windows[indices, :-1]).all()
    assert (dataset[7]["labels"].numpy() == windows[7, 1:]).all()


def test_a_folder_with_a_split_of_its_own(tmp_path, files, texts):
    folder = tmp_path / "a[1] folder"
    folder.mkdir()
    write(folder / "train-00.jsonl", texts[:50])
    write(folder / "train-01.jsonl", texts[50:100])
    write(folder / "valid-00.jsonl", texts[100:150])
    (folder / "README.md").write_text("not data")
    settings = files(folder, eval_samples=10_000)
    assert b"document 149" in whole(load(settings, "validation"))
    train = whole(load(settings, "train"))
    assert b"document 99:" in train
    assert b"document 100:" not in train


def test_a_pattern_and_another_column(tmp_path, files, texts):
    for part in range(3):
        write(tmp_path / f"part{part}.parquet", texts[part::3], column="content")
    dataset = load(files(tmp_path / "part[01].parquet", text_column="content"), "train")
    text = whole(dataset)
    assert b"document 2:" not in text
    assert len(text) > 1000


def test_saved_by_datasets(tmp_path, files, texts):
    made = datasets.Dataset.from_dict({"text": texts})
    datasets.DatasetDict({"train": made, "test": made.select([7, 8])}).save_to_disk(tmp_path / "saved")
    settings = files(tmp_path / "saved")
    assert whole(load(settings, "validation")).startswith(b"document 7:")
    with pytest.raises(DataError, match=r"no split 'big' \(data.split\): it has train, test"):
        load(files(tmp_path / "saved", split="big"), "train")
    made.save_to_disk(tmp_path / "one")
    assert len(load(files(tmp_path / "one"), "train")) > len(load(settings, "validation"))


def test_one_long_document_is_split_by_windows(tmp_path, files):
    (tmp_path / "one.txt").write_text("".join(chr(97 + i % 26) for i in range(16 * 100 + 1)))
    settings = files(tmp_path / "one.txt", eval_samples=10_000)
    train, validation = load(settings, "train"), load(settings, "validation")
    assert isinstance(validation, Subset)
    assert (len(train), len(validation)) == (80, 20)
    assert validation[0]["input_ids"][0] == 97 + 80 * 16 % 26


def test_two_short_lines_make_one_window_each(tmp_path, files):
    (tmp_path / "short.txt").write_text("ab\ncd\n")
    settings = files(tmp_path / "short.txt")
    assert len(load(settings, "train")) == len(load(settings, "validation")) == 1


def test_validation_is_bounded_and_the_same_every_time(tmp_path, files, texts):
    settings = files(write(tmp_path / "data.jsonl", texts), eval_samples=5)
    first, second = load(settings, "validation"), load(settings, "validation")
    assert len(first) == 5
    assert all((first[i]["labels"] == second[i]["labels"]).all() for i in range(5))


def test_rows_without_text_are_skipped(tmp_path, files, texts):
    write(tmp_path / "data.jsonl", [None, "", *texts, None])
    assert b"document 3:" in whole(load(files(tmp_path / "data.jsonl"), "train"))


def test_a_data_set_by_name(tmp_path, texts):
    write(tmp_path / "train.jsonl", texts)
    settings = DataSettings(name=f"hf:{tmp_path}", cache_dir=str(tmp_path / "cache"), sequence_length=16)
    assert load(settings, "train").model_defaults == {"vocab_size": 256, "sequence_length": 16}


def test_a_name_that_cannot_be_reached(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'no/such' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"'hf:no/such' cannot be read: ConnectionError: Couldn't reach .* network"):
        load(DataSettings(name="hf:no/such"), "train")


def bad_files(tmp_path, texts):
    write(tmp_path / "good.jsonl", texts)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "norows.parquet")
    pq.write_table(pa.table({"text": [1, 2, 3]}), tmp_path / "numbers.parquet")
    write(tmp_path / "blank.jsonl", ["", "", ""])
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is not Parquet")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "one.txt").write_text("x\n")
    (tmp_path / "file.csv").write_text("text\na\n")
    (tmp_path / "nothing").mkdir()


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("missing.txt", {}, "no such file or folder"),
        ("*.nothing", {}, "no file matches"),
        ("nothing", {}, "no file of a known kind"),
        ("file.csv", {}, "unknown kind '.csv'; known are .parquet"),
        ("*.*", {}, "unknown kind"),
        ("b*.[jp]*", {}, "files of several kinds"),
        ("empty.txt", {}, "the data set is empty"),
        ("norows.parquet", {}, "the data set is empty"),
        ("blank.jsonl", {}, "column 'text' holds no text"),
        ("one.txt", {}, "holds 1 window of 16 tokens"),
        ("broken.parquet", {}, "cannot be read: ArrowInvalid"),
        ("broken.jsonl", {}, "cannot be read: "),
        ("numbers.parquet", {}, "holds int64, not text"),
        ("good.jsonl", {"text_column": "body"}, "its columns are text, source"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(tmp_path, files, texts, capfd, path, fields, message):
    bad_files(tmp_path, texts)
    with pytest.raises(DataError) as caught:
        load(files(tmp_path / path, **fields), "train")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_that_cannot_be_had(tmp_path, files, texts):
    settings = files(write(tmp_path / "data.jsonl", texts), tokenizer=str(tmp_path))
    with pytest.raises(DataError, match=r"data.tokenizer = .*(needs transformers: pip install|cannot be loaded)"):
        load(settings, "train")


def test_names_that_do_not_exist():
    with pytest.raises(DataError, match=r"data.name = 'imagenet': must be python_stdlib, digits, files"):
        load(DataSettings(name="imagenet"), "train")
    with pytest.raises(DataError, match=r"data\.path must be given"):
        load(DataSettings(name="files"), "train")


def test_a_tokenizer_from_a_folder(tmp_path, files, texts):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: i for i, word in enumerate(["<end>", "<unknown>", *words])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unknown>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")
    fast.save_pretrained(tmp_path / "tokenizer")
    settings = files(write(tmp_path / "data.jsonl", texts), tokenizer=str(tmp_path / "tokenizer"), sequence_length=8)
    dataset = load(settings, "train")
    assert dataset.model_defaults["vocab_size"] == len(vocabulary)
    found = dataset.batch(np.arange(len(dataset)))["labels"].flatten()
    # Every document gives its words and an end.
    assert (found == 0).sum() > 100
    assert (found == vocabulary["document"]).sum() > 100
