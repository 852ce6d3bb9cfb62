"""A small convolutional classifier with BatchNorm: the vision model of the jobs."""

import torch.nn.functional as F
from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError


class SmallCNN(nn.Module):
    """Three 3x3 convolutions with BatchNorm and ReLU, pooled to one vector, for images of at least 2x2.

    The initial weights come from torch's global random generator. Raises ModelError for sizes that make no model.
    """

    def __init__(self, channels: int = 1, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        for name, value in (("channels", channels), ("classes", classes), ("width", width)):
            if value < 1:
                raise ModelError(f"model.args.{name} = {value}: must be at least 1")
        self.features = nn.Sequential(
            *_stage(channels, width),
            *_stage(width, 2 * width),
            nn.MaxPool2d(2),
            *_stage(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the mean cross-entropy, 0-d, in nats, for `image` [B, C, H, W] float and `label` [B] int64."""
        return F.cross_entropy(self.logits(batch["image"]).float(), batch["label"])

    def metrics(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the share of images whose label has the highest score, as `accuracy`, 0-d."""
        return {"accuracy": (self.logits(batch["image"]).argmax(1) == batch["label"]).float().mean()}

    def logits(self, image: Tensor) -> Tensor:
        """Returns the scores of the classes, [B, classes], for `image`, [B, C, H, W]."""
        return self.head(self.features(image))


def _stage(channels_in: int, channels_out: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(channels_out), nn.ReLU()]
