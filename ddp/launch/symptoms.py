"""The meaning of a message: the entries of symptoms.md that fit it best, without a network and without torch.

python -m ddp.launch.doctor --explain "RuntimeError: received 0 items of ancdata"

A message of the page that the text contains comes first; numbers and paths in it may be others. Then the words count that text and
entry share: the fewer entries have a word, the more it counts.
"""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.cli import command, option, parse

PAGE = Path(__file__).with_suffix(".md")
MOST_ENTRIES = 3
LEAST_SHARE = 0.6  # of the weight of the text's words, or of those in an entry's title, that both must have


@dataclass(frozen=True)
class ExplainConfig:
    """Settings of ``ddp.launch.doctor --explain``."""

    explain: str = option("", "text to look up in symptoms.md: a message, a traceback or a few words")


class Entry(NamedTuple):
    title: str
    body: str  # in Markdown

    def contained_in(self, text: str) -> int:
        """The length of the longest message in the title that a masked text contains; for ``...`` there may be anything."""
        messages = [masked(quoted).split("...") for quoted in re.findall(r"`(.+?)`", self.title)]
        return max((len("".join(one)) for one in messages if all(piece.strip() in text for piece in one)), default=0)


def entries() -> list[Entry]:
    sections = re.split(r"^### (.+)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [
        Entry(title, body.split("\n## ")[0].strip()) for title, body in zip(sections[1::2], sections[2::2], strict=True)
    ]


def masked(text: str) -> str:
    """The text in small letters, with one sign for each path and for each number with its unit."""
    text = re.sub(r"(?:[\w.~-]*/)+[\w.-]*", "P", text)
    return " ".join(re.sub(r"\b\d[\w.]*", "N", text).lower().split())


def matches(text: str) -> list[Entry]:
    """The entries that fit a text, the best first."""
    known, given = {entry: _words(" ".join(entry)) for entry in entries()}, _words(text)
    counts = Counter(word for words in known.values() for word in words)

    def share(words: set[str], of: set[str]) -> float:
        """The share of ``of``, by weight, that is in ``words``."""
        weights = {word: math.log(1 + len(known) / max(1, counts[word])) for word in of}
        return sum(weights[word] for word in words & of) / (sum(weights.values()) or 1)

    def score(entry: Entry) -> float:
        title = _words(entry.title)
        return entry.contained_in(masked(text)) + max(
            share(given, title), share(known[entry], given) + share(title, given) / 10
        )

    scores = {entry: score(entry) for entry in known}
    least = max(LEAST_SHARE, max(scores.values()) / 2)
    return [entry for entry in sorted(known, key=scores.__getitem__, reverse=True) if scores[entry] >= least][
        :MOST_ENTRIES
    ]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z][a-z0-9]{2,}", text.lower().replace("_", " ")))


def readable(entry: Entry) -> str:
    """An entry for a terminal: without Markdown, and with paths from the repository on."""
    text = re.sub(r"\[([^]]*)\]\(([^)]*)\)", r"\1 (\2)", re.sub(r"\n +", " ", "\n".join(entry)))
    text = text.replace("(../../", "(").replace("(../", "(ddp/").replace("(README", "(ddp/launch/README")
    return "\n".join(
        textwrap.fill(line, 100, subsequent_indent="    ") for line in re.sub(r"\*\*|`", "", text).splitlines()
    )


@command
def main() -> None:
    found = matches(parse(ExplainConfig, "ddp.launch.doctor", __doc__).explain)
    print("\n\n".join(map(readable, found)) or f"nothing fits among the {len(entries())} symptoms of {PAGE}")
    sys.exit(0 if found else 1)
