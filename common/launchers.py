"""Which rank this process is, by what started it: torchrun, srun, mpirun, mpiexec, Azure ML, or variables set by hand.

torch and this project read six variables, those that torchrun sets. Another launcher tells each process the same in variables
of its own. :func:`adopt_launcher` reads these and sets torchrun's, so that everything after it sees those alone.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from common.errors import UsageError

logger = logging.getLogger(__name__)

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PORTS = range(20_000, 30_000)  # below those that Linux gives to outgoing connections

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Launcher:
    """Where a launcher tells a process its rank.

    :ivar name: for messages
    :ivar variables: its own variables for torchrun's, in the order of :data:`TORCHRUN_VARIABLES`
    :ivar derive: finds more of torchrun's variables, which the launcher tells in another form
    """

    name: str
    variables: tuple[str, ...]
    derive: Callable[[Environment], Environment] = lambda environment: {}

    def started(self, environment: Environment) -> bool:
        """Whether it started this process as one of several."""
        _, world_size, *_ = self.variables
        return all(name in environment for name in self.variables) and environment[world_size] != "1"

    def read(self, environment: Environment) -> dict[str, str]:
        """The variables that torchrun would have set.

        :raises UsageError: when the variables do not fit together
        """
        own = {ours: environment[theirs] for ours, theirs in zip(TORCHRUN_VARIABLES, self.variables, strict=False)}
        try:
            return {**own, **self.derive(environment)}
        except (KeyError, ValueError, IndexError) as error:
            raise UsageError(
                f"the variables of {self.name} do not fit together ({error!r}): start with it again"
            ) from error


def slurm_rendezvous(environment: Environment) -> Environment:
    """The ranks of a step meet on the host of its first task. (The host of ``srun`` or ``sbatch`` may be another.)"""
    hosts = expand_hosts(environment["SLURM_STEP_NODELIST"])
    job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    return {
        "LOCAL_WORLD_SIZE": str(_slurm_tasks_here(environment)),
        "MASTER_ADDR": hosts[0] if len(hosts) > 1 else "localhost",
        "MASTER_PORT": str(PORTS[(31 * job + step) % len(PORTS)]),  # another one for each step
    }


# The innermost first: within a job of SLURM, mpirun starts its processes through srun.
LAUNCHERS = (
    Launcher(
        "Open MPI's mpirun",
        tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ),
    Launcher("MPICH's or Intel's mpiexec", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    Launcher("SLURM's srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"), slurm_rendezvous),
)


def launcher_name() -> str:
    """The name of the program that started this process, for a person to read."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    if "RANK" in os.environ and "AZUREML_NODE_COUNT" in os.environ:
        return "Azure ML"
    alone = "variables set by hand" if "RANK" in os.environ else "no launcher: one process by itself"
    return next((launcher.name for launcher in LAUNCHERS if launcher.started(os.environ)), alone)


def adopt_launcher(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what torchrun would have set, if another launcher started this process. Variables that are set already come first.

    :raises UsageError: when some of torchrun's variables are set and contradict the launcher
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        _require_one_agent_per_node(environment)
        _number_virtual_local_ranks(environment)
        return
    _complete_azure(environment)
    launcher = next((launcher for launcher in LAUNCHERS if launcher.started(environment)), None)
    if launcher is None or all(name in environment for name in TORCHRUN_VARIABLES):
        return
    if "SLURM_PTY_PORT" in environment and os.isatty(0):
        logger.warning(
            f"this shell is one of {environment['SLURM_STEP_NUM_TASKS']} tasks of srun --pty, and the others run no command: this is "
            "one process by itself; for a rank per task, start it with srun here too"
        )
        return
    own = launcher.read(environment)
    for name, value in own.items():
        environment.setdefault(name, value)
    for name in TORCHRUN_VARIABLES[:4]:
        if environment[name] != own[name]:
            raise UsageError(
                f"{name} is {environment[name]}, but {launcher.name} has started this process as {name} {own[name]}: "
                f"unset {name}, which was set before"
            )
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]:
        raise UsageError(
            f"{launcher.name} does not say where the ranks meet, and {' and '.join(missing)} is not set: pass MASTER_ADDR, "
            "the host of rank 0, and MASTER_PORT, a free port there"
        )


def _complete_azure(environment: MutableMapping[str, str]) -> None:
    """Azure ML sets all but the number of ranks on this node."""
    nodes, ranks = environment.get("AZUREML_NODE_COUNT", ""), environment.get("WORLD_SIZE", "")
    if (
        "RANK" in environment
        and nodes.isdecimal()
        and ranks.isdecimal()
        and int(nodes)
        and int(ranks) % int(nodes) == 0
    ):
        environment.setdefault("LOCAL_WORLD_SIZE", str(int(ranks) // int(nodes)))


def _require_one_agent_per_node(environment: Environment) -> None:
    """:raises UsageError: when srun has started several agents of torchrun here: each starts all ranks of the node"""
    if "SLURM_PTY_PORT" in environment:  # a shell, whatever its number of tasks
        return
    try:
        agents = _slurm_tasks_here(environment)
    except (KeyError, ValueError, IndexError):  # not within a step of SLURM
        return
    if agents > 1:
        raise UsageError(
            f"srun started {agents} torchrun agents on this node, and each starts all its ranks: give srun "
            "--ntasks-per-node=1, or leave torchrun out"
        )


def _number_virtual_local_ranks(environment: MutableMapping[str, str]) -> None:
    """``torchrun --virtual-local-rank`` calls every rank of a node LOCAL_RANK 0. Here the ranks of a node keep their numbers,
    by which one of them downloads or prints for all. (Where nodes have different numbers of ranks, torchrun's stays.)"""
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    numbers = [environment.get(name, "") for name in names]
    if environment.get("LOCAL_RANK") != "0" or not all(number.isdecimal() for number in numbers):
        return
    rank, world_size, ranks_here, node, nodes = map(int, numbers)
    if world_size == nodes * ranks_here and rank // ranks_here == node:
        environment["LOCAL_RANK"] = str(rank % ranks_here)


def _slurm_tasks_here(environment: Environment) -> int:
    return tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[int(environment["SLURM_NODEID"])]


def expand_hosts(hosts: str) -> list[str]:
    """The hosts of SLURM's short form: ``n[1-3,07],gpu5`` is n1, n2, n3, n07 and gpu5. (``scontrol show hostnames`` does the same,
    but may be missing in a container.)"""
    return [host for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", hosts) for host in _expand(part)]


def _expand(pattern: str) -> Iterator[str]:
    brackets = re.search(r"\[([^\]]*)\]", pattern)
    if brackets is None:
        yield pattern
        return
    for numbers in brackets[1].split(","):
        first, _, last = numbers.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from _expand(f"{pattern[: brackets.start()]}{number:0{len(first)}d}{pattern[brackets.end() :]}")


def tasks_per_node(counts: str) -> list[int]:
    """SLURM's short form of the tasks on each node: ``2(x3),1`` is 2, 2, 2 and 1."""
    tasks = []
    for part in counts.split(","):
        count, _, times = part.partition("(x")
        tasks += [int(count)] * int(times.rstrip(")") or 1)
    return tasks
