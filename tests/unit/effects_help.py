"""What a run is made of, as far as settings can change it."""

from torch import nn

from ray_lowcomm.config import TrainConfig, load_config
from ray_lowcomm.core.errors import DataError
from ray_lowcomm.data import load as load_data
from ray_lowcomm.default_loop import make_optimizer, schedule_of
from ray_lowcomm.training import trainer_of


def load(*argv, environment=None, cls=TrainConfig, **options):
    return load_config(argv, cls, environment or {}, **options)


def plan(config):
    """All that the driver and the replicas are told."""
    trainer = trainer_of(config, None)
    return trainer._spec("folder"), config.tracking


def optimizer(config):
    made = make_optimizer(nn.Linear(2, 2), config.inner)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in made.param_groups]
    return type(made), groups


def rates(config):
    return [schedule_of(config.inner)(step) for step in range(config.inner.steps)]


def loop(config):
    return trainer_of(config, None).train_loop


def strategy(config):
    return config.resolved().strategy


def samples(config):
    try:
        train, validation = (load_data(config.data, split) for split in ("train", "validation"))
    except Exception as error:  # another column, another file: it was looked for
        return type(error), str(error)
    first = {name: tensor.tolist() for name, tensor in train[0].items()}
    return len(train), len(validation), first, train.model_defaults


def said_of_data(config):
    try:
        return getattr(load_data(config.data, "train"), "remarks", ())
    except DataError as error:
        return (str(error),)


def one(name, value, *more):
    return ("--" + name, value, *more)


FILES = ("--data.name", "files", "--data.path", "{text}")
IMAGES = ("--data.name", "files", "--data.path", "{images}")
SGD = one("inner.optimizer", "sgd")
DESLOC = one("strategy.name", "desloc")
DROP = one("fleet.straggler", "drop", "--fleet.quorum", "1")
GPU = one("fleet.resources_per_replica.GPU", "1")
