"""The meaning of a message: the entries of symptoms.md that fit it, without a network and without torch.

python -m ddp.launch.doctor --explain "RuntimeError: received 0 items of ancdata"

A message that an entry quotes in its heading, or after "Also", is looked for word by word; numbers and paths in it may be others.
Otherwise nothing fits: a wrong entry costs more than none. A symptom without a message is looked for on the page.
"""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.command_line.cli import command, option, parse

PAGE = Path(__file__).with_suffix(".md")
CHECKLIST = PAGE.with_name("my_job.md")
CONSEQUENCES = "It ended, and the log does not say why"  # the section of messages that other errors leave behind
QUOTED = re.compile(r"`(.+?)`")
MOST_ENTRIES = 3


@dataclass(frozen=True)
class ExplainConfig:
    """Settings of ``ddp.launch.doctor --explain``."""

    explain: str = option("", "text to look up in symptoms.md: a message or a traceback")


class Entry(NamedTuple):
    section: str
    title: str
    body: str  # in Markdown

    @property
    def names(self) -> str:
        """The messages, quoted, and the words for a symptom: the title, and the line below it that begins with "Also"."""
        also = re.match(r"- \*\*Also\*\*: (.+(?:\n  .+)*)", self.body)
        return " ".join(f"{self.title} {also[1] if also else ''}".split())

    def contained_in(self, text: str) -> int:
        """The length of the longest message that a masked text contains; for ``...`` there may be anything."""
        messages = (masked(quoted).split("...") for quoted in QUOTED.findall(self.names))
        return max((len("".join(one)) for one in messages if _in_this_order(one, text)), default=0)


def _in_this_order(pieces: list[str], text: str) -> bool:
    """Whether a text has these pieces as whole words: signal 1 is not signal 15."""
    return (
        re.search(r"(?<!\w)" + ".*?".join(re.escape(piece.strip()) for piece in pieces) + r"(?!\w)", text) is not None
    )


def entries() -> list[Entry]:
    found = []
    for part in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        section, *parts = re.split(r"^### (.+)\n", part, flags=re.MULTILINE)
        heading = section.partition("\n")[0]
        found += [Entry(heading, title, body.strip()) for title, body in zip(parts[::2], parts[1::2], strict=True)]
    return found


def masked(text: str) -> str:
    """The text in small letters, with one sign for each path and for each number with its unit, but for those of signals."""
    text = re.sub(r"[│╭╮╰╯─]", " ", text)  # the frames of rich's tracebacks
    text = re.sub(r"(?:[\w.~-]*/)+[\w.-]*", "P", text)
    return " ".join(re.sub(r"(?<!-)(?<!signal )(?<!signal: )\b\d[\w.]*", "N", text.lower()).split())


def matches(text: str) -> list[Entry]:
    """The entries of which a text contains a message, the longest first. One that other errors leave behind comes last."""
    text_masked, known = masked(text), entries()
    lengths = {entry: entry.contained_in(text_masked) for entry in known}
    found = sorted(
        (entry for entry in known if lengths[entry]),
        key=lambda entry: (entry.section == CONSEQUENCES, -lengths[entry]),
    )
    return found[:MOST_ENTRIES]


def readable(entry: Entry) -> str:
    """An entry for a terminal: without Markdown, and with paths from the repository on."""
    text = re.sub(r"\[([^]]*)\]\(([^)]*)\)", r"\1 (\2)", re.sub(r"\n +", " ", f"{entry.title}\n{entry.body}"))
    text = text.replace("(../../", "(").replace("(../", "(ddp/")
    text = re.sub(r"\((README|my_job)", r"(ddp/launch/\1", text)
    return "\n".join(
        textwrap.fill(line, 100, subsequent_indent="    ") for line in re.sub(r"\*\*|`", "", text).splitlines()
    )


def unknown() -> str:
    """Words for a text that no entry fits."""
    return (
        f"nothing fits among the {len(entries())} symptoms of {PAGE}\n"
        "Look for the first traceback: the last error of a log is seldom its cause. python -m ddp.launch.doctor --explain LOG\n"
        f"finds it in a whole log. Symptoms without a message are headings of that page. If the job hangs, is slow or less accurate,\n"
        f"{CHECKLIST} has an order of questions."
    )


@command
def main() -> None:
    found = matches(parse(ExplainConfig, "ddp.launch.doctor", __doc__).explain)
    print("\n\n".join(map(readable, found)) or unknown())
    sys.exit(0 if found else 1)
