"""The frame of a measurement: check the launch, prepare the output folder, write the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from common.distributed.process_group import DistEnv, require_alone
from common.distributed.rank_logging import rank_logging
from common.files.atomic_files import write_json
from common.files.run_directory import prepare_output, results_in
from common.machine import describe_machine

Measurement = TypeVar("Measurement")
CPU = torch.device("cpu")


def run_alone(
    command: str,
    output: Path,
    measure: Callable[[], Measurement],
    report: Callable[[Measurement], str],
) -> None:
    """Measure and report, for a command that starts its own processes.

    :param command: its name, for the error under torchrun
    :param output: folder of the results; it is tried before the measurement begins
    :param report: writes the results and returns the text to print
    :raises UsageError: under torchrun, and for a folder that cannot be written
    """
    require_alone(command)
    with rank_logging(DistEnv.alone(CPU)):
        prepare_output(output)
        measurement = measure()
        with results_in(output):
            print(report(measurement))


def write_results(path: Path, content: Mapping[str, object]) -> None:
    """Write a benchmark's JSON: the machine, the versions and the command, then ``content``.

    :raises OSError: when it cannot be written
    """
    write_json(path, {"machine": describe_machine(), **content})
