"""ddp/rendezvous/process_group.py: finding a place in the job, and leaving it cleanly."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common.distributed import dist_env
from common.distributed.dist_env import DistEnv, find_dist_env
from common.errors import UsageError
from common.launchers import TORCHRUN_VARIABLES
from ddp.rendezvous.process_group import clean_exit, process_group, rendezvous_errors
from tests.support.fake_gpu import pretend_gpus
from tests.support.launch import run_command, run_ranks

TORCHRUN = dict(zip(TORCHRUN_VARIABLES, ("1", "4", "1", "2", "localhost", "29500"), strict=True))


def test_torchrun_s_variables_become_a_place() -> None:
    """Rank, local rank and world size are those of torchrun's variables.

    Claim (ddp/README.md, 1): torchrun's variables tell each rank its rank and world size; half of them are refused.
    """
    env = find_dist_env("cpu", environment=TORCHRUN)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (1, 4, 1, 2)
    assert (env.device, env.backend, env.is_main) == (torch.device("cpu"), "gloo", False)


@pytest.mark.parametrize("missing", TORCHRUN_VARIABLES)
def test_half_of_the_variables_are_refused(missing: str) -> None:
    """Some of torchrun's variables without the others are refused.

    Claim (ddp/README.md, 1): torchrun's variables tell each rank its rank and world size; half of them are refused.
    """
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(UsageError, match=f"set, but not {missing}: start with torchrun"):
        find_dist_env("cpu", environment=environment)


NONE_USABLE = r"no CUDA device is usable here \(Found no NVIDIA driver on your system\): check nvidia-smi"


@pytest.mark.parametrize(
    ("gpus", "device", "backend", "outcome"),
    [
        (0, "auto", "auto", ("cpu", "gloo")),
        (0, "auto", "nccl", f"--backend nccl needs CUDA, but {NONE_USABLE}, or use --backend gloo"),
        (0, "cuda", "auto", f"--device cuda, but {NONE_USABLE}, or use --device cpu"),
        (
            1,
            "auto",
            "auto",
            ("cuda:0", "nccl"),
        ),  # shown to this rank alone; or shared, which the ranks find when they meet
        (1, "cuda", "gloo", ("cuda:0", "gloo")),  # shared or not
        (1, "cpu", "nccl", "--backend nccl needs CUDA, but --device cpu was asked for"),
        (2, "auto", "auto", ("cuda:1", "nccl")),
        (2, "cpu", "auto", ("cpu", "gloo")),
    ],
)
def test_device_and_backend(
    monkeypatch: pytest.MonkeyPatch, gpus: int, device: str, backend: str, outcome: str | tuple[str, str]
) -> None:
    """The device of a node's second rank of two, to which so many GPUs are shown."""
    pretend_gpus(monkeypatch, gpus)
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    if isinstance(outcome, str):
        with pytest.raises(UsageError, match=outcome):
            find_dist_env(device, backend, TORCHRUN)
    else:
        env = find_dist_env(device, backend, TORCHRUN)
        assert (str(env.device), env.backend) == outcome


@pytest.mark.parametrize(
    ("gpus", "flags", "change", "expected"),
    [
        (1, (), {}, ["cpu gloo", "cpu gloo"]),
        (1, (), {"CUDA_VISIBLE_DEVICES": "5"}, ["cpu gloo", "cpu gloo"]),  # of both, as the parent's
        (1, (), {"CUDA_VISIBLE_DEVICES": "6"}, ["cuda:0 nccl", "cuda:0 nccl"]),  # perhaps each its own
        (1, (), {"WORLD_SIZE": "4"}, ["cuda:0 nccl", "cuda:0 nccl"]),  # several hosts: refused when they meet
        (1, ("cuda", "auto"), {}, ["cuda:0 nccl", "cuda:0 nccl"]),  # asked for: refused too
        (1, ("cuda", "gloo"), {}, ["cuda:0 gloo", "cuda:0 gloo"]),
        (2, (), {}, ["cuda:0 nccl", "cuda:1 nccl"]),
    ],
)
def test_ranks_of_one_host_with_too_few_gpus_all_take_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    gpus: int,
    flags: tuple[str, str],
    change: dict[str, str],
    expected: list[str],
) -> None:
    """Two ranks of one host with one GPU take the CPU; only where they may each have a GPU of their own, or ask for one, they do not.

    Claim (ddp/README.md, 1): on one host with fewer GPUs than ranks, all ranks take the CPU and gloo, and rank 0 says so.
    """
    pretend_gpus(monkeypatch, gpus)
    (tmp_path / "environ").write_bytes(b"PATH=/bin\0CUDA_VISIBLE_DEVICES=5\0")
    monkeypatch.setattr(dist_env, "Path", lambda path: tmp_path / path.rpartition("/")[2])
    envs = [
        find_dist_env(*flags, environment=TORCHRUN | {"WORLD_SIZE": "2", "RANK": r, "LOCAL_RANK": r} | change)
        for r in "01"
    ]
    assert [f"{env.device} {env.backend}" for env in envs] == expected
    on_cpu = "2 ranks, but 1 GPU here: all take the CPU and gloo; for NCCL, start with --nproc_per_node=1; to let ranks share a GPU, "
    assert caplog.messages == [on_cpu + "add --device cuda --backend gloo"] * (expected[0] == "cpu gloo")


