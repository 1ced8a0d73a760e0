"""common/gpu/devices.py: how many GPUs are usable, what is said where there is none, and which implementation of NCCL is built."""

from __future__ import annotations

import os
import re
import warnings

import pytest
import torch
from torch.distributed import distributed_c10d

from common.distributed.dist_env import find_dist_env, implementation
from common.errors import UsageError
from common.gpu.devices import NCCL2_VARIABLE, count_gpus
from ddp.rendezvous.process_group import process_group
from tests.support.fake_gpu import NCCL_CREATORS, gloo_as_nccl, pretend_gpus
from tests.support.launch import run_ranks

# Before, the name "nccl" was not looked up among registered functions.
registered = pytest.mark.skipif(
    not all(hasattr(distributed_c10d, name) for name in NCCL_CREATORS),
    reason="this torch has one implementation of NCCL",
)

# In torch's words (c10/cuda/CUDAFunctions.cpp).
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading and installing "
    "a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to install a "
    "PyTorch version that has been compiled with your version of the CUDA driver."
)
LINE = (
    r"no CUDA device is usable here \(The NVIDIA driver on your system is too old \(found version 11040\)\): update the driver, or "
    rf"install a torch that is built for an older CUDA than {torch.version.cuda}"
)


@pytest.fixture
def an_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch finds no device, warns of the driver when it first looks for one, and raises the same when CUDA is used."""
    told: list[bool] = []

    def is_available() -> bool:
        if not told:
            told.append(True)
            warnings.warn(
                f"CUDA initialization: {TOO_OLD} (Triggered internally at CUDAFunctions.cpp:109.)", stacklevel=1
            )
        return False

    def init() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.mark.usefixtures("an_old_driver")
def test_a_driver_that_is_too_old_is_one_line_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    for flags in ({"device": "cuda"}, {"backend": "nccl"}):
        with pytest.raises(UsageError, match=f"^--{next(iter(flags))} .*{LINE}, or use --"):
            find_dist_env(**flags, environment={})
    caplog.clear()


@pytest.mark.usefixtures("an_old_driver")
@pytest.mark.parametrize(("local_rank", "times"), [(None, 1), ("0", 1), ("1", 0)])
def test_and_where_any_device_will_do_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, local_rank: str | None, times: int
) -> None:
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert [find_dist_env(environment={}).device.type for _ in range(2)] == ["cpu"] * 2
    assert caplog.messages == [LINE.replace("\\", "")] * times


def test_no_word_where_there_is_no_driver(caplog: pytest.LogCaptureFixture) -> None:
    assert count_gpus() == 0
    assert not caplog.messages


def built(variable: str | None) -> list[str]:
    """The classes that ``process_group`` builds under the name "nccl"."""
    if variable is not None:
        os.environ[NCCL2_VARIABLE] = variable
    with pytest.MonkeyPatch.context() as patch:
        pretend_gpus(patch, 1)
        names = gloo_as_nccl(patch)
        with process_group() as env:
            assert (env.backend, str(env.nccl_device)) == ("nccl", "cuda:0")
    return names


@registered
@pytest.mark.parametrize(("variable", "expected"), [(None, "ProcessGroupNCCL"), ("1", "ProcessGroupNCCL2")])
def test_the_one_that_overlaps_is_built_unless_the_user_asks_for_the_other(variable: str | None, expected: str) -> None:
    """The implementation of NCCL that overlaps is built, unless the user asks for the other.

    Claim (ddp/resilience/README.md): of torch's two implementations of NCCL, the one that overlaps is built.
    """
    assert run_ranks(built, 1, variable, fresh=True) == [[expected]]  # fresh: torch chooses once per process


def own_implementation() -> tuple[str, bool]:
    with process_group() as env:
        return implementation(env.device), NCCL2_VARIABLE in os.environ


def test_gloo_is_named_and_changes_nothing() -> None:
    assert run_ranks(own_implementation, 1) == [("ProcessGroupGloo", False)]


@pytest.mark.gpu
@registered
def test_a_gpu_runs_the_one_that_overlaps() -> None:
    assert run_ranks(own_implementation, 1, fresh=True) == [("ProcessGroupNCCL", True)]


def device_or_error(visible: list[str], backend: str) -> str:
    """The GPU that this rank trains on, by name; or why it does not."""
    own = visible[int(os.environ["RANK"])]
    with pytest.MonkeyPatch.context() as patch:
        pretend_gpus(patch, len(own), own)
        gloo_as_nccl(patch)
        try:
            with process_group("cuda", backend) as env:
                return own[env.device.index or 0]
        except UsageError as error:
            return f"{error} (seen by all: {error.seen_by_all})"


@registered
@pytest.mark.parametrize(
    ("visible", "backend", "gpus"),
    [
        (["a", "b", "c"], "auto", ["a", "b", "c"]),  # each was shown its own
        (["ab"] * 3, "gloo", ["a", "b", "a"]),
        (
            ["ab"] * 3,
            "auto",
            r"^ranks 0 and 2 have the same GPU, NVIDIA H100 GPU-a of .* --nproc_per_node=2, .*seen by all: True",
        ),
    ],
)
def test_ranks_that_share_gpus(visible: list[str], backend: str, gpus: list[str] | str) -> None:
    """Ranks of one node that see the same GPU share it with gloo, and are refused with NCCL.

    Three ranks of a node, which are shown these GPUs: gloo can share one, NCCL cannot.

    Claim (ddp/README.md, 1): a rank takes a GPU of those that it sees; two ranks of NCCL on one are refused, gloo's
    share it.
    """
    told = run_ranks(device_or_error, 3, visible, backend, fresh=True)
    if isinstance(gpus, list):
        assert told == gpus
    else:
        assert all(re.search(gpus, line) for line in told)
