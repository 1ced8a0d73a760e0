"""A run's numbers over time: one JSON object per line, and TensorBoard beside it when asked.

``{"kind": "step", "step": 20, "epoch": 0, "loss": 1.93, ...}``; ``kind`` is ``step`` (a window of steps) or ``epoch``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.cli import UsageError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Record = dict[str, Any]


class MetricsWriter:
    """Appends records to ``metrics.jsonl``; each is on its way to the disk before the next step begins.

    :param after_step: when a run is resumed from this step, the records beyond it are dropped, since they will be
        written again; None starts a new file
    :param silent: write nothing: for all ranks but the one that speaks for them
    :param tensorboard: also write every number as a TensorBoard scalar, below ``tensorboard/``
    :raises UsageError: when TensorBoard is asked for and not installed
    """

    def __init__(
        self, folder: Path, *, after_step: int | None = None, tensorboard: bool = False, silent: bool = False
    ) -> None:
        self._file = self._board = None
        if silent:
            return
        if tensorboard:
            check_tensorboard()
        path = folder / "metrics.jsonl"
        kept = [] if after_step is None else [r for r in read_metrics(folder) if r["step"] <= after_step]
        scratch = path.with_suffix(".scratch")
        scratch.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(scratch, path)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed by close)
        self._board = _summary_writer(folder / "tensorboard", after_step) if tensorboard else None

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one record; floats that are not finite become the strings JSON lacks (``"nan"``, ``"inf"``)."""
        if self._file is not None:
            self._file.write(
                json.dumps({"kind": kind, "step": step, **{k: _plain(v) for k, v in values.items()}}) + "\n"
            )
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(folder: Path) -> list[Record]:
    """All complete records of a run, in order; a last line that a crash cut short is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else [""]
    return [json.loads(line) for line in lines[:-1]]


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
    return value
