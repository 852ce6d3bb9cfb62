"""What members of an exchange tell each other through the driver, before they have a line of their own: plain data."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Meeting:
    """A member tells the others of its `generation` what they need to find it, and asks for what is `wanted` of them,
    for at most `timeout_s` seconds."""

    member: int
    generation: int
    told: dict[str, bytes]
    wanted: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True)
class Met:
    """All that members of the generation have told so far; `over` is why they do not meet (any more)."""

    told: dict[str, bytes] = field(default_factory=dict)
    over: str = ""
