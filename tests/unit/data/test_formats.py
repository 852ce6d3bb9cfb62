"""Files of one folder that differ, are damaged or compressed."""

import bz2
import gzip
import json
import lzma
from dataclasses import replace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data import load
from tests.unit.data.test_text import whole, write


@pytest.fixture
def files(files, tmp_path):
    """With the cache where it is not taken for data, since the whole folder is read here."""
    return lambda path, **fields: replace(files(path, **fields), cache_dir=str(tmp_path / ".cache"))


def arrow(path, table):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=50)


def jsonl(path, table):
    path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


WRITERS = {".parquet": lambda path, table: pq.write_table(table, path), ".arrow": arrow, ".jsonl": jsonl}


def refused(settings, split="train") -> str:
    with pytest.raises(DataError) as caught:
        load(settings, split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", WRITERS)
def test_columns_that_are_not_used_may_differ(tmp_path, files, texts, suffix):
    unlike = [{"id": [1] * 100, "more": [None] * 100}, {"id": ["one"] * 100}]
    for part, beside in enumerate(unlike):
        WRITERS[suffix](tmp_path / f"part{part}{suffix}", pa.table({**beside, "text": texts[part::2]}))
    text = whole(load(files(tmp_path), "train")) + whole(load(files(tmp_path), "validation"))
    assert b"document 150:" in text
    assert b"document 151:" in text


def test_a_column_that_is_not_used_may_differ_within_a_file(tmp_path, files, texts):
    rows = [{"text": text, "id": "one" if i % 2 else i} for i, text in enumerate(texts)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert b"document 31:" in whole(load(files(tmp_path), "train"))


def test_types_that_hold_the_same_are_unified(tmp_path, files, texts):
    kinds = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.null()]
    for part, kind in enumerate(kinds):
        column = pa.nulls(40) if pa.types.is_null(kind) else pa.array(texts[part * 40 : part * 40 + 40]).cast(kind)
        arrow(tmp_path / f"part{part}.arrow", pa.table({"text": column}))
    text = whole(load(files(tmp_path), "train")) + whole(load(files(tmp_path), "validation"))
    assert all(f"document {i}:".encode() in text for i in (5, 45, 85, 125))


def test_labels_of_several_widths_are_unified(tmp_path, files):
    for part, kind in enumerate(("int32", "int64", "uint8")):
        labels = pa.array([part] * 10, kind)
        pq.write_table(pa.table({"image": [[[part, 2], [3, 4]]] * 10, "label": labels}), tmp_path / f"{part}.parquet")
    dataset = load(files(tmp_path), "train")
    assert dataset.model_defaults["classes"] == 3
    assert {int(dataset[i]["label"]) for i in range(len(dataset))} == {0, 1, 2}


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_used_column_that_differs_is_named_with_file_and_types(tmp_path, files, texts, suffix):
    WRITERS[suffix](tmp_path / f"part0{suffix}", pa.table({"text": texts}))
    WRITERS[suffix](tmp_path / f"part1{suffix}", pa.table({"text": [1, 2, 3]}))
    said = refused(files(tmp_path))
    assert f"column 'text' holds whole numbers (int64) in {tmp_path / f'part1{suffix}'}, and text (" in said
    assert f"in {tmp_path / f'part0{suffix}'}" in said
    WRITERS[suffix](tmp_path / f"part1{suffix}", pa.table({"body": texts, "id": [1] * 200}))
    said = refused(files(tmp_path))
    assert f"{tmp_path / f'part1{suffix}'} has no column 'text': its columns are body, id" in said


def test_classes_of_other_names_are_named(tmp_path, files):
    for part, names in enumerate((["cat", "dog"], ["dog", "cat"])):
        features = datasets.Features(
            {"image": datasets.Array2D((2, 2), "uint8"), "label": datasets.ClassLabel(names=names)}
        )
        rows = {"image": [np.zeros((2, 2), np.uint8)] * 10, "label": [0, 1] * 5}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"part{part}.parquet")
    assert load(files(tmp_path / "part0.parquet"), "train").model_defaults == {"channels": 1, "classes": 2}
    said = refused(files(tmp_path))
    assert f"column 'label' is ClassLabel(names=['dog', 'cat']) in {tmp_path / 'part1.parquet'}" in said


