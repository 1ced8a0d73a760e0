"""common/gpu/nccl.py: which of torch's implementations of NCCL is built. And who may build one at all."""

from __future__ import annotations

import os
import re

import pytest

from common.distributed.process_group import process_group
from common.errors import UsageError
from common.gpu.nccl import VARIABLE, implementation
from tests.common.gpu.pretended import pretended_gpus, registered
from tests.support.launch import run_ranks


def built(variable: str | None) -> list[str]:
    """What ``process_group`` builds under the name "nccl"."""
    if variable is not None:
        os.environ[VARIABLE] = variable
    with pretended_gpus(["a"]) as names, process_group() as env:
        assert (env.backend, str(env.nccl_device)) == ("nccl", "cuda:0")
    return names


@registered
@pytest.mark.parametrize(("variable", "expected"), [(None, "ProcessGroupNCCL"), ("1", "ProcessGroupNCCL2")])
def test_the_one_that_overlaps_is_built_unless_the_user_asks_for_the_other(variable: str | None, expected: str) -> None:
    assert run_ranks(built, 1, variable, fresh=True) == [[expected]]  # fresh: torch chooses once per process


def own_implementation() -> tuple[str, bool]:
    with process_group() as env:
        return implementation(env.device), VARIABLE in os.environ


def test_gloo_is_named_and_changes_nothing() -> None:
    assert run_ranks(own_implementation, 1) == [("ProcessGroupGloo", False)]


@pytest.mark.gpu
@registered
def test_a_gpu_runs_the_one_that_overlaps() -> None:
    assert run_ranks(own_implementation, 1, fresh=True) == [("ProcessGroupNCCL", True)]


def device_or_error(visible: list[list[str]], backend: str) -> str:
    """The GPU that this rank trains on, by name; or why it does not."""
    own = visible[int(os.environ["RANK"])]
    with pretended_gpus(own):
        try:
            with process_group("cuda", backend) as env:
                return own[env.device.index or 0]
        except UsageError as error:
            return f"{error} (seen by all: {error.seen_by_all})"


@registered
@pytest.mark.parametrize(
    ("visible", "backend", "gpus"),
    [
        ([["a"], ["b"], ["c"]], "auto", ["a", "b", "c"]),  # each was shown its own
        ([["a", "b"]] * 3, "gloo", ["a", "b", "a"]),
        (
            [["a", "b"]] * 3,
            "auto",
            r"^ranks 0 and 2 have the same GPU, NVIDIA H100 GPU-a of .* --nproc_per_node=2, .*seen by all: True",
        ),
    ],
)
def test_ranks_that_share_gpus(visible: list[list[str]], backend: str, gpus: list[str] | str) -> None:
    """Three ranks of a node, which are shown these GPUs: gloo can share one, NCCL cannot."""
    found = run_ranks(device_or_error, 3, visible, backend, fresh=True)
    if isinstance(gpus, list):
        assert found == gpus
    else:
        assert all(re.search(gpus, line) for line in found)
