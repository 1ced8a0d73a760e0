"""The table of the READMEs' claims in tests/README.md, collected from the docstrings of the tests that prove them.

    python -m tests.project.claims

A test names its claims in its docstring, each in a paragraph or line of its own, after a first line that says what it asserts::

    Claim (ddp/README.md, 4): gradients cross the network once per optimizer step.

The number is that of the chapter; it may be left out. Tests of one claim repeat it word for word.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent.parent
README = TESTS / "README.md"
BEGIN, END = "<!-- Made by python -m tests.project.claims -->\n", "<!-- The end of the table of claims -->\n"
PAGES = (
    "README.md",
    *(
        f"{folder}/README.md"
        for folder in (
            "ddp",
            "ddp/by_hand",
            "ddp/all_reduce",
            "ddp/resilience",
            "ddp/conformance",
            "ddp/sharded",
            "dataparallel",
            "dataloading",
        )
    ),
)
TIERS = ("faults", "adversary", "examples", "slow")
CLAIM = re.compile(
    r"^ *Claim \(([^,)]+)(?:, ([\d, ]+))?\): (.+?)\.?(?=\n *\n|\n *Claim \(|\s*\Z)", re.MULTILINE | re.DOTALL
)


class Claim(NamedTuple):
    """A sentence of a page, and a test that proves it."""

    page: str
    chapter: str  # "" or, of several chapters, "2, 6"
    sentence: str
    test: str  # FILE::NAME below tests/
    asserts: str  # the first line of the test's docstring
    tier: str

    @property
    def key(self) -> tuple[int, int, str, str]:
        chapter = int(self.chapter.partition(",")[0] or 0)
        return PAGES.index(self.page), chapter, self.chapter, self.sentence


def claims_of(file: Path) -> list[Claim]:
    """The claims of a file of tests, in its order.

    :raises ValueError: for a page that is none of PAGES
    """
    tree = ast.parse(file.read_text())
    assigned = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    of_module = [mark for value in assigned for mark in (value.elts if isinstance(value, ast.List) else [value])]
    claims = []
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not (docstring := ast.get_docstring(node)):
            continue
        # Marks of single parameters do not count.
        marks = {ast.unparse(mark) for mark in [*of_module, *node.decorator_list]}
        tier = ", ".join(tier for tier in TIERS if f"pytest.mark.{tier}" in marks) or "default"
        test = f"{file.relative_to(TESTS).as_posix()}::{node.name}"
        for page, chapter, sentence in CLAIM.findall(docstring):
            if page not in PAGES:
                raise ValueError(f"{test}: a claim of {page}, which is none of {', '.join(PAGES)}")
            asserts = docstring.partition("\n")[0].strip()
            claims.append(Claim(page, chapter, " ".join(sentence.split()), test, asserts, tier))
    return claims


def all_claims() -> list[Claim]:
    """The claims of all tests, by page, chapter and sentence."""
    return sorted(
        (claim for file in sorted(TESTS.rglob("test_*.py")) for claim in claims_of(file)), key=lambda claim: claim.key
    )


def table() -> str:
    """The tables in Markdown, one for each page. A claim that several tests prove stands at the first of them."""
    lines: list[str] = []
    page = key = None
    for claim in all_claims():
        if claim.page != page:
            lines += ["", f"### {claim.page}", "", "| claim | test | what it asserts | tier |", "|---|---|---|---|"]
        sentence = "" if claim.key == key else f"{claim.chapter}: {claim.sentence}".removeprefix(": ")
        lines.append(f"| {sentence} | `{claim.test}` | {claim.asserts} | {claim.tier} |")
        page, key = claim.page, claim.key
    return "\n".join([*lines[1:], ""])


def rewritten(text: str) -> str:
    """The text of tests/README.md with the tables of the tests as they are now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text()))
