"""tests/README.md: each test that it names exists, and runs in the tier that it says."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.launch import REPOSITORY

TESTS = REPOSITORY / "tests"
TIERS = ("faults", "adversary", "examples", "slow")
TABLES = (TESTS / "README.md").read_text().partition("## What is proven where")[2]
ROWS = re.findall(r"^\| (.+) \| (`.+::.+`) \| (\w+) \|$", TABLES, re.MULTILINE)


def tiers_of(path: str, name: str) -> list[str]:
    """The tiers of a test by its marks and its module's, without those of single parameters; ``default`` without any."""
    marks = []
    for node in ast.parse((TESTS / path).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks.append(ast.unparse(node.value))
        if isinstance(node, ast.FunctionDef) and node.name == name:
            marks += map(ast.unparse, node.decorator_list)
            return [tier for tier in TIERS if f"pytest.mark.{tier}" in marks] or ["default"]
    raise AssertionError(f"tests/{path} has no {name}")


@pytest.mark.parametrize(("claim", "names", "tier"), ROWS, ids=[str(number) for number in range(len(ROWS))])
def test_a_claim_has_its_tests(claim: str, names: str, tier: str) -> None:
    for path, name in re.findall(r"`([^`:]+)::(\w+)`", names):
        assert tier in tiers_of(path, name), claim


def test_every_readme_has_its_table() -> None:
    chapters = re.split(r"^### (.+)$", TABLES, flags=re.MULTILINE)
    folders = ("ddp", "ddp/conformance", "ddp/sharded", "dataparallel", "dataloading")
    assert chapters[1::2] == ["README.md", *(f"{name}/README.md" for name in folders)]
    assert all(chapter.count("::") >= 10 for chapter in chapters[2::2])
    assert sum("::" in line for line in TABLES.splitlines()) == len(ROWS) > 80  # each row was understood
