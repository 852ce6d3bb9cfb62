"""Bounds of moments that are written from what others have sent: they keep the steps that follow from becoming large.

A second moment stays non-negative: the mean of such numbers is no less than a replica's own share of it, weight · x_r,
so where rounding, or inner steps taken meanwhile, would take x_r below (the least weight) · x_r, it stops there. Adam's
first moment becomes no larger than it was, or than makes a step of the learning rate (√ of the second, with bias
corrections): what comes from others would else be divided by this replica's own second moment, which may be far
smaller. (Byte GPT, 400 steps, H = 8, k = 64 of the parameters in 1 bit: loss 2.50 without this bound and 1.98 with it;
1.99 if no moments are exchanged.)
"""

import torch
from torch import Tensor, nn

from ray_lowcomm.core.moments import Moments

FIRST_MOMENT = "exp_avg"


def bounded(moments: Moments, moment: str, parameter: nn.Parameter, after: Tensor, least: float) -> Tensor:
    """What a moment of a parameter becomes that was to be `after`, in its shape, within the bounds told of above."""
    if moments.not_negative(moment):
        before = moments.read(parameter, moment).to(after.dtype)
        return torch.maximum(after, before * least)
    if moment != FIRST_MOMENT:
        return after
    before = moments.read(parameter, moment).to(after.dtype)
    most = torch.maximum(moments.largest_first(parameter).to(after.dtype), before.abs())
    return torch.maximum(torch.minimum(after, most), -most)
