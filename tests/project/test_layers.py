"""The house: imports point down only, without cycles, and each subject stands alone; folders are small.

All imports count, also those inside functions and those for types.
"""

from __future__ import annotations

import ast
import configparser
import graphlib
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from tests.support.launch import REPOSITORY

# Lowest first. A part is a package with all that is in it, less what has a line of its own. It imports from its own layer and
# from those below.
LAYERS = (
    ("common", "common.files", "common.foreign_script", "common.gpu", "common.signals"),
    ("common.distributed", "common.data", "common.models"),
    ("common.training",),
    ("common.reporting",),
    ("common.benchmarking",),
    (
        "dataloading",
        "dataloading.synthetic",
        "dataparallel",
        "dataparallel.devices",
        "ddp",
        "ddp.all_reduce",
        "ddp.rendezvous",
        "ddp.watchdog",
        "ddp.peak_flops",
        "ddp.sampler",
        "ddp.strategies",
        "ddp.sums",
        "ddp.sync_batchnorm",
    ),
    (
        "dataloading.dataset",
        "dataparallel.broadcast",
        "dataparallel.threads",
        "ddp.by_hand",
        "ddp.config",
        "ddp.launch",
    ),
    (
        "dataloading.loader",
        "dataparallel.parallel",
        "ddp.batchnorm",
        "ddp.conformance",
        "ddp.data",
        "ddp.fast",
        "ddp.sharded",
    ),
    ("dataloading.bench", "dataloading.doctor", "dataparallel.train", "ddp.job"),
    ("dataloading.ladder", "dataloading.lfw_dataset", "dataparallel.bench", "ddp.checkpoint"),
    ("ddp.evaluate", "ddp.network", "ddp.resilience"),
    ("ddp.train",),
    ("ddp.audit", "ddp.bench", "ddp.museum"),
    ("ddp.ladder", "examples"),
    ("maintain",),  # knows all subjects, and is not installed
)
# The three subjects are siblings, except for these: files to train on, and the benchmark that compares two subjects.
BETWEEN_SUBJECTS = {("ddp.data", "dataloading"), ("ddp.bench", "dataparallel")}

SUBJECTS = ("dataloading", "dataparallel", "ddp")
# A subject's name as a word, as in "ddp.train" and "ddp/bench"; not in the distribution's name, raw-ddp.
NAMES_A_SUBJECT = re.compile(rf"(?<![\w-])(?:{'|'.join(SUBJECTS)})\b")
MOST_FILES_OF_A_FOLDER = 14

PACKAGES = ("common", *SUBJECTS, "examples", "maintain")
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


def strings(file: Path) -> list[str]:
    """The strings of a file's code: docstrings are not among them."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
    return [node.value for node in constants if isinstance(node.value, str)]


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


def test_each_folder_of_a_subject_has_its_layer() -> None:
    """So do its modules beside the folders, and those folders of ``common``."""
    inside = {name.rpartition(".")[0] for name in FILES if name.count(".") > 1} | {*FILES}
    parts = {".".join(name.split(".")[:2]) for name in inside if name.startswith(tuple(f"{one}." for one in SUBJECTS))}
    assert parts - PART_LAYER.keys() == set()


def test_no_import_points_up() -> None:
    """No module of the house imports from a layer above its own, also within ``common`` and within each subject."""
    assert [edge for edge, part, other in edges_of_parts() if PART_LAYER[other] > PART_LAYER[part]] == []


def test_common_does_not_name_a_subject() -> None:
    """Not in an import, and not in a string: no dotted name and no path of a module of ``ddp``."""
    naming = [
        name
        for name, file in FILES.items()
        if name.partition(".")[0] == "common" and any(map(NAMES_A_SUBJECT.search, strings(file)))
    ]
    assert naming == []


def test_the_subjects_are_siblings() -> None:
    """Only ``ddp/data.py`` and the benchmark of scaling import another of the three subjects."""
    between = {
        edge: (part, other.partition(".")[0])
        for edge, part, other in edges_of_parts()
        if {part.partition(".")[0], other.partition(".")[0]} <= {*SUBJECTS}
    }
    others = {edge: pair for edge, pair in between.items() if pair[0].partition(".")[0] != pair[1]}
    assert [edge for edge, pair in others.items() if pair not in BETWEEN_SUBJECTS] == []


def test_there_are_no_import_cycles() -> None:
    """Neither modules nor the parts of the house import one another in a circle."""
    parts: dict[str, set[str]] = {}
    for _, part, other in edges_of_parts():
        parts.setdefault(part, set()).add(other)
    graphlib.TopologicalSorter(IMPORTS).prepare()  # raises CycleError
    graphlib.TopologicalSorter(parts).prepare()


def test_what_is_installed_imports_nothing_else_of_the_repository() -> None:
    """A wheel has what its modules import. The tools that know all subjects, and scripts of other libraries, are in none."""
    settings = configparser.ConfigParser()
    settings.read(REPOSITORY / "setup.cfg")
    found = settings["options.packages.find"]
    included, excluded = (found[key].split() for key in ("include", "exclude"))

    def is_installed(module: str) -> bool:
        return any(fnmatch(module, one) for one in included) and not any(fnmatch(module, one) for one in excluded)

    installed = set(filter(is_installed, FILES))
    assert {name.partition(".")[0] for name in installed} == {"common", *SUBJECTS}
    assert {name: others for name in installed if (others := IMPORTS[name] - installed)} == {}
    assert "ddp.audit.libraries.job" in FILES.keys() - installed


def test_no_folder_is_too_large() -> None:
    """No folder, of the tests neither, has more than 14 Python files beside its ``__init__.py``."""
    folders = [folder for package in (*PACKAGES, "tests") for folder in (REPOSITORY / package).rglob("*/")]
    sizes = {folder: sum(file.name != "__init__.py" for file in folder.glob("*.py")) for folder in folders}
    assert {folder: size for folder, size in sizes.items() if size > MOST_FILES_OF_A_FOLDER} == {}
