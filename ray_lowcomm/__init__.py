"""Low-communication distributed training on Ray.

`LowCommTrainer` trains with a train function of your own; `python -m jobs.train` with a model and data by name.
"""

from typing import TYPE_CHECKING, Any

from ray_lowcomm.core.errors import LowCommError

if TYPE_CHECKING:
    from ray_lowcomm.engine.member import Context
    from ray_lowcomm.runtime.trainer import LowCommTrainer, Result

__all__ = ["Context", "LowCommError", "LowCommTrainer", "Result"]


def __getattr__(name: str) -> Any:
    # The pure layers are imported on machines and in tests that have no Ray, and fast: the trainer only when asked for.
    if name in ("LowCommTrainer", "Result"):
        from ray_lowcomm.runtime import trainer

        return getattr(trainer, name)
    if name == "Context":
        from ray_lowcomm.engine.member import Context

        return Context
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
