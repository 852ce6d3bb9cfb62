"""The models that the jobs train by default, and the way in for a user's own."""

from ray_lowcomm.models.build import MODELS, build, check, check_loss, loss_of
from ray_lowcomm.models.byte_gpt import ByteGPT
from ray_lowcomm.models.huggingface import HuggingFaceLM
from ray_lowcomm.models.initial import load_weights
from ray_lowcomm.models.placing import Place, build_at
from ray_lowcomm.models.sharding import Sharded
from ray_lowcomm.models.small_cnn import SmallCNN

__all__ = [
    "MODELS",
    "ByteGPT",
    "HuggingFaceLM",
    "Place",
    "Sharded",
    "SmallCNN",
    "build",
    "build_at",
    "check",
    "check_loss",
    "load_weights",
    "loss_of",
]
