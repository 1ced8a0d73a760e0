"""common/launchers.py: whatever started a rank, torchrun's variables say which one it is."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
import torch

from common.distributed.dist_env import find_dist_env
from common.errors import UsageError
from common.launchers import PORTS, adopt_launcher, expand_hosts, tasks_per_node
from tests.support.fake_gpu import pretend_gpus

SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "n[07-08],gpu1",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
MPIEXEC = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
FOURTH_OF_FOUR = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **MEETING}
AZURE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1", "AZUREML_NODE_COUNT": "2", **MEETING}
TORCHRUN = {**FOURTH_OF_FOUR, "TORCHELASTIC_RUN_ID": "none"}


def adopted(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set then."""
    after = dict(environment)
    adopt_launcher(after)
    return after


def test_a_task_of_srun() -> None:
    """In a task of srun, rank and world size are those of SLURM's variables.

    Claim (ddp/README.md): launch: a rank's number from srun, mpirun, mpiexec and Azure ML; contradictions are
    refused by name.
    """
    port = PORTS[(31 * 4711 + 2) % len(PORTS)]
    assert adopted(SRUN) == SRUN | {
        "RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n07", "MASTER_PORT": str(port)
    }  # fmt: skip
    assert adopted(SRUN | MEETING).items() >= MEETING.items()  # the user's own
    one_node = SRUN | {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"}
    assert adopted(one_node)["MASTER_ADDR"] == "localhost"


@pytest.mark.parametrize("own", [MPIRUN, MPIEXEC])
def test_a_process_of_mpirun_and_its_like(own: dict[str, str]) -> None:
    """Under mpirun and mpiexec, rank and world size are those of their variables, within a step of SLURM too.

    Also within a step of SLURM, whose variables are then those of mpirun's own helper on the node.

    Claim (ddp/README.md): launch: a rank's number from srun, mpirun, mpiexec and Azure ML; contradictions are
    refused by name.
    """
    for around in ({}, SRUN):
        assert adopted(own | MEETING | around) == own | FOURTH_OF_FOUR | around
    with pytest.raises(
        UsageError, match="does not say where the ranks meet, and MASTER_PORT is not set: pass MASTER_ADDR"
    ):
        adopted(own | {"MASTER_ADDR": "10.0.0.1"})


def test_azure_ml_leaves_out_the_ranks_of_a_node() -> None:
    assert adopted(AZURE) == AZURE | {"LOCAL_WORLD_SIZE": "2"}
    half = {name: value for name, value in AZURE.items() if name in ("RANK", "WORLD_SIZE", "AZUREML_NODE_COUNT")}
    with pytest.raises(
        UsageError, match="WORLD_SIZE, LOCAL_WORLD_SIZE set, but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"
    ):
        find_dist_env(environment=adopted(half))


@pytest.mark.parametrize(
    "alone",
    [
        {},
        {name: value for name, value in SRUN.items() if not name.startswith("SLURM_STEP")},  # sbatch's own script
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},  # the shell of srun --pty
        MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_process_by_itself_stays_so(alone: dict[str, str]) -> None:
    assert adopted(alone) == alone


def test_a_shell_of_srun_is_no_rank(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A typed command is one process there; srun starts a rank, though it inherits the shell's variables."""
    shell = SRUN | {"SLURM_PTY_PORT": "40000"}
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    assert adopted(shell) == shell
    (line,) = caplog.messages
    assert line.startswith(
        "this shell is one of 5 tasks of srun --pty, and the others run no command: this is one process"
    )
    assert adopted(TORCHRUN | shell) == TORCHRUN | shell
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    assert adopted(shell)["RANK"] == "3"


def test_a_wrapper_that_sets_all_of_them_is_trusted() -> None:
    """As a script that srun starts once per node, which starts a process per device."""
    assert adopted(SRUN | FOURTH_OF_FOUR) == SRUN | FOURTH_OF_FOUR


def test_torchrun_s_own_variables_come_first() -> None:
    one_agent = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
    for around in ({}, one_agent, MPIRUN):
        assert adopted(TORCHRUN | around) == TORCHRUN | around


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        (SRUN | {"RANK": "0"}, "RANK is 0, but SLURM's srun has started this process as RANK 3: unset RANK, which was set before"),
        (MPIRUN | MEETING | {"WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but Open MPI's mpirun has started .* WORLD_SIZE 4: unset"),
        (TORCHRUN | SRUN, "srun started 2 torchrun agents on this node, .*: give srun --ntasks-per-node=1"),
        (SRUN | {"SLURM_NODEID": "9"}, "variables of SLURM's srun do not fit together .*: start with it again"),
        ({name: value for name, value in SRUN.items() if name != "SLURM_STEP_NODELIST"}, "do not fit together .*NODELIST"),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused_by_name(environment: dict[str, str], line: str) -> None:
    """Variables of two launchers that contradict each other are refused by name.

    Claim (ddp/README.md): launch: a rank's number from srun, mpirun, mpiexec and Azure ML; contradictions are
    refused by name.
    """
    with pytest.raises(UsageError, match=line):
        adopted(environment)


def test_the_hosts_and_tasks_of_slurm() -> None:
    """SLURM's short forms of hosts and of tasks per node are expanded in order."""
    assert expand_hosts("n[1-3,07],gpu5") == ["n1", "n2", "n3", "n07", "gpu5"]
    assert expand_hosts("r[1-2]n[008-010],head") == [f"r{r}n{n}" for r in (1, 2) for n in ("008", "009", "010")] + [
        "head"
    ]
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


VIRTUAL = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", **MEETING}


@pytest.mark.parametrize(
    ("environment", "local_rank"),
    [
        # RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE
        (("0", "4", "2", "0", "2"), "0"),
        (("2", "4", "2", "1", "2"), "0"),
        (("3", "4", "2", "1", "2"), "1"),
        (("3", "5", "2", "1", "2"), "0"),  # nodes with three ranks and two: torchrun's own number
    ],
)
def test_ranks_with_a_virtual_local_rank_keep_their_numbers(environment: tuple[str, ...], local_rank: str) -> None:
    """All are LOCAL_RANK 0 then, but one of a node downloads and prints for it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    given = VIRTUAL | dict(zip(names, environment, strict=True))
    assert adopted(given) == given | {"LOCAL_RANK": local_rank}


@pytest.mark.parametrize(
    ("environment", "gpus", "devices"),
    [
        (TORCHRUN, 8, [0, 1]),  # all see all
        (
            TORCHRUN | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "1"},
            1,
            [0, 0],
        ),  # by a wrapper
        (
            FOURTH_OF_FOUR | {"SLURM_GPUS_ON_NODE": "4"},
            2,
            [0, 1],
        ),  # srun --gpus-per-task=2: two others than its neighbor's
    ],
)
def test_a_rank_takes_a_gpu_of_those_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], gpus: int, devices: list[int]
) -> None:
    """A rank takes a GPU of those that it sees.

    Claim (ddp/README.md, 1): a rank takes a GPU of those that it sees; two ranks of NCCL on one are refused, gloo's
    share it.
    """
    pretend_gpus(monkeypatch, gpus)
    for number, device in enumerate(devices):
        env = find_dist_env(environment=adopted(environment | {"RANK": str(2 + number), "LOCAL_RANK": str(number)}))
        assert (env.device, env.local_rank, env.local_world_size) == (torch.device("cuda", device), number, 2)
