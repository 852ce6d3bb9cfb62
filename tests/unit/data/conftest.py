from pathlib import Path

import pytest

from ray_lowcomm.core.settings import DataSettings

TEXTS = [f"document {i}: " + " ".join(str(i * k) for k in range(i % 40)) for i in range(200)]


@pytest.fixture
def texts() -> list[str]:
    return TEXTS


@pytest.fixture
def files(tmp_path: Path):
    """Settings of data by path, with the cache in the test's own folder."""

    def make(path: Path | str, **fields) -> DataSettings:
        fields = {"sequence_length": 16, "validation_fraction": 0.2, **fields}
        return DataSettings(name="files", path=str(path), cache_dir=str(tmp_path / "cache"), **fields)

    return make
