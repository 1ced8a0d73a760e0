"""Scripts that are broken in one place: a line that is dropped or moved, a wrong rank, seed or divisor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple


class Mutant(NamedTuple):
    """A script with one change.

    :ivar name: the line, what was there, and what became of it
    """

    name: str
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """All that differ from a script in one place."""
    tree = ast.parse(source)
    for parent in list(ast.walk(tree)):
        for field, value in ast.iter_fields(parent):
            for name, changed in _changes(value):
                setattr(parent, field, changed)
                yield Mutant(name, ast.unparse(tree))
                setattr(parent, field, value)


def _changes(value: Any) -> Iterator[tuple[str, Any]]:
    """The other values of a field of a node."""
    if isinstance(value, list):
        for i, one in enumerate(value):
            for name, instead in _of_statement(value, i) if isinstance(one, ast.stmt) else _changes(one):
                items = instead if isinstance(instead, list) else [instead]
                yield name, [*value[:i], *items, *value[i + 1 + (name.endswith(LATER)) :]]
    elif isinstance(value, ast.expr):
        for instead in _of_expression(value):
            yield f"line {value.lineno}: {ast.unparse(instead)} for {ast.unparse(value)}", instead


LATER = "one line later"
ALONE = {"dist.get_rank()": 0, "rank": 0, "dist.get_world_size()": 1, "ranks": 1}  # as a sole rank has them


def _of_statement(body: list[ast.stmt], i: int) -> Iterator[tuple[str, list[ast.stmt]]]:
    one = body[i]
    name = f"line {one.lineno}: {ast.unparse(one).splitlines()[0]}"
    is_docstring = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
    if isinstance(one, (ast.Expr, ast.AugAssign, ast.If)) and not is_docstring:
        yield f"{name}, dropped", [ast.Pass()]
        if i + 1 < len(body):
            yield f"{name}, {LATER}", [body[i + 1], one]
    if isinstance(one, (ast.If, ast.With)):
        yield f"{name}, always", one.body
    if isinstance(one, ast.For) and len(one.body) > 1:
        shorter = ast.For(one.target, one.iter, one.body[:-1], [], lineno=one.lineno)
        yield f"{name}, without its last line, which comes after it", [shorter, one.body[-1]]


def _of_expression(value: ast.expr) -> Iterator[ast.expr]:
    text = "" if isinstance(getattr(value, "ctx", None), ast.Store) else ast.unparse(value)
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Div, ast.Mult, ast.Add, ast.Mod)):
        yield value.left
    if text in ALONE:
        yield ast.Constant(ALONE[text])
    if isinstance(value, ast.Call) and "seed" in ast.unparse(value.func):
        yield ast.Call(value.func, [*value.args[:-1], ast.Constant(7)], value.keywords)
    if isinstance(value, ast.Constant) and isinstance(value.value, bool):
        yield ast.Constant(not value.value)
    if isinstance(value, ast.Compare) and isinstance(value.ops[0], ast.Eq):
        yield ast.Compare(value.left, [ast.NotEq()], value.comparators)
