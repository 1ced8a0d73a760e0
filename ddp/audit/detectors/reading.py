"""Hints from the text of the script, for bugs that a small run on one host does not show. Python's ``ast`` reads it."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import Trace
from ddp.audit.watch.event_types import Event


class Rule(NamedTuple):
    """Patterns of a bug, in text as ``ast`` writes it: a statement a line, and strings in single quotes.

    :ivar name: of the hint
    :ivar node: the part of the script that it is about
    :ivar pattern: at the beginning of that; VALUE stands for its group in the others
    :ivar needs: somewhere in the file
    :ivar unless: somewhere in the file, where the script is right
    """

    name: str
    node: type[ast.expr | ast.stmt]
    pattern: str
    needs: str
    unless: str


RULES = (
    Rule(
        "state-of-one-rank",
        ast.If,
        r"if (?:\w+\.)*(?:\w*rank\w*(?:\(\))? == 0|(?:is_)?(?:main|master)\w*(?:\(\))?):\n(?!(?:.*\n)*else:)"
        r"(?:.*\n)*? +(\w*(?:sched|opt)\w*(?:\[\w+\])?\.step|[\w.]*\.set_epoch)\(",
        "",
        "broadcast",
    ),
    Rule(
        "sampler-of-another-rank",
        ast.Call,
        r"[\w.]*Sampler\(.*\brank=(?:\w+\.)?(\w+)[,)]",
        r"\bVALUE = int\(os\.environ\['LOCAL_RANK'\]\)|add_argument\('--VALUE'.*default=-?\d",
        # It comes from elsewhere, or the group has the same one.
        r"\bVALUE = (?!int\(os\.environ\['LOCAL_RANK'\]\))|def \w+\(.*\bVALUE\b|init_process_group\(.*=(?:\w+\.)?VALUE\b",
    ),
    # Numbers have the same hash everywhere.
    Rule("hash-of-strings", ast.BinOp, r"()hash\((?!.*(?:id|int)\().*\) % ", "", "HASHSEED"),
    Rule(
        "unseeded-shuffle",
        ast.Call,
        r"()(?:np|numpy|random|torch)(?:\.random)?\.(?:shuffle|permutation|sample|randperm)\(",
        r"\[\w*rank\w*::",
        "seed|generator=",
    ),
    Rule(
        "schedule-of-all-ranks",
        ast.Assign,
        r"(\w+) = .*len\(\w*(?:data|set)\w*\) // (?![\w.]*(?:total|global|world))[\w.]*batch",
        r"DistributedSampler\((?:.*\n)*.*(?:LR|sched\w*)\(.*\bVALUE\b",
        r"// *\(?[\w.]*(?:world|gpu|rank|nproc|replicas|devices)",
    ),
    # The value is computed before what it comes from is reduced; each rank evaluates a part.
    Rule(
        "saved-by-its-own-value",
        ast.If,
        r"if (\w+) [<>]=? [\w.]*best\w*:\n(?:.*\n)*?.*save\w*\(",
        r"(?s)DataLoader\([^,\n]*(?:val|test|dev)[^\n]*sampler=.*\bVALUE = [^\n]*?\b(\w+)\b[^\n]*\n(?:(?!VALUE = ).)*reduce\(\1\)",
        "no such text",
    ),
)


def detect(trace: Trace) -> Findings:
    """In the files of the script in which something happens."""
    files = {event.where.rpartition(":")[0] for step in trace.ranks[0].steps for event in step.events}
    for file in sorted(files):
        with contextlib.suppress(OSError, UnicodeDecodeError, SyntaxError):
            for name, line in read(Path(file).read_text()):
                yield Finding(name, Event(where=f"{file}:{line}"))


def read(source: str) -> Iterator[tuple[str, int]]:
    """The name of each hint, and the line."""
    tree = ast.parse(source)
    text = ast.unparse(tree)
    for node in ast.walk(tree):
        for name, kind, pattern, needs, unless in RULES:
            if isinstance(node, kind) and (match := re.match(pattern, ast.unparse(node))):
                value = match[1].replace("_", "[-_]")
                if re.search(needs.replace("VALUE", value), text) and not re.search(
                    unless.replace("VALUE", value), text
                ):
                    yield name, node.lineno
