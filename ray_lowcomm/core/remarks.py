"""What the user should know about a model with a strategy: texts, and counts, which shards add up."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

SHAPES = 5  # so many are listed


@dataclass(frozen=True)
class Counted:
    """That `part` of `whole` entries are something; where none are there is nothing to say, but `whole` counts.

    `text` has places for {part}, {whole}, {rest}, the others in percent, and {shapes}, the first few of them.
    """

    text: str
    part: int
    whole: int
    shapes: tuple[str, ...] = ()

    def __str__(self) -> str:
        shapes = ", ".join(self.shapes[:SHAPES]) + (", …" if self.shapes[SHAPES:] else "")
        rest = 100 * (self.whole - self.part) // max(1, self.whole)
        return self.text.format(part=f"{self.part:,}", whole=f"{self.whole:,}", rest=rest, shapes=shapes)


Remark = str | Counted


def added_up(remarks: Iterable[Remark]) -> tuple[Remark, ...]:
    """Each text once, where it stands first, with the counts of all that have it."""
    found: dict[str, Remark] = {}
    for remark in remarks:
        if isinstance(remark, str):
            found.setdefault(remark, remark)
            continue
        before = found.get(remark.text, replace(remark, part=0, whole=0, shapes=()))
        assert isinstance(before, Counted), "a text without counts has places for them"
        shapes = tuple(dict.fromkeys(before.shapes + remark.shapes))
        found[remark.text] = Counted(remark.text, before.part + remark.part, before.whole + remark.whole, shapes)
    return tuple(found.values())


def said(remarks: Iterable[Remark]) -> tuple[str, ...]:
    """The texts of those that say something."""
    return tuple(str(remark) for remark in remarks if isinstance(remark, str) or remark.part)
