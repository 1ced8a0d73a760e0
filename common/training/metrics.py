"""A run's numbers over time: one JSON object per line, and TensorBoard beside it when asked.

``{"kind": "step", "step": 20, "epoch": 0, "loss": 1.93, ...}``; ``kind`` is ``step`` (a window of steps), ``epoch``, or
``skipped`` (a skipped step, with its samples).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import UsageError
from common.files.atomic_files import write_bytes
from common.files.run_directory import CONTINUE, METRICS_FILE, writing

Record = dict[str, Any]
logger = logging.getLogger(__name__)

TIMES = ("seconds", "images_per_s", "data_wait")  # of a window or an epoch: always finite numbers


class MetricsWriter:
    """Appends records to ``metrics.jsonl``; each is passed to the operating system before the next step begins.

    :param after: when a run is resumed, the steps and epochs that are done: the records of others are dropped, since they
        will be written again; None starts a new file
    :param silent: write nothing: for all ranks but the one that speaks for them
    :param tensorboard: also write every number as a TensorBoard scalar, below ``tensorboard/``; see :func:`check_tensorboard`
    :param remedy: what a user does after a full disk has room again
    :raises UsageError: when the file cannot be written
    """

    def __init__(
        self,
        folder: Path,
        *,
        after: tuple[int, int] | None = None,
        tensorboard: bool = False,
        silent: bool = False,
        remedy: str = CONTINUE,
    ) -> None:
        self._file = self._board = None
        self._remedy = remedy
        if silent:
            return
        path = self._path = folder / METRICS_FILE
        with writing(path, remedy):
            kept = [] if after is None else [record for record in read_metrics(folder) if _is_done(record, *after)]
            if after is not None:
                _report_lacking(path, kept, epochs=after[1])
            write_bytes(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed by __exit__)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(folder / "tensorboard", purge_step=after[0] + 1 if after else None)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one record; floats that are not finite become the strings JSON lacks (``"nan"``, ``"inf"``).

        :raises UsageError: when it cannot be written
        """
        if self._file is not None:
            record = {"kind": kind, "step": step, **{name: _plain(value) for name, value in values.items()}}
            with writing(self._path, self._remedy):
                self._file.write(json.dumps(record) + "\n")
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> None:
        """Return when all that was written is on the disk.

        :raises UsageError: when it cannot be written
        """
        if self._file is not None:
            with writing(self._path, self._remedy):
                self._file.flush()
                os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk, which an earlier write has reported
                self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(folder: Path) -> list[Record]:
    """All complete records of a run, in order, without lines that a crash cut short or filled with something else.

    :raises OSError: when the file cannot be read
    """
    try:
        lines = (folder / METRICS_FILE).read_bytes().decode("utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    return [record for record in map(_record_in, lines[:-1]) if record is not None]


def _record_in(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    whole_numbers = [record.get("step"), record.get("epoch", None if record["kind"] == "epoch" else 0)]
    times = [record.get(name, 0.0) for name in TIMES]
    return record if {*map(type, whole_numbers)} == {int} and {*map(type, times)} <= {int, float} else None


def _report_lacking(path: Path, records: Sequence[Record], epochs: int) -> None:
    """Log which of the epochs that are done have no record: the figures and the times of the summary lack them too."""
    recorded = {record["epoch"] for record in records if record["kind"] == "epoch"}
    if lacking := sorted(set(range(epochs)) - recorded):
        logger.warning(
            f"{path} is damaged: it lacks the records of epochs {', '.join(str(epoch + 1) for epoch in lacking)}; training "
            "goes on from the checkpoint, and the figures show the others"
        )


def _is_done(record: Record, steps: int, epochs: int) -> bool:
    """A run may be resumed between the last step of an epoch and its record, which has that step's number."""
    return bool(record["step"] <= steps and (record["kind"] != "epoch" or record["epoch"] < epochs))


def check_tensorboard() -> None:
    """:raises UsageError: when the extra is not installed"""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise UsageError("--tensorboard needs the extra: pip install 'raw-ddp[tensorboard]'") from error


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:  # nan and the infinities, which are not JSON
        return str(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
