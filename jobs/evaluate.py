"""Validation loss of a saved model.

    python -m jobs.evaluate CHECKPOINT [--SECTION.FIELD VALUE …]

CHECKPOINT is a run's ``model/`` folder, one of its ``checkpoints/round_…``
folders, or the run's folder (its model, or its newest checkpoint if it has
none). Settings are those of the run (its ``config.yaml``) unless given here;
``--help data model`` lists the fields.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from jobs._main import run_main
from jobs._saved import check_kind
from ray_lowcomm.config import ConfigError, TrainConfig, load_config
from ray_lowcomm.config_screen import help_text
from ray_lowcomm.core.errors import CheckpointError

USED = ("data.", "model.name", "model.args", "inner.batch_size")


def main(argv: Sequence[str]) -> None:
    """Print the validation loss."""
    if not argv or argv[0].startswith("-"):
        if argv and argv[0] in ("-h", "--help"):
            print(help_text(TrainConfig, argv[1:]) if argv[1:] else __doc__, end="")
            return
        raise ConfigError("which model? python -m jobs.evaluate CHECKPOINT: a model/ or checkpoints/round_… folder")
    folder = Path(argv[0])
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder: give a run's model/ or one of its checkpoints/round_… folders"
        )
    folder = _inside(folder)
    check_kind(str(_config_of(folder).parent))
    config = load_config(argv[1:], TrainConfig, base=lambda given: str(_config_of(folder)))
    for name in sorted(config.given):
        if not name.startswith(USED):
            raise ConfigError(f"{name} has no effect on an evaluation, which takes {', '.join(USED)}: leave it out")
    for name, value in evaluate(folder, config).items():
        print(f"{'validation loss' if name == 'val_loss' else name} {value:.6f}")


def evaluate(folder: Path, config: TrainConfig) -> dict[str, float]:
    """`val_loss` of the model in `folder` on the validation subset that `config` names, and its own metrics."""
    from ray_lowcomm.data import load
    from ray_lowcomm.default_loop import Evaluation
    from ray_lowcomm.engine.checkpoint import MANIFEST, is_shared
    from ray_lowcomm.models import build, load_weights

    validation = load(config.data, "validation")
    model = build(replace(config.model, init_from=None), getattr(validation, "model_defaults", None))
    if any(path.name == MANIFEST or is_shared(path.name) for path in folder.iterdir()):
        _load_checkpoint(model, folder)
    else:
        load_weights(model, str(folder))
    model.eval()
    return Evaluation(config.data, config.inner.batch_size, torch.device("cpu"), validation)(model)


def _load_checkpoint(model: nn.Module, folder: Path) -> None:
    from ray_lowcomm.core.names import named_buffers, trainable_parameters
    from ray_lowcomm.core.parts import targets
    from ray_lowcomm.engine.checkpoint import Needs, Source, shared_name, whole_manifest
    from ray_lowcomm.engine.storage import Storage

    storage, parameters = Storage(str(folder.parent)), trainable_parameters(model)
    source = Source(storage, folder.name, whole_manifest(storage, folder.name))
    state = source.gather(shared_name, Needs(targets=targets(parameters, parameters)))
    wanted = {f"strategy/anchor/{name}": p for name, p in parameters.items()}
    missing = [name for name in wanted if name not in state]
    if missing:
        raise CheckpointError(f"{folder} was made by another model: it has no {missing[0]}")
    wanted_all = wanted | {
        f"buffers/{name}": b for name, b in named_buffers(model).items() if f"buffers/{name}" in state
    }
    for name, tensor in wanted_all.items():
        if state[name].shape != tensor.shape:
            shapes = f"{list(state[name].shape)}, this one {list(tensor.shape)}"
            raise CheckpointError(f"{folder} was made by another model: {name} is of shape {shapes}")
    with torch.no_grad():
        for name, tensor in wanted_all.items():
            tensor.copy_(state[name])


def _inside(folder: Path) -> Path:
    """The folder with weights of the one that was given, which may be a run's."""
    from ray_lowcomm.engine.checkpoint import FOLDER, find_newest
    from ray_lowcomm.engine.storage import Storage

    if (folder / "model.safetensors").exists():
        return folder
    if (folder / "model").is_dir():
        return folder / "model"
    return folder / find_newest(Storage(str(folder))).folder if (folder / FOLDER).is_dir() else folder


def _config_of(folder: Path) -> Path:
    for place in (folder, folder.parent, folder.parent.parent):
        if (place / "config.yaml").exists():
            return place / "config.yaml"
    raise CheckpointError(f"{folder}: there is no config.yaml beside it or above: is it a folder of a run?")


if __name__ == "__main__":
    sys.exit(run_main(main))
