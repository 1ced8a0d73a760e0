"""How much a reader has to take in: code tokens by folder, and the files behind a run, a step and the DDP by hand.

Code tokens are names, numbers, operators and strings that are not docstrings. Comments, docstrings and layout are free.
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.launch import REPOSITORY

PRODUCT = ("common", "dataloading", "dataparallel", "ddp", "examples")
MOST_TOKENS = {
    "the product without these": 163_000,
    "ddp/conformance": 21_000,
    "the audit, the museum and the stand-in for GPUs": 41_400,
    "ddp/audit/libraries": 3_020,
    "maintain and examples/recordings": 11_000,
    "examples/climb": 4_500,
    "tests": 250_000,
}
MOST_FILES_OF_BY_HAND, MOST_TOKENS_OF_BY_HAND = 8, 5_555  # 5,500, and 1 % of slack
MOST_FILES_OF_A_STEP = 7

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
F_STRING_START, F_STRING_END = (getattr(tokenize, f"FSTRING_{end}", None) for end in ("START", "END"))

# It prints, as JSON, our files that the DDP by hand loads, those that the steps of a run enter, and what a run loads beside its subject.
PROGRAM = """
import contextlib, io, json, os, runpy, sys
import torch

def our_modules():
    return sorted(name for name, module in sys.modules.items() if (getattr(module, "__file__", None) or "").startswith(folders))

def profile(frame, event, _):
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    if event == "call":
        if stack or (function == "train_step" and file == root + "ddp/train.py"):
            stack.append(file)
            if file.startswith(folders):
                entered.add(file.removeprefix(root))
    elif event == "return" and stack:
        stack.pop()
    elif event == "return" and function == "train_epoch":
        sys.setprofile(None)  # the figures take long enough

root, run_dir, *product = sys.argv[1:]
folders = tuple(f"{root}{folder}/" for folder in product)  # A virtual environment may be below the root, too.
sys.path.insert(0, root)
reading, writing = os.pipe()
if os.fork() == 0:
    from ddp.by_hand import HandwrittenDistributedDataParallel
    print(json.dumps(our_modules()), flush=True)
    os._exit(0)
os.wait()
import matplotlib.figure, torch._dynamo  # A run imports them, slowly under a profiler.
stack, entered = [], set()
sys.argv = ["ddp.train", *"--device cpu --epochs 1 --train-samples 288 --test-samples 100 --run-dir".split(), run_dir]
sys.setprofile(profile)
with contextlib.redirect_stdout(io.StringIO()):
    runpy.run_module("ddp.train", run_name="__main__")
print(json.dumps(sorted(entered)))
print(json.dumps(sorted(name for name in sys.modules if name.partition(".")[0] in ("dataloading", "dataparallel", "torchvision"))))
"""


def code_tokens(*files: Path) -> int:
    return sum(_code_tokens(file.read_text()) for file in files)


def _code_tokens(text: str) -> int:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False)
    }
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in LAYOUT or (token.type == tokenize.STRING and token.start[0] in docstrings):
            continue
        depth -= token.type == F_STRING_END  # From Python 3.12 on, an f-string is many tokens. It counts as one.
        count += depth == 0
        depth += token.type == F_STRING_START
    return count


@pytest.mark.parametrize("what", MOST_TOKENS)
def test_code_tokens(what: str) -> None:
    """The product, its conformance suite, its audit and the tests each stay within their number of code tokens."""
    conformance, audit, museum = (
        set((REPOSITORY / "ddp" / folder).rglob("*.py")) for folder in ("conformance", "audit", "museum")
    )
    stand_in = set((REPOSITORY / "common" / "foreign_script" / "stand_in").rglob("*.py"))
    libraries = set((REPOSITORY / "ddp" / "audit" / "libraries").rglob("*.py"))
    folders = ("maintain", "examples/recordings")
    maintain = {file for folder in folders for file in (REPOSITORY / folder).rglob("*.py")}
    climb = set(
        (REPOSITORY / "examples" / "climb").rglob("*.py")
    )  # nine files, each the one before with some lines changed
    product = {file for folder in PRODUCT for file in (REPOSITORY / folder).rglob("*.py")} - climb
    files = {
        "the product without these": product - conformance - audit - museum - stand_in - maintain,
        "ddp/conformance": conformance,
        "the audit, the museum and the stand-in for GPUs": (audit | museum | stand_in) - libraries,
        "ddp/audit/libraries": libraries,
        "maintain and examples/recordings": maintain,
        "examples/climb": climb,
        "tests": set((REPOSITORY / "tests").rglob("*.py")),
    }
    assert code_tokens(*files[what]) <= MOST_TOKENS[what]


class Loaded(NamedTuple):
    """Names of modules and files of this repository that an import or a whole run loads, or a step enters."""

    by_hand: list[str]
    step: list[str]
    other_subjects: list[str]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("loaded")
    command = [sys.executable, "-c", PROGRAM, f"{REPOSITORY}/", str(folder / "run"), *PRODUCT]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return Loaded(*map(json.loads, done.stdout.splitlines()))


def modules(names: list[str]) -> list[Path]:
    """The files of modules, without those of packages."""
    files = [REPOSITORY / name.replace(".", "/") for name in names]
    return [file.with_suffix(".py") for file in files if not file.is_dir()]


def test_a_run_on_glyphs_loads_one_subject(loaded: Loaded) -> None:
    """A whole run, with its figures, loads neither the other subjects nor torchvision."""
    assert loaded.other_subjects == []


def test_the_ddp_by_hand_is_a_short_read(loaded: Loaded) -> None:
    """``from ddp.by_hand import HandwrittenDistributedDataParallel`` loads few files with few code tokens."""
    files = modules(loaded.by_hand)
    assert len(files) <= MOST_FILES_OF_BY_HAND, files
    assert code_tokens(*files) <= MOST_TOKENS_OF_BY_HAND


def test_a_step_enters_few_files(loaded: Loaded) -> None:
    """A training step on the CPU enters functions of at most seven of our files: itself, its guard, its data and its metrics."""
    assert len(loaded.step) <= MOST_FILES_OF_A_STEP, loaded.step
