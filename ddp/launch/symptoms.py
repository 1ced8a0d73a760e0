"""What a message means: the entries of symptoms.md that fit it best, without a network and without torch.

python -m ddp.launch.doctor --explain "RuntimeError: received 0 items of ancdata"

A message of the page that is contained in the text comes first; numbers and paths in it may be others. Then count the words that text
and entry share: the fewer entries have a word, the more it counts.
"""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from common.cli import command, option, parse

PAGE = Path(__file__).with_suffix(".md")
MOST_ENTRIES = 3
LEAST_SHARE = 0.55  # of the words' weight, of the text or of an entry's title, that must be shared


@dataclass(frozen=True)
class ExplainConfig:
    """Settings of ``ddp.launch.doctor --explain``."""

    explain: str = option("", "text to look up in symptoms.md: a message, a traceback or a few words")


@dataclass(frozen=True)
class Entry:
    """A symptom: its heading, and below it its lines in Markdown."""

    title: str
    body: str

    @property
    def messages(self) -> list[list[str]]:
        """The messages in the heading, each in the pieces between which anything may stand."""
        return [[masked(piece) for piece in quoted.split("...")] for quoted in re.findall(r"`(.+?)`", self.title)]


def entries() -> list[Entry]:
    sections = re.split(r"^### (.+)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [
        Entry(title, body.partition("\n## ")[0].strip())
        for title, body in zip(sections[1::2], sections[2::2], strict=True)
    ]


def masked(text: str) -> str:
    """The text in small letters, with one sign for each path and for each number with its unit."""
    text = re.sub(r"(?:[\w.~-]*/)+[\w.-]*", "P", text)
    return " ".join(re.sub(r"\b\d[\w.]*", "N", text).lower().split())


def matches(text: str) -> list[Entry]:
    """The entries that fit a text, the best first."""
    everything, masked_text, given = entries(), masked(text), _words(text)
    counts = Counter(word for entry in everything for word in _words(entry.title + entry.body))

    def share(words: set[str], of: set[str]) -> float:
        weights = {word: math.log(1 + len(everything) / max(1, counts[word])) for word in of}
        return sum(weights[word] for word in words & of) / (sum(weights.values()) or 1)

    def score(entry: Entry) -> float:
        contained = [len("".join(one)) for one in entry.messages if all(piece in masked_text for piece in one)]
        title, whole = _words(entry.title), _words(entry.title + entry.body)
        return (
            max(contained, default=0) + max(share(given, title), share(whole, given) * 0.9) + share(title, given) / 10
        )

    scores = {entry: score(entry) for entry in everything}
    best = sorted(everything, key=scores.__getitem__, reverse=True)
    return [entry for entry in best if scores[entry] >= max(LEAST_SHARE, scores[best[0]] / 2)][:MOST_ENTRIES]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z][a-z0-9]+", text.lower().replace("_", " ")))


def readable(entry: Entry) -> str:
    """An entry for a terminal: without Markdown, and with whole paths and addresses."""
    text = re.sub(r"\[([^]]*)\]\(([^)]*)\)", lambda link: f"{link[1]} ({_address(link[2])})", entry.body)
    lines = re.sub(r"\n +", " ", text).replace("**", "").replace("`", "").splitlines()
    return "\n".join(
        [entry.title.replace("`", ""), *(textwrap.fill(line, 100, subsequent_indent="    ") for line in lines)]
    )


def _address(link: str) -> str:
    return link if "://" in link else os.path.normpath(f"ddp/launch/{link}")


@command
def main() -> None:
    found = matches(parse(ExplainConfig, "ddp.launch.doctor", __doc__).explain)
    print("\n\n".join(map(readable, found)) or f"nothing fits among the {len(entries())} symptoms of {PAGE}")
    sys.exit(0 if found else 1)
