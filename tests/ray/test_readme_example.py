"""The README's training loop, run on Ray as it stands there."""

import re
from pathlib import Path


def test_example_trains(nothing_left, tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL).group(1)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "example.py", "exec"), {"__name__": "__main__"})
    val_loss = float(capsys.readouterr().out.strip().splitlines()[-1])
    assert 0 < val_loss < 1.0
    assert (tmp_path / "outputs/my_loop/summary.json").exists()
    assert not (tmp_path / "mlruns").exists()
