"""The house: imports point down only, without cycles, and each subject stands alone; folders are small.

All imports count, also those inside functions and those for types.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterable
from pathlib import Path

from tests.support.launch import REPOSITORY

# Lowest first. A part is a package with all that is in it, less what has a line of its own. It imports from its own layer and
# from those below.
LAYERS = (
    ("common", "common.files", "common.gpu", "common.signals"),
    ("common.distributed", "common.data"),
    ("common.training", "common.resilience"),
    ("common.reporting", "common.recording"),
    ("dataloading", "dataparallel", "ddp", "ddp.all_reduce", "ddp.launch"),
    ("ddp.by_hand", "ddp.sharded", "ddp.conformance", "ddp.config", "ddp.data", "ddp.batchnorm"),
    ("ddp.job", "ddp.checkpoint"),
    ("ddp.resilience",),
    ("ddp.train", "ddp.evaluate", "ddp.fast"),
    ("ddp.bench", "ddp.ladder", "ddp.timeline", "ddp.gpu_check", "ddp.audit", "ddp.museum", "examples"),
)
# The three subjects are siblings, except for these: files to train on, and the benchmark that compares two subjects.
BETWEEN_SUBJECTS = {("ddp.data", "dataloading"), ("ddp.bench", "dataparallel")}
MOST_FILES_OF_A_FOLDER = 14

PACKAGES = ("common", "dataloading", "dataparallel", "ddp", "examples")
PART_LAYER = {part: number for number, layer in enumerate(LAYERS) for part in layer}


def module_name(file: Path) -> str:
    parts = file.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for package in PACKAGES for file in sorted((REPOSITORY / package).rglob("*.py"))}


def imports(file: Path) -> set[str]:
    """The project's modules that a file names in its imports."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            submodules = {f"{node.module}.{name.name}" for name in node.names}
            names |= (submodules & FILES.keys()) or {str(node.module)}
    return names & FILES.keys()


IMPORTS = {name: imports(file) for name, file in FILES.items()}


def part_of(module: str) -> str:
    while module not in PART_LAYER:
        module = module.rpartition(".")[0]
    return module


def edges_of_parts() -> Iterable[tuple[str, str, str]]:
    """For each import from one part in another: a sentence, the importing part, and the imported one."""
    for module, imported in IMPORTS.items():
        for other in imported:
            if part_of(module) != part_of(other):
                yield f"{module} imports {other}", part_of(module), part_of(other)


def test_no_import_points_up() -> None:
    """No module of the house imports from a layer above its own, within ``common`` and within ``ddp`` too."""
    assert [edge for edge, part, other in edges_of_parts() if PART_LAYER[other] > PART_LAYER[part]] == []


def test_the_subjects_are_siblings() -> None:
    """Only ``ddp/data.py`` and the benchmark of strategies import another of the three subjects."""
    subjects = {"dataloading", "dataparallel", "ddp"}
    between = {
        edge: (part, other)
        for edge, part, other in edges_of_parts()
        if {part.partition(".")[0], other} <= subjects and part.partition(".")[0] != other.partition(".")[0]
    }
    assert [edge for edge, pair in between.items() if pair not in BETWEEN_SUBJECTS] == []


def test_there_are_no_import_cycles() -> None:
    """Neither modules nor the parts of the house import one another in a circle."""
    parts: dict[str, set[str]] = {}
    for _, part, other in edges_of_parts():
        parts.setdefault(part, set()).add(other)
    graphlib.TopologicalSorter(IMPORTS).prepare()  # raises CycleError
    graphlib.TopologicalSorter(parts).prepare()


def test_no_folder_is_too_large() -> None:
    """No folder, of the tests neither, has more than 14 Python files beside its ``__init__.py``."""
    folders = [folder for package in (*PACKAGES, "tests") for folder in (REPOSITORY / package).rglob("*/")]
    sizes = {folder: sum(file.name != "__init__.py" for file in folder.glob("*.py")) for folder in folders}
    assert {folder: size for folder, size in sizes.items() if size > MOST_FILES_OF_A_FOLDER} == {}
