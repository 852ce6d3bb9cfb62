import io

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings
from ray_lowcomm.data import Batches, ShardedSampler, load


def png(shade, size=(5, 4), mode="RGB"):
    buffer = io.BytesIO()
    Image.new(mode, size, shade).save(buffer, "png")
    return buffer.getvalue()


@pytest.mark.parametrize("struct", [True, False])
def test_encoded_images_in_parquet(tmp_path, files, struct):
    encoded = [png((i, 0, 255)) for i in range(20)]
    column = [{"bytes": data, "path": None} for data in encoded] if struct else encoded
    pq.write_table(pa.table({"image": column, "label": [i % 3 for i in range(20)]}), tmp_path / "images.parquet")
    settings = files(tmp_path / "images.parquet")
    train, validation = load(settings, "train"), load(settings, "validation")
    assert len(train) + len(validation) == 20
    assert len(validation) > 0
    assert train.model_defaults == {"channels": 3, "classes": 3}
    batch = next(Batches(train, ShardedSampler(len(train), 1, 0, 0), 4))
    assert batch["image"].shape == (4, 3, 4, 5)
    assert str(batch["image"].dtype) == "torch.float32"
    assert (batch["image"][:, 2] == 1).all()
    assert (batch["image"][:, 1] == 0).all()
    shades = (batch["image"][:, 0, 0, 0] * 255).round().long()
    assert (shades % 3 == batch["label"]).all()


def test_arrays_and_class_labels_in_a_saved_data_set(tmp_path, files):
    features = datasets.Features(
        {"pixels": datasets.Array2D((6, 6), "uint8"), "kind": datasets.ClassLabel(names=["a", "b", "c"])}
    )
    rows = {"pixels": [np.full((6, 6), i, np.uint8) for i in range(10)], "kind": [i % 2 for i in range(10)]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    dataset = load(files(tmp_path / "saved", image_column="pixels", label_column="kind"), "train")
    assert dataset.model_defaults == {"channels": 1, "classes": 3}
    assert dataset[0]["image"].shape == (1, 6, 6)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [b"no picture"] * 5, "label": [0] * 5}, "image 0 cannot be read: UnidentifiedImageError"),
        ({"image": [png(0)] * 5, "label": ["cat"] * 5}, "holds string, not whole numbers"),
        ({"image": [png(0)] * 5, "label": [-1] * 5}, "holds -1; classes count from 0"),
        ({"image": [png(0)], "label": [0]}, "holds 1 image"),
        ({"image": [png(0)] * 5, "kind": [0] * 5}, "its columns are image, kind"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(tmp_path, files, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "bad.parquet")
    with pytest.raises(DataError) as caught:
        load(files(tmp_path / "bad.parquet"), "train")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_digits():
    settings = DataSettings(name="digits")
    train, validation = load(settings, "train"), load(settings, "validation")
    assert len(train) + len(validation) == 1797
    assert 50 < len(validation) < 130
    batch = train.batch(np.arange(32))
    assert batch["image"].shape == (32, 1, 8, 8)
    assert str(batch["image"].dtype) == "torch.float32"
    assert batch["image"].min() >= 0
    assert batch["image"].max() == 1
    assert batch["label"].tolist()[:3] == [int(train[i]["label"]) for i in range(3)]
    assert train.model_defaults == {"channels": 1, "classes": 10}
