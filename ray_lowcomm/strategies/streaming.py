"""Settings of rounds that are applied some inner steps after their messages were made, and of parameters in fragments.

The fragments of a model follow from its layout and the settings alone.
"""

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.fragments import Fragment, cut
from ray_lowcomm.core.layout import Layout
from ray_lowcomm.core.schedule import Due, every
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import PARAMS
from ray_lowcomm.strategies import track_codecs

STREAMED = {"overlap_steps": 0, "fragments": 1, "fragment_order": "strided"}


def due(settings: StrategySettings, *moments: str) -> Due:
    """Parameters, in their fragments, and `moments` every H steps."""
    return every(dict.fromkeys((PARAMS, *moments), settings.inner_steps or 1), fragments=settings.fragments or 1)


def check_streamed(settings: StrategySettings) -> None:
    """SettingError unless fragments take turns at even distances, and a round is applied before the next one of
    parameters is launched."""
    name, period = ("param_period", settings.param_period) if settings.param_period else _inner(settings)
    parts, late = settings.fragments or 1, settings.overlap_steps
    if parts > 1 and settings.periods == "random":
        raise SettingError("strategy.fragments", parts, "needs strategy.periods: fixed")
    every({PARAMS: period}, fragments=parts)
    if isinstance(late, int) and late > period // parts:
        limit = f"strategy.{name}" if parts == 1 else f"strategy.{name} / strategy.fragments"
        raise SettingError("strategy.overlap_steps", late, f"must be at most {limit} = {period // parts}, or auto")


def unused_streamed(settings: StrategySettings) -> dict[str, str]:
    """Fields that have no effect where parameters are sent as a whole."""
    return {"fragment_order": "needs strategy.fragments of 2 or more"} if (settings.fragments or 1) == 1 else {}


def fragments_of(settings: StrategySettings, layout: Layout) -> tuple[Fragment, ...]:
    """The fragments of the parameters; () where they are sent as a whole. Of resolved settings.

    Raises:
        SettingError: the model does not make so many.
    """
    count = settings.fragments or 1
    return cut(layout, count, settings.fragment_order or "strided", _side(settings)) if count > 1 else ()


def dense_bytes(settings: StrategySettings, layout: Layout) -> tuple[int, ...]:
    """Bytes of the dense message of each fragment, or of the whole. Of resolved settings.

    Raises:
        SettingError: the model does not make so many.
    """
    return tuple(part.layout.nbytes for part in fragments_of(settings, layout)) or (layout.nbytes,)


def _inner(settings: StrategySettings) -> tuple[str, int]:
    return "inner_steps", settings.inner_steps or 1


def _side(settings: StrategySettings) -> int:
    """Of the tiles that no cut may change."""
    codec = track_codecs.codec_of(settings.codec or {}, PARAMS)
    return (codec.chunk_size if codec else settings.chunk_size) or 1