@pytest.mark.examples
def test_the_parents_environment_is_another_ranks_too() -> None:
    """A child that was shown what this process was shown, and one that was shown something else."""
    code = "import os; from common.distributed import dist_env as d; print(d._all_ranks_see_these_gpus(os.environ))"
    for inner, outer, answer in (("3", "3", "True"), ("3", "4", "False"), (None, "3", "True")):
        change = "env -u CUDA_VISIBLE_DEVICES" if inner is None else f"env CUDA_VISIBLE_DEVICES={inner}"
        # The parent of Python is a shell that was started with the outer value.
        command = ["sh", "-c", f"{change} {sys.executable} -c '{code}'; true"]
        done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": outer}, capture_output=True, text=True)
        assert done.stdout.strip() == answer, done.stderr


def no_driver() -> None:
    raise RuntimeError(
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
        "http://www.nvidia.com/Download/index.aspx"
    )


@pytest.mark.parametrize(
    ("own", "launcher_s", "ranks_here", "threads"),
    [
        (64, 64, 8, 8),  # bound to nothing: shared by all
        (32, 64, 8, 8),  # bound to a half of the node with three others (torchrun --numa-binding=node)
        (8, 64, 8, 8),  # bound to cores of its own (--numa-binding=exclusive, srun --cpus-per-task)
        (2, 1, 2, 1),  # the parent is no launcher
        (2, None, 2, 1),  # it is not there
    ],
)
def test_a_rank_s_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, own: int, launcher_s: int | None, ranks_here: int, threads: int
) -> None:
    """A rank's number of threads is its share of the cores that the launcher has bound it to.

    Whatever the launcher has bound it to.

    Claim (ddp/README.md, 1): a rank's threads are its share of the launcher's cores; one whose cores are far from its
    GPU says so.
    """

    def usable_cores(pid: int = 0) -> int:
        if pid and launcher_s is None:
            raise ProcessLookupError
        return launcher_s if pid and launcher_s else own

    monkeypatch.setattr(dist_env, "usable_cores", usable_cores)
    environment = TORCHRUN | {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": str(ranks_here)}
    assert find_dist_env("cpu", environment=environment).share_of_cores == threads


def test_a_group_of_one_needs_no_port_and_leaves_nothing() -> None:
    """A process group of one opens no port and leaves no process or thread.

    Claim (ddp/README.md, 1): `python -m ddp.train` is a group of one.
    """
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with process_group() as env:
        assert env.sum_over_ranks(torch.ones(3)).tolist() == [1, 1, 1]
    assert not dist.is_initialized()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def user_errors(bad_ranks: list[int]) -> tuple[str, bool] | None:
    with process_group() as env:
        try:
            with env.fail_together():
                if env.rank in bad_ranks:
                    raise UsageError(f"no data on {env.rank}")
        except UsageError as error:
            return str(error), error.seen_by_all
        return None


@pytest.mark.parametrize(
    ("bad_ranks", "message"), [([], None), ([0], "no data on 0"), ([1, 2], "[rank 1] no data on 1")]
)
def test_a_user_error_on_one_rank_is_raised_on_all(bad_ranks: list[int], message: str | None) -> None:
    assert run_ranks(user_errors, 3, bad_ranks) == [message and (message, True)] * 3


def test_a_port_in_use_is_a_user_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environment = dict(zip(TORCHRUN_VARIABLES, ("0", "2", "0", "2", "127.0.0.1", port), strict=True))
        done = run_command("ddp.train", "--device", "cpu", env=environment)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: MASTER_PORT {port} is in use on 127.0.0.1")
    assert "Traceback" not in done.stderr


# On NCCL, which no machine without a GPU can start: what would be called.

NCCL = DistEnv(0, 0, 2, 2, torch.device("cuda", 0), "nccl", "node7")
GLOO = DistEnv(0, 0, 2, 2, torch.device("cpu"), "gloo", "node7")


def of_all_ranks() -> UsageError:
    error = UsageError("on every rank")
    error.seen_by_all = True
    return error


@pytest.mark.parametrize(
    ("env", "error", "called"),
    [
        (NCCL, None, ["destroy"]),
        (NCCL, of_all_ranks(), ["destroy"]),
        (NCCL, UsageError("on this rank"), ["abort"]),
        (NCCL, SystemExit(128 + signal.SIGTERM), ["abort"]),
        (GLOO, RuntimeError("a defect"), ["destroy"]),
    ],
)
def test_a_rank_that_leaves_alone_aborts_nccl_and_waits_for_no_collective(
    monkeypatch: pytest.MonkeyPatch, env: DistEnv, error: BaseException | None, called: list[str]
) -> None:
    """A rank that leaves alone aborts NCCL and waits for no collective.

    Claim (ddp/resilience/README.md): NCCL is destroyed when all leave together, and aborted by a rank that leaves alone.
    """
    calls: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: calls.append("abort"))
    with contextlib.suppress(*([type(error)] if error else [])), clean_exit(env):
        if error:
            raise error
    assert calls == called


