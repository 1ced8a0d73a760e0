"""A run's numbers over time: one JSON object per line, and TensorBoard beside it when asked.

``{"kind": "step", "step": 20, "epoch": 0, "loss": 1.93, ...}``; ``kind`` is ``step`` (a window of steps), ``epoch``, or
``skipped`` (a skipped step, with its samples).
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UsageError
from common.files.atomic_files import write_bytes
from common.files.run_directory import CONTINUE, METRICS_FILE, read_regular, writing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Record = dict[str, Any]


class MetricsWriter:
    """Appends records to ``metrics.jsonl``; each is passed to the operating system before the next step begins.

    :param after: when a run is resumed, the steps and epochs that are done: the records of others are dropped, since they
        will be written again; None starts a new file
    :param silent: write nothing: for all ranks but the one that speaks for them
    :param tensorboard: also write every number as a TensorBoard scalar, below ``tensorboard/``
    :param remedy: what a user does after a full disk has room again
    :raises UsageError: when TensorBoard is asked for and not installed
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
        if tensorboard:
            check_tensorboard()
        path = self._path = folder / METRICS_FILE
        with writing(path, remedy):
            kept = [] if after is None else [record for record in read_metrics(folder) if _is_done(record, *after)]
            write_bytes(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed by close)
        self._board = _summary_writer(folder / "tensorboard", after[0] if after else None) if tensorboard else None

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

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk, which an earlier write has reported
                self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(folder: Path) -> list[Record]:
    """All complete records of a run, in order, without lines that a crash cut short or that are no record.

    :raises OSError: when the file cannot be read
    """
    try:
        lines = read_regular(folder / METRICS_FILE).decode("utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    return [record for record in map(_record_in, lines[:-1]) if record is not None]


def _record_in(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _is_done(record: Record, steps: int, epochs: int) -> bool:
    """A run may be resumed between the last step of an epoch and its record, which has that step's number."""
    return bool(record["step"] <= steps and (record["kind"] != "epoch" or record["epoch"] < epochs))


def check_tensorboard() -> None:
    """:raises UsageError: when the extra is not installed"""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise UsageError("--tensorboard needs the extra: pip install 'raw-ddp[tensorboard]'") from error


def _summary_writer(folder: Path, after_step: int | None) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder, purge_step=None if after_step is None else after_step + 1)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:  # nan and the infinities, which are not JSON
        return str(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
