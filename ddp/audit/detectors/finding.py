"""The report of a detector."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from ddp.audit.trace import Event


@dataclass
class Finding:
    """Something that is wrong.

    :param text: what is wrong, with the numbers that prove it
    :param cure: what to do
    :param event: at the line that is to blame, in the optimizer step in which it was seen first
    :param rank: the rank on which it was seen; None for all
    :param chapter: the page that explains it, if that is not the detector's ``CHAPTER``
    :param diverges: whether it makes the ranks' weights differ
    :param is_effect: whether ranks that diverge for another reason would show it, too
    :param is_hint: whether nothing is wrong, and the run could be faster or more varied
    """

    text: str
    cure: str
    event: Event
    rank: int | None = None
    chapter: str = ""
    diverges: bool = False
    is_hint: bool = False
    is_effect: bool = False

    def as_json(self) -> dict[str, object]:
        """The printed text, in parts."""
        own = {name: getattr(self, name) for name in ("text", "cure", "chapter", "rank", "is_hint")}
        return {"where": self.where, "step": self.event["step"], **own}

    @property
    def where(self) -> str:
        """``file:line`` in the script."""
        return str(self.event["where"])

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}, "
        place = self.where.removeprefix(os.getcwd() + os.sep)
        return f"{place}: {'hint: ' * self.is_hint}{self.text} ({rank}step {self.event['step']}). {self.cure}. See {self.chapter}"


Findings = Iterator[Finding]  # what a detector yields
