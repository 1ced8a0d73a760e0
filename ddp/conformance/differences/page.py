"""The page: what the cases' docstrings say, their code, and what they print.

torchrun --nproc_per_node=2 -m ddp.conformance.differences  (runs all cases, and writes README.md)
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping

from ddp.conformance import differences
from ddp.conformance.differences import gradients, late, modules, refused, static_graph
from ddp.conformance.differences.program import Case

SECTIONS = (gradients, static_graph, modules, refused, late)


def cases() -> dict[str, Case]:
    """The cases by their names, in the page's order."""
    functions = [
        value for section in SECTIONS for value in vars(section).values() if inspect.isgeneratorfunction(value)
    ]
    return {function.__name__: function for function in functions}


def page(outputs: Mapping[str, list[str]]) -> str:
    """The page as Markdown.

    :param outputs: what each case prints, by the case's name
    """
    parts = [f"# {inspect.getdoc(differences)}"]
    for section in SECTIONS:
        parts.append(f"## {inspect.getdoc(section)}")
        parts += [entry(c, outputs[name]) for name, c in cases().items() if c.__module__ == section.__name__]
    return "\n\n".join(parts) + "\n"


def entry(case: Case, output: list[str]) -> str:
    """One case."""
    title, _, text = (inspect.getdoc(case) or "").partition("\n")
    file = f"{case.__module__.rpartition('.')[2]}.py"
    shown = "\n".join(["```python", program(case), "```", "", "```text", *output, "```"])
    return f"### {title}\n\n`{case.__name__}` in [{file}]({file})\n{text}\n\n{shown}"


def program(case: Case) -> str:
    """A case's code without its docstring."""
    head, _, rest = textwrap.dedent(inspect.getsource(case)).partition('    """')
    body = rest.partition('"""\n')[2].lstrip("\n")
    return re.sub(r"  # type: ignore.*", "", head + body).rstrip("\n")