DAMAGED = {
    ".parquet": lambda whole: whole[: len(whole) // 2],
    ".arrow": lambda whole: whole[: len(whole) // 2],
    ".jsonl": lambda whole: whole[: len(whole) // 2],
    ".jsonl.gz": lambda whole: gzip.compress(whole)[:-200],
    ".txt": lambda whole: whole[:999] + b"\xff" + whole[999:],
}


@pytest.mark.parametrize("suffix", DAMAGED)
def test_the_damaged_file_of_a_pattern_is_named(tmp_path, files, texts, suffix):
    for part in range(3):
        good = write(tmp_path / f"part{part}{suffix.removesuffix('.gz')}", texts).read_bytes()
        (tmp_path / f"part{part}{suffix}").write_bytes(gzip.compress(good) if suffix.endswith(".gz") else good)
    (tmp_path / f"part1{suffix}").write_bytes(DAMAGED[suffix](good))
    said = refused(files(tmp_path / f"part*{suffix}"))
    assert said.startswith(f"{tmp_path / f'part1{suffix}'} cannot be read: ")
    if suffix == ".jsonl":
        assert "line " in said


def test_the_damaged_file_of_a_saved_data_set_is_named(tmp_path, files, texts):
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved", num_shards=3)
    bad = sorted((tmp_path / "saved").glob("*.arrow"))[1]
    bad.write_bytes(bad.read_bytes()[:1500])
    assert f"{bad} cannot be read: " in refused(files(tmp_path / "saved"))


PACKERS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    ".lz4": lambda data: pa.compress(data, codec="lz4", asbytes=True),
}


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json"])
def test_compressed_text_is_read(tmp_path, files, texts, suffix, packed):
    plain = write(tmp_path / f"plain{suffix}", texts)
    (tmp_path / f"data{suffix}{packed}").write_bytes(PACKERS[packed](plain.read_bytes()))
    assert whole(load(files(tmp_path / f"data{suffix}{packed}"), "train")) == whole(load(files(plain), "train"))


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "lz4", "zstd"])
def test_parquet_of_any_codec_is_read(tmp_path, files, texts, codec):
    pq.write_table(pa.table({"text": texts}), tmp_path / "data.parquet", compression=codec)
    assert b"document 31:" in whole(load(files(tmp_path), "train"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("data.jsonl.zip", "data.jsonl.zip is compressed in a way that is not known (.zip): .parquet"),
        ("data.txt.Z", "is compressed in a way that is not known (.z)"),
        ("data.zip", "unknown kind '.zip'; known are .parquet"),
        ("data.parquet.gz", "data.parquet.gz cannot be read while it is compressed as a whole: unpack it first"),
    ],
)
def test_what_cannot_be_unpacked_is_named(tmp_path, files, name, said):
    (tmp_path / name).write_bytes(b"something")
    assert said in refused(files(tmp_path / name))


def test_a_folder_says_which_of_its_files_cannot_be_unpacked(tmp_path, files, texts):
    write(tmp_path / "part0.jsonl", texts)
    (tmp_path / "part1.jsonl.zip").write_bytes(b"something")
    assert "part1.jsonl.zip is compressed in a way" in refused(files(tmp_path))


@pytest.mark.parametrize("text", ["[{}]", "{} {}\n{}", "[\n {},\n {}\n]\n"])
def test_json_over_several_lines(tmp_path, files, text):
    rows = [json.dumps({"text": f"document {i} " + "[]{}" * 9}, indent=1) for i in range(text.count("{}"))]
    (tmp_path / "data.json").write_text(text.replace("{}", "%s") % tuple(rows))
    train, validation = load(files(tmp_path), "train"), load(files(tmp_path), "validation")
    assert all(f"document {i}".encode() in whole(train) + whole(validation) for i in range(len(rows)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"text": "a"}, {"text": "b"', "row 2 is not JSON, or its end is missing"),
        ('[{"text": "a"}] {"text": "b"}', "there is more after the end of the list of 1 rows"),
        ('[{"text": "a"}, 7]', "row 2 is a JSON int"),
        ('[{"text": "a"}, {"text": 7}]', "column 'text' of row 2 is no"),
    ],
)
def test_json_that_is_wrong_says_where(tmp_path, files, text, said):
    (tmp_path / "data.json").write_text(text)
    assert said in refused(files(tmp_path))


def test_a_row_far_into_a_file_is_named(tmp_path, files, texts):
    rows = [json.dumps({"text": text * 20}) for text in texts * 2]
    rows[333] = json.dumps({"text": ["no", "text"]})
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    said = refused(files(tmp_path))
    assert f"{tmp_path / 'data.jsonl'} cannot be read: " in said
    assert "column 'text' of row 334" in said


def test_a_data_set_by_name_with_files_that_differ(tmp_path, texts):
    (tmp_path / "data").mkdir()
    jsonl(tmp_path / "data" / "part0.jsonl", pa.table({"text": texts[::2], "id": [1] * 100}))
    jsonl(tmp_path / "data" / "part1.jsonl", pa.table({"text": texts[1::2], "other": ["x"] * 100}))
    settings = DataSettings(name=f"hf:{tmp_path / 'data'}", cache_dir=str(tmp_path / "cache"), sequence_length=16)
    text = whole(load(settings, "train"))
    assert b"document 150:" in text
    assert b"document 151:" in text
    jsonl(tmp_path / "data" / "part1.jsonl", pa.table({"text": [[1], [2]]}))
    assert "part1.jsonl, and text (" in refused(settings)
