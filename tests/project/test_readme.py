"""The READMEs: what they quote is in the code, what they link to is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY

READMES = [
    *(REPOSITORY / name for name in ("README.md", "AGENTS.md", "CHANGES.md", "CONTRIBUTING.md", "ddp/glossary.md")),
    *(REPOSITORY / f"ddp/{name}.md" for name in ("conformance/differences", "two_machines", "decisions")),
    *(
        readme
        for depth in ("*", "tests/*", "ddp/*", "examples/*", "docs/*")
        for readme in sorted(REPOSITORY.glob(f"{depth}/README.md"))
    ),
]
QUOTES = [
    (readme, file, code)
    for readme in READMES
    for file, code in re.findall(r"^ *- `(\S+\.py)`: `(.+)`$", readme.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize(("readme", "file", "code"), QUOTES)
def test_the_quoted_line_is_in_the_code(readme: Path, file: str, code: str) -> None:
    lines = [line.strip() for line in (REPOSITORY / file).read_text().splitlines()]
    assert any(line.startswith(code) for line in lines)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_its_programs_import_what_is_there(readme: Path) -> None:
    for program in re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL):
        imports = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Import | ast.ImportFrom)]
        exec("\n".join(map(ast.unparse, imports)), {})


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_its_links_lead_somewhere(readme: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", readme.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)", prose):
        if not target.startswith("https://"):
            assert (readme.parent / target).exists(), target


def test_the_front_page_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 120
    assert len((REPOSITORY / "AGENTS.md").read_text().splitlines()) <= 60


def test_the_two_commands_come_first() -> None:
    """The first shell block of README.md has the command that trains and the one that tests.

    Claim (README.md): the first two commands are those that .ci/run runs.
    """
    shell = re.search(r"^```sh\n(.*?)^```", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shell is not None
    train, test = shell[1].splitlines()
    assert train.endswith("torchrun --nproc_per_node=2 -m ddp.train --device cpu")
    assert test.endswith("pytest -q -n 2")
