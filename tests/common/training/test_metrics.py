"""``common.training.metrics``: what a run's records hold after crashes, restarts and divergence, and what TensorBoard gets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UsageError
from common.training.metrics import MetricsWriter, check_tensorboard, read_metrics

FILE = "metrics.jsonl"


def record(step: int) -> dict[str, Any]:
    return {"kind": "step", "step": step, "loss": step / 3}


def write_steps(folder: Path, *steps: int, after_step: int | None = None, tensorboard: bool = False) -> None:
    with MetricsWriter(
        folder, after=None if after_step is None else (after_step, 0), tensorboard=tensorboard
    ) as writer:
        for step in steps:
            writer.write("step", step, loss=step / 3)


def steps_of(folder: Path) -> list[int]:
    return [r["step"] for r in read_metrics(folder)]


def test_records_come_back_in_order_as_they_were_written(tmp_path: Path) -> None:
    """A record is readable before the file is closed."""
    with MetricsWriter(tmp_path) as writer:
        writer.write("step", 20, epoch=0, loss=0.1 + 0.2, note="a\nb €")
        assert steps_of(tmp_path) == [20]
        writer.write("epoch", 20, epoch=0, accuracy=np.float64(0.5))
    assert read_metrics(tmp_path) == [
        {"kind": "step", "step": 20, "epoch": 0, "loss": 0.1 + 0.2, "note": "a\nb €"},
        {"kind": "epoch", "step": 20, "epoch": 0, "accuracy": 0.5},
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float64("nan")])
def test_numbers_that_json_lacks_are_strings_also_after_a_resume(value: float, tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write("step", 1, loss=value)
    write_steps(tmp_path, 2, after_step=1)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    first = (tmp_path / FILE).read_text().splitlines()[0]
    assert json.loads(first, parse_constant=refuse)["loss"] == str(float(value))


def test_a_new_run_starts_a_new_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2)
    write_steps(tmp_path, 7)
    assert steps_of(tmp_path) == [7]
    write_steps(tmp_path, 8, after_step=7)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@given(st.lists(st.integers(0, 20), max_size=8).map(sorted), st.integers(0, 20))
def test_resuming_keeps_the_records_up_to_its_step_and_appends(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], after_step: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write_steps(folder, *steps)
    write_steps(folder, after_step + 1, after_step=after_step)
    assert read_metrics(folder) == [record(step) for step in [*filter(after_step.__ge__, steps), after_step + 1]]


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_last_line_that_was_cut_short_is_left_out_and_gone_after_a_resume(cut: int, tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-cut])
    assert steps_of(tmp_path) == [1, 2]
    write_steps(tmp_path, 3, after_step=9)
    assert read_metrics(tmp_path) == [record(1), record(2), record(3)]


@pytest.mark.parametrize(
    "damaged",
    [
        "", "3", "{}", "[]", "null", "{", "\0" * 40, '{"kind": "step"}', '{"kind": "step", "step": "2"}', "[" * 10**5,
        '{"kind": 1, "step": 2}', '{"kind": "epoch", "step": 2}', '{"kind": "epoch", "step": 2, "epoch": true}',
        '{"kind": "epoch", "step": 2, "epoch": 0, "seconds": "many"}', "\ud800",
    ],
)  # fmt: skip
def test_a_damaged_line_is_passed_over(damaged: str, tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    path = tmp_path / FILE
    lines = path.read_bytes().split(b"\n")
    lines[1] = damaged.encode("utf-8", "surrogatepass")
    path.write_bytes(b"\n".join(lines))
    assert steps_of(tmp_path) == [1, 3]
    write_steps(tmp_path, 4, after_step=3)
    assert steps_of(tmp_path) == [1, 3, 4]


def test_epochs_without_a_record_are_named_on_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write("epoch", 20, epoch=1)
    with MetricsWriter(tmp_path, after=(30, 3)):
        pass
    assert "it lacks the records of epochs 1, 3;" in caplog.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's own
def test_tensorboard_gets_every_number_and_a_resumed_run_replaces_what_it_repeats(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_steps(tmp_path, 1, 2, 3, 4, tensorboard=True)
    with MetricsWriter(tmp_path, after=(2, 0), tensorboard=True) as writer:
        writer.write("step", 3, loss=30.0, note="not a number")
        writer.write("epoch", 3, accuracy=0.5, epoch=1)

    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    scalars = {tag: [(e.step, round(e.value, 5)) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    assert scalars == {
        "step/loss": [(1, 0.33333), (2, 0.66667), (3, 30.0)],
        "epoch/accuracy": [(3, 0.5)],
        "epoch/epoch": [(3, 1.0)],
    }


def test_without_tensorboard_installed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"^--tensorboard needs the extra: pip install 'raw-ddp\[tensorboard\]'$"):
        check_tensorboard()


def test_the_record_of_an_epoch_that_is_evaluated_again_is_dropped(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for epoch in range(2):
            writer.write("step", 4 * epoch + 4, epoch=epoch)
            writer.write("epoch", 4 * epoch + 4, epoch=epoch)
    with MetricsWriter(tmp_path, after=(8, 1)) as writer:
        writer.write("epoch", 8, epoch=1)
    assert [(r["kind"], r["step"]) for r in read_metrics(tmp_path)] == [
        ("step", 4),
        ("epoch", 4),
        ("step", 8),
        ("epoch", 8),
    ]
