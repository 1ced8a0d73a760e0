"""The list of checks: which there are on which machine, and that each command is one that its program takes."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Any

import pytest

from common.cli import parse
from dataparallel.train import DataParallelConfig
from ddp.bench import allreduce, engines, strategies
from ddp.bench.overhead import OverheadConfig
from ddp.bench.safety import SafetyConfig
from ddp.config import TrainConfig, require_samples
from ddp.gpu_check.checks import Machine, checks, sizes_of
from ddp.gpu_check.equivalence import EquivalenceConfig
from ddp.gpu_check.gaps import GapsConfig
from ddp.gpu_check.pinned import PinnedConfig
from ddp.launch.doctor import DoctorConfig
from ddp.timeline.config import StepTimelineConfig
from tests.support.fake_gpu import pretend_gpus

CONFIGS: dict[str, type[Any]] = {
    "ddp.train": TrainConfig,
    "ddp.launch.doctor": DoctorConfig,
    "ddp.timeline": StepTimelineConfig,
    "ddp.gpu_check.equivalence": EquivalenceConfig,
    "ddp.gpu_check.gaps": GapsConfig,
    "ddp.gpu_check.pinned": PinnedConfig,
    "dataparallel.train": DataParallelConfig,
    "ddp.bench overhead": OverheadConfig,
    "ddp.bench safety": SafetyConfig,
    "ddp.bench engines": engines.Config,
    "ddp.bench strategies": strategies.Config,
    "ddp.bench allreduce": allreduce.Config,
}
MACHINES = [
    Machine(0),
    Machine(1),
    Machine(1, memory_gb=12),
    Machine(2),
    Machine(5, memory_gb=24),
    Machine(7),
    Machine(8),
]


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_each_command_is_one_that_its_program_takes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command is one that its program takes.

    Claim (ddp/README.md): on a GPU: gpu-check names what fails, hangs or does not apply, and nothing outlives it;
    each of its commands is one that its program takes, for any number of GPUs.
    """
    pretend_gpus(monkeypatch, machine.gpus)
    seen = set()
    for check in checks(machine):
        line = check.command.format(out="'a folder'", **sizes_of(machine))
        assert subprocess.run(["sh", "-n", "-c", line]).returncode == 0
        if check.obstacle or check.name == "gpu-tests":
            continue
        for ranks, module, arguments in programs(line):
            config = parse(CONFIGS[module], module, None, arguments)
            seen.add(module)
            for name in ("run_dir", "output"):
                assert getattr(config, name, None) is None or str(getattr(config, name)).startswith("a folder")
            if "torchrun" in line and hasattr(config, "batch_size"):
                require_samples(config.model, config.batch_size, ranks)
            if module == "ddp.train":
                assert (config.train_samples or 1648) >= config.batch_size  # of the drawn faces
            if ranks > 1 and machine.gpus > 1:
                assert ranks == machine.gpus
    assert seen == CONFIGS.keys() - ({"ddp.bench allreduce"} if machine.gpus == 1 else set()) - (
        set() if machine.gpus else {"ddp.gpu_check.pinned"}
    )


def programs(line: str) -> list[tuple[int, str, list[str]]]:
    """Of each program in a shell command: its ranks, its module with the name of the benchmark, its arguments."""
    found = []
    for part in re.split(r"&&|;|&(?!\d)", line):
        words = shlex.split(part)
        if words and words[0] in ("python", "torchrun"):
            at = words.index("-m")
            ranks = int(words[1].partition("=")[2]) if words[0] == "torchrun" else 1
            module, arguments = words[at + 1], words[at + 2 :]
            if module == "ddp.bench":
                module = f"{module} {arguments.pop(0)}"
            found.append((ranks, module, arguments))
    return found


@pytest.mark.parametrize(
    ("machine", "left_out"),
    [
        (Machine(0), {"gpu-tests", "equivalence-shared", "pinned", "compile"}),
        (Machine(1), {"engines-alone", "allreduce"}),
        (Machine(2), {"equivalence-shared"}),
    ],
)
def test_what_does_not_apply_says_why(machine: Machine, left_out: set[str]) -> None:
    found = checks(machine)
    assert len({check.name for check in found}) == len(found)
    assert {check.name for check in found if check.obstacle} == left_out


def test_the_longest_check_leaves_time_for_others() -> None:
    assert max(check.limit_s for check in checks(Machine(1))) <= 200
