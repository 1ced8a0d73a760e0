"""The report of a detector, and the kinds of such reports, which are explained in ddp/audit/findings.md."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ddp.audit.watch.event_types import Event

PAGE = Path(__file__).parent / "findings.md"


class Kind(NamedTuple):
    """A kind of finding.

    :ivar how: it is seen, and what is not
    :ivar sort: ``"Wrong"``, which one run proves; ``"Suspicion"``, which a second run confirms or clears; or ``"Hint"``
    :ivar what: is wrong
    :ivar cure: what to do
    :ivar chapter: the page that explains it
    """

    how: str
    sort: str
    what: str
    cure: str
    chapter: str


def _kinds() -> dict[str, Kind]:
    """The kinds by name, in the order of the page: a heading and text for each detector, and below it one for each name."""
    kinds = {}
    # Links to chapters count by their names.
    text = re.sub(r"\*\* \[(.+)\]\(.*\)$", r"** \1", PAGE.read_text(), flags=re.MULTILINE)
    for part in text.split("\n## ")[1:]:
        detector, *findings = part.split("\n### ")
        how = " ".join(detector.partition("\n")[2].split())
        for finding in findings:
            name, *items = finding.split("\n- ")
            sort = items[0].partition(":")[0].strip("*")
            kinds[name.strip()] = Kind(how, sort, *(" ".join(item.split()[1:]) for item in items))
    return kinds


KINDS = _kinds()
# How GitHub wants the text of an annotation, and the values before it.
TEXT = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
VALUE = TEXT | str.maketrans({":": "%3A", ",": "%2C"})


@dataclass
class Finding:
    """Something that is wrong.

    :param name: of its kind
    :param event: at the line that is to blame, in the optimizer step in which it was seen first
    :param text: what is wrong, with the numbers that prove it; without any, what the page says
    :param rank: the rank on which it was seen; None for all
    :param cure: what to do, if that is not what the page says
    :param diverges: whether it makes the ranks' weights differ
    :param is_effect: whether ranks that diverge for another reason would show it, too
    :param is_hint: whether it is no failure: it costs time or variety, is slight, or cannot be proven by runs
    :param proof: of a suspicion: how a second run has confirmed it; empty as long as none has
    :param unsettled: of a suspicion: why no second run has settled it
    """

    name: str
    event: Event
    text: str = ""
    rank: int | None = None
    cure: str = ""
    diverges: bool = False
    is_hint: bool = False
    is_effect: bool = False
    proof: str = ""
    unsettled: str = ""

    def __post_init__(self) -> None:
        kind = KINDS[self.name]
        self.text, self.cure, self.chapter = self.text or kind.what, self.cure or kind.cure, kind.chapter
        self.is_hint |= kind.sort == "Hint"

    def as_json(self) -> dict[str, object]:
        """The printed text, in parts."""
        names = ("name", "where", "text", "cure", "chapter", "rank", "is_hint", "is_wrong", "proof", "unsettled")
        return {"step": self.event.step, **{name: getattr(self, name) for name in names}}

    @property
    def is_suspicion(self) -> bool:
        """Whether no run has proven it."""
        return KINDS[self.name].sort == "Suspicion" and not self.proof

    @property
    def is_wrong(self) -> bool:
        return not self.is_hint and not self.is_suspicion

    @property
    def where(self) -> str:
        """``file:line`` in the script."""
        return self.event.where

    @property
    def place(self) -> tuple[str, str]:
        """The file, as it is printed, and the line."""
        file, _, line = self.where.removeprefix(os.getcwd() + os.sep).rpartition(":")
        return file, line

    @property
    def message(self) -> str:
        rank = "" if self.rank is None else f"rank {self.rank}, "
        proof = f"; {self.proof}" if self.proof else ""
        unsettled = f" It is not settled: {self.unsettled}." if self.is_suspicion and self.unsettled else ""
        said = f"{self.text}{proof} ({rank}step {self.event.step}).{unsettled}"
        return f"{said} {self.cure}. See raw-ddp audit --explain {self.name}"

    def __str__(self) -> str:
        return f"{':'.join(self.place)}: {'hint: ' * (not self.is_wrong)}{self.name}: {self.message}"

    def as_annotation(self) -> str:
        """The line by which GitHub shows it beside the code."""
        file, line = (part.translate(VALUE) for part in self.place)
        level = "error" if self.is_wrong else "warning"
        return f"::{level} file={file},line={line},title={self.name}::{self.message.translate(TEXT)}"


Findings = Iterator[Finding]  # what a detector yields
