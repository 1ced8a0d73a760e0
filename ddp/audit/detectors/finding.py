"""What a detector reports."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ddp.audit.trace import Event


@dataclass
class Finding:
    """Something that is wrong.

    :param text: what is wrong, with the numbers that prove it
    :param cure: what to do
    :param event: at the line that is to blame, in the optimizer step in which it was seen first
    :param chapter: the page that explains it
    :param rank: the rank on which it was seen; None for all
    :param diverges: whether it makes the ranks' weights differ
    """

    text: str
    cure: str
    event: Event
    chapter: str
    rank: int | None = None
    diverges: bool = False

    def as_json(self) -> dict[str, object]:
        """What is printed, in parts."""
        own = {"text": self.text, "cure": self.cure, "chapter": self.chapter, "rank": self.rank}
        return {"where": self.where, "step": self.event["step"], **own}

    @property
    def where(self) -> str:
        """``file:line`` in the script."""
        return str(self.event["where"])

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}, "
        place = self.where.removeprefix(os.getcwd() + os.sep)
        return f"{place}: {self.text} ({rank}step {self.event['step']}). {self.cure}. See {self.chapter}"
