"""The page of differences: each case prints what is quoted, with torch's DDP and with ours, and the page is of the code that runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.distributed.rendezvous import rendezvous

from ddp.conformance import differences
from ddp.conformance.differences.__main__ import main
from ddp.conformance.differences.page import cases, page
from ddp.conformance.differences.program import compare
from tests.support.launch import run_ranks, run_torchrun
from tests.support.user_errors import UserError

pytestmark = pytest.mark.examples

PAGE = Path(differences.__file__).with_name("README.md").read_text()
# What the page says that each case prints.
QUOTED = {
    name: block.splitlines()
    for name, block in re.findall(r"^`(\w+)` in \[.*?^```text\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)
}
OF_BUILDS_FOR_CUDA = ("mixed_precision", "optimizer_in_backward")


def run_all() -> dict[str, list[str]]:
    torch.set_num_threads(1)
    store, rank, _ = next(rendezvous("env://"))
    return {name: compare(case, store, rank) for name, case in cases().items()}


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    """What all cases print now; by fresh ranks, as torch's errors leave things behind."""
    lines: dict[str, list[str]] = run_ranks(run_all, 2, fresh=True)[0]
    return lines


@pytest.mark.parametrize("name", cases())
def test_a_case_prints_what_the_page_quotes(name: str, printed: dict[str, list[str]]) -> None:
    """A case prints what the page quotes.

    Claim (ddp/conformance/README.md): each case in which torch is wrong prints what the page quotes.
    """
    if name in OF_BUILDS_FOR_CUDA and torch.version.cuda is None:
        pytest.skip("the quoted error is of a torch that was built for CUDA")
    assert printed[name] == QUOTED[name]


def test_torch_and_ours_differ_in_every_case() -> None:
    for name, lines in QUOTED.items():
        torchs, ours = ([line[5:] for line in lines if line.startswith(which)] for which in ("torch", "ours "))
        assert torchs != ours, name


def test_the_page_shows_the_code_that_runs() -> None:
    assert page(QUOTED) == PAGE  # else: torchrun --nproc_per_node=2 -m ddp.conformance.differences


@pytest.mark.parametrize("world_size", ["1", "3"])
def test_a_case_without_its_two_ranks_says_how_to_start_it(
    user_error: UserError, monkeypatch: pytest.MonkeyPatch, world_size: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    assert "start it with 'torchrun --nproc_per_node=2' in the place of 'python'" in user_error(main, "another_shape")


def test_a_case_that_does_not_exist_is_refused(user_error: UserError) -> None:
    assert "no_such_case: there is no such case; the cases are" in user_error(main, "no_such_case")


def test_a_case_runs_as_the_page_says() -> None:
    arguments = "ddp.conformance.differences two_backwards"
    assert arguments in PAGE
    run = run_torchrun(2, *arguments.split())
    assert run.stdout.splitlines() == QUOTED["two_backwards"], run.stderr
