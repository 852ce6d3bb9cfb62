"""A data set with bad rows, as a user trains on it: the run goes on, and says which samples they were."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import train
from jobs._main import run_main

ROWS, BAD = 60, (7, 21, 50)


@pytest.fixture
def data(tmp_path):
    """Images of two classes, three of them with a NaN; the bad ones have a label of their own place."""
    generator = np.random.default_rng(0)
    images = generator.random((ROWS, 8, 8)).astype(np.float32)
    for row in BAD:
        images[row, 3, 3] = np.nan
    table = pa.table({"image": images.tolist(), "label": [row % 2 for row in range(ROWS)]})
    pq.write_table(table, tmp_path / "images.parquet")
    return tmp_path / "images.parquet"


def _train(tmp_path, data, capfd, *argv):
    code = run_main(
        train.main,
        [
            *("--run.output_dir", str(tmp_path), "--tracking.enabled", "false", "--fleet.transport", "local"),
            *("--data.name", "files", "--data.path", str(data), "--data.validation_fraction", "0.1"),
            *(
                "--model.name",
                "small_cnn",
                "--inner.steps",
                "64",
                "--inner.batch_size",
                "4",
                "--inner.schedule",
                "constant",
            ),
            *("--strategy.name", "diloco", "--strategy.inner_steps", "8", "--run.eval_every", "0"),
            *argv,
        ],
    )
    out = capfd.readouterr()
    return code, out.out + out.err, json.loads((tmp_path / "default" / "summary.json").read_text())


def test_bad_rows_are_skipped_counted_and_named(tmp_path, data, capfd):
    code, out, summary = _train(tmp_path, data, capfd)
    assert (code, summary["status"], summary["rounds"]) == (0, "finished", 8)
    assert (summary["nonfinite_rejected"], summary["members_lost"], summary["lost_inner_steps"]) == (0, 0, 0)
    named = {int(number) for number in re.findall(r"no optimizer step was taken \(samples (\d+)\)", out)}
    assert named
    assert named <= set(BAD)  # rows of the file: the others of their batches are not blamed
    assert summary["skipped_steps"] >= len(named)
    assert f"skipped steps {summary['skipped_steps']}: loss or gradients were not finite" in re.sub(" +", " ", out)


def test_with_skipping_off_a_replica_sits_out_single_rounds(tmp_path, data, capfd):
    argv = ("--inner.skip_nonfinite", "false", "--fleet.replicas", "3", "--strategy.inner_steps", "2")
    code, _, summary = _train(tmp_path, data, capfd, *argv)
    assert (code, summary["status"], summary["rounds"]) == (0, "finished", 32)
    assert 1 <= summary["nonfinite_rejected"] < 64  # of 96
    assert summary["skipped_steps"] == 0
