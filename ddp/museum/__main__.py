"""Silent bugs of distributed training, as people found them, and what the audit says about each.

python -m ddp.museum            # lists the exhibits
python -m ddp.museum NAME       # runs one on two ranks, as it was found and fixed, and audits it
"""

from __future__ import annotations

import ast
import difflib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common.command_line.cli import command
from common.errors import UsageError

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ROOMS = ("replicas", "gradients", "data", "state")


def exhibits() -> dict[str, Path]:
    """The exhibits by name, in the order of the rooms."""
    paths = [path for room in ROOMS for path in sorted((FOLDER / room).glob("*.py")) if path.stem != "__init__"]
    return {path.stem: path for path in paths}


@command
def main() -> None:
    names = sys.argv[1:]
    if "--help" in names or "-h" in names:
        print(__doc__)
    elif not names:
        for name, path in exhibits().items():
            print(f"{path.parent.name:>9}  {name:28} {docstring(path)[0]}")
    elif names[0] not in exhibits() or names[1:]:
        raise UsageError(f"{' '.join(names)}: there is no such exhibit; python -m ddp.museum lists them")
    else:
        _show(exhibits()[names[0]])


def _show(path: Path) -> None:
    """Run both variants of an exhibit under the audit, which prints what they print."""
    print(*docstring(path), "", diff_of(path), sep="\n")
    # Where the user has packages of our names, the audit and the exhibit still find ours.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    audit = [sys.executable, "-m", "ddp.audit", "--", os.path.relpath(path, ROOT)]
    for variant, how in (("as it was found", audit), ("fixed", [*audit, "--right"])):
        print(f"\n{variant}:", flush=True)
        done = subprocess.run(how, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        if done.returncode not in (0, 1):
            raise UsageError(f"{path.stem} {variant} could not be audited; see above")


def docstring(path: Path) -> list[str]:
    """The title of an exhibit, and its story."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n", 1)


def diff_of(path: Path) -> str:
    """The lines of an exhibit that differ when the bug is fixed, with ``BROKEN`` replaced by what it is."""
    broken, fixed = (_variant(path.read_text(), is_broken).splitlines() for is_broken in (True, False))
    _, _, *lines = difflib.unified_diff(broken, fixed, n=1, lineterm="")  # behind the names of two files
    return "\n".join(line for line in lines if not line.startswith("@@"))


class _Choose(ast.NodeTransformer):
    """Replaces each choice that depends on ``BROKEN`` by what is chosen."""

    def __init__(self, is_broken: bool) -> None:
        self._values = {"BROKEN": is_broken, "not BROKEN": not is_broken}

    def visit_If(self, node: ast.If | ast.IfExp) -> Any:
        self.generic_visit(node)
        value = self._values.get(ast.unparse(node.test))
        return node if value is None else node.body if value else node.orelse

    visit_IfExp = visit_If


def _variant(source: str, is_broken: bool) -> str:
    tree = ast.parse(source)
    del tree.body[0]  # the docstring
    return ast.unparse(_Choose(is_broken).visit(tree))


if __name__ == "__main__":
    main()
