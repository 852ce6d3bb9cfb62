"""The README's training loops, run on Ray as they stand there."""

import json
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_example_trains(ray_cluster, tmp_path, monkeypatch, capsys):
    example = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL).group(1)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "example.py", "exec"), {"__name__": "__main__"})
    val_loss = float(capsys.readouterr().out.strip().splitlines()[-1])
    assert 0 < val_loss < 1.0
    assert (tmp_path / "outputs/my_loop/summary.json").exists()
    assert not (tmp_path / "mlruns").exists()


def patched(text, diff):
    """`text` with the lines that a diff takes out and puts in; it has no line numbers."""
    lines, at = text.splitlines(), 0
    for line in diff.splitlines():
        sign, rest = line[:1], line[1:]
        if sign == "+":
            lines.insert(at, rest)
            at += 1
        else:
            at = lines.index(rest, at)
            lines[at : at + 1] = [] if sign == "-" else [rest]
            at += sign == " "
    return "\n".join(lines)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_example_trains_in_shards(ray_cluster, tmp_path, monkeypatch, capsys):
    example = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL).group(1)
    diff = re.search(r"```diff\n(.*?)```", README, flags=re.DOTALL).group(1)
    signs = [line[0] for line in diff.splitlines()]
    assert signs.count("+") - signs.count("-") <= 5
    monkeypatch.chdir(tmp_path)
    exec(compile(patched(example, diff), "example.py", "exec"), {"__name__": "__main__"})
    val_loss = float(capsys.readouterr().out.strip().splitlines()[-1])
    assert 0 < val_loss < 1.0
    summary = json.loads((tmp_path / "outputs/my_loop/summary.json").read_text())
    assert (summary["status"], summary["replicas_different"], summary["inner_steps"]) == ("finished", 0, 400)


def of_transformers(folder):
    """What the example leaves to the user, and its text with the model's place."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "my_model")

    def rows():
        import datasets

        tokens = [[(3 * i + k) % 64 for k in range(8)] for i in range(64)]
        return datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens})

    return {"rows": rows}, {"my_model": str(folder / "my_model"), "outputs/trainer": str(folder / "trainer")}


def of_lightning(folder):
    lightning = pytest.importorskip("lightning")
    import torch

    class MyModule(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def rows():
        return torch.randn(96, 4, generator=torch.Generator().manual_seed(0))

    return {"rows": rows, "MyModule": MyModule}, {"devices=1": "devices=1, logger=False"}


@pytest.mark.slow  # both libraries are tested every day without Ray, in tests/unit/integrations
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("library", "parts"),
    [("transformers", of_transformers), ("lightning", of_lightning)],
)
def test_example_with_a_trainer_trains(ray_cluster, tmp_path, library, parts):
    from ray_lowcomm import LowCommTrainer

    names, places = parts(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    (example,) = [text for text in blocks if f"integrations.{library} import" in text]
    assert len(example.strip().splitlines()) <= 14
    for old, new in places.items():
        assert old in example
        example = example.replace(old, new)
    exec(compile(example, "example.py", "exec"), names)
    run = {"name": "r", "output_dir": str(tmp_path)}
    settings = {"strategy": {"name": "diloco", "inner_steps": 4}, "fleet": {"replicas": 2}, "run": run}
    summary = LowCommTrainer(names["train_loop"], 8, **settings).fit().summary
    assert (summary["status"], summary["rounds"], summary["inner_steps"]) == ("finished", 2, 16)
    assert summary["replicas_different"] == 0
    assert (tmp_path / "r/model/model.safetensors").exists()