def test_an_abort_that_fails_does_not_hide_the_error() -> None:
    with (
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist.distributed_c10d, "_abort_process_group", side_effect=dist.DistBackendError("abort")),
        pytest.raises(ZeroDivisionError),
        clean_exit(NCCL),
    ):
        raise ZeroDivisionError


def leaves_alone() -> None:
    """Rank 1 waits for an all-reduce that rank 0 never calls."""
    with contextlib.suppress(ZeroDivisionError), process_group("cuda") as env:
        if env.rank == 1:
            dist.all_reduce(torch.ones(1, device=env.device))
        raise ZeroDivisionError


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, one for each rank of NCCL")
def test_a_rank_leaves_nccl_alone_in_spite_of_a_pending_collective() -> None:
    run_ranks(leaves_alone, 2, fresh=True)


NCCLS = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO \
for details), NCCL version 2.27.3
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
"""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (dist.DistBackendError(NCCLS + "Cuda failure 2 'out of memory'"), "Cuda failure 2 'out of memory'"),
        (dist.DistBackendError(NCCLS), "ncclUnhandledCudaError: Call to CUDA function failed."),
        (
            dist.DistBackendError(
                NCCLS + "Duplicate GPU detected\nException raised from init at NCCL.cpp:5:\nframe #0: ..."
            ),
            "Duplicate GPU detected",
        ),
        (
            RuntimeError("NCCL Init failed: system error \nNCCL Last Error: no socket interface found"),
            "no socket interface found",
        ),
        (torch.AcceleratorError("CUDA error: device is busy\nFor debugging consider"), "CUDA error: device is busy"),
    ],
)
def test_nccl_s_own_line_is_the_report_when_it_cannot_start(error: RuntimeError, line: str) -> None:
    """When NCCL cannot start, its own warning is the one line.

    Claim (ddp/README.md, 2): what NCCL says when it cannot start is the one line.
    """
    with pytest.raises(UsageError) as reported, rendezvous_errors(NCCL):
        raise error
    assert str(reported.value).startswith(f"NCCL cannot start on cuda:0 of node7: {line}: nvidia-smi shows")


@pytest.mark.parametrize(
    ("env", "error"),
    [(NCCL, dist.DistNetworkError("Connection reset by peer")), (GLOO, RuntimeError("Connect timeout [none]"))],
)
def test_an_error_of_the_network_names_the_way_to_the_others(
    monkeypatch: pytest.MonkeyPatch, env: DistEnv, error: RuntimeError
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    with (
        pytest.raises(UsageError, match="node0, but node7 cannot form a group with the others: Conn"),
        rendezvous_errors(env),
    ):
        raise error


class StoppedWhileItGoes:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def stopped_in_a_finalizer() -> int | str | None:
    try:
        with process_group():
            thing = StoppedWhileItGoes()
            del thing
            time.sleep(60)
    except SystemExit as stop:
        return stop.code
    return None


def test_a_signal_in_a_finalizer_is_not_lost() -> None:
    assert run_ranks(stopped_in_a_finalizer, 1) == [128 + signal.SIGTERM]


def threads_after_leaving() -> list[str]:
    with process_group() as env, env.fail_together():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        del model
    deadline = time.monotonic() + 10.0
    while (left := gloos_threads()) and time.monotonic() < deadline:  # the kernel forgets one a moment after its end
        time.sleep(0.01)
    return left


def gloos_threads() -> list[str]:
    names = []
    for comm in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append(comm.read_text())
    return [name for name in names if "gloo" in name]


def test_leaving_the_group_ends_its_threads() -> None:
    """A thread that lives on could abort the process at its exit. (Fresh ranks: those of the pool may have had other groups.)"""
    assert run_ranks(threads_after_leaving, 2, fresh=True) == [[], []]
