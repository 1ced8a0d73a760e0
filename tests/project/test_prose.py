"""The pages, docstrings and comments are easy to read: short sentences, short paragraphs, no inverted beginnings."""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY

PARTS = ("by_hand", "all_reduce", "resilience", "bench", "ladder", "gpu_check", "audit", "launch", "sharded")
PAGES = (
    *("README.md", "AGENTS.md", "CHANGES.md", "dataloading/README.md", "dataparallel/README.md", "examples/README.md"),
    *("examples/climb/README.md", "ddp/README.md", "ddp/glossary.md", "ddp/launch/symptoms.md", "ddp/launch/my_job.md"),
    *("ddp/audit/findings.md", "ddp/two_machines.md", "ddp/decisions.md"),
    *(f"ddp/{part}/README.md" for part in PARTS),
)
INVERTED = re.compile(r"(Of|What)\b")  # the first word of a sentence that begins with its object
FOLDERS = ("common", "dataloading", "dataparallel", "ddp", "docs", "examples", "maintain", "tests")
LONGEST_SENTENCE, MEDIAN_SENTENCE, SENTENCES, COLUMNS = 32, 15, 5, 120  # words, words, of a paragraph, of a line


def paragraphs(text: str) -> list[str]:
    """The paragraphs and list items, without code, tables, headings, pictures and markup; inline code counts as a word.

    Bold words that begin a paragraph and end like a sentence are its heading.
    """
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(#|\||!\[|</?details).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *(-|\d+\.) `[^`]+`: `.+`$", "", text, flags=re.MULTILINE)  # a quoted line of code
    text = re.sub(r"`[^`]+`", "Code", text)
    text = re.sub(r"^ *((?:- |\d+\. )?)\*\*[^*]+[.?:]\*\*", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"<summary>|</?[a-z]+>", "\n\n", text)
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
    text = re.sub(r"^ *(-|\d+\.) ", "\n", text, flags=re.MULTILINE)
    return [" ".join(part.replace("*", "").split()) for part in re.split(r"\n\s*\n", text) if part.strip(" *\n")]


def sentences(paragraph: str) -> list[str]:
    """Sentences end with a mark before a space and a capital letter, a number or a bracket."""
    return re.split(r"(?<=[.?!:])\)? (?=[A-Z(\"])", paragraph)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_easy_to_read(page: str) -> None:
    """Sentences, paragraphs and lines are short, and no sentence begins with "Of" or "What", but for questions."""
    text = (REPOSITORY / page).read_text()
    commands = re.search(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)  # the front page's two are one line each
    long = [line for line in text.splitlines() if len(line) > COLUMNS]
    found = [line for line in long if not (commands and line in commands[1])]
    parts = list(map(sentences, paragraphs(text)))
    found += [part[0] for part in parts if len(part) > SENTENCES]
    every = [sentence for part in parts for sentence in part if len(sentence.split()) > 2]
    found += [one for one in every if len(one.split()) > LONGEST_SENTENCE]
    found += [one for one in every if INVERTED.match(one) and one.endswith(".")]
    assert not found
    assert statistics.median(len(one.split()) for one in every) <= MEDIAN_SENTENCE


def docstrings(text: str) -> list[str]:
    """All of a module, of its classes and of its functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


def comments(text: str) -> list[str]:
    """The first line of each block of comments."""
    found = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT]
    whole_lines = {token.start[0] for token in found if token.line.lstrip().startswith("#")}
    firsts = [token for token in found if not {token.start[0], token.start[0] - 1} <= whole_lines]
    return [token.string.lstrip("#: ") for token in firsts]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_and_no_comment_begins_with_of_or_what(folder: str) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}: {words.partition(chr(10))[0]}"
        for path in sorted(Path(REPOSITORY, folder).rglob("*.py"))
        for words in (*docstrings(path.read_text()), *comments(path.read_text()))
        if INVERTED.match(words)
    ]
    assert not found, "\n".join(found)
