"""The summary: what passed, the numbers, what is slow and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp.gpu_check import results
from ddp.gpu_check.runner import FAILED, LEFT_OUT, PASSED, Outcome
from ddp.gpu_check.summary import Entry, explain, write_summary


def passed(name: str, found: dict[str, Any]) -> Entry:
    return Entry(name, "something", f"run {name}", Outcome(PASSED, 12.4), found)


def test_the_text_has_each_check_its_numbers_and_how_to_repeat_what_failed(tmp_path: Path) -> None:
    entries = [
        passed("precision-fp32", {"images_per_s": 800.0, "peak GB": 20.0}),
        passed("precision-bf16", {"images_per_s": 2_000.0, "peak GB": 11.0, "mfu": 0.35}),
        Entry("safety", "guards", "run safety", Outcome(FAILED, 3.0, "exit status 1: Error: no")),
        Entry("pinned", "copies", "run pinned", Outcome(LEFT_OUT, 0.0, "it needs a GPU")),
    ]
    text = write_summary(tmp_path, {"torch": "2.15"}, entries, ["lfw"])
    assert text.splitlines() == [
        "2 passed, 1 FAILED, 1 left out",
        "  passed   12 s  precision-fp32      something",
        "  passed   12 s  precision-bf16      something",
        "  FAILED    3 s  safety              guards: exit status 1: Error: no",
        "          again:  run safety",
        "left out         pinned              copies: it needs a GPU",
        "",
        "found:",
        "  precision-fp32: images_per_s 800, peak GB 20",
        "  precision-bf16: images_per_s 2,000, peak GB 11, mfu 0.35",
    ]
    assert (tmp_path / "summary.txt").read_text() == text + "\n"
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["machine"], written["remaining"], written["slow"]) == ({"torch": "2.15"}, ["lfw"], [])
    assert written["checks"][1]["found"] == {"images_per_s": 2_000.0, "peak GB": 11.0, "mfu": 0.35}


@pytest.mark.parametrize(
    ("name", "fast", "slow"),
    [
        ("data_wait", 0.05, 0.2),
        ("gpu_busy", 0.95, 0.5),
        ("idle behind a synchronization", 0.01, 0.3),
        ("trainer / bare", [1.2, 1.04, 1.3], [1.2, 1.1, 1.3]),  # slow only if both quartiles are
        ("guarded / plain", [1.05, 1.0, 1.1], [1.05, 1.04, 1.1]),
        ("by hand / torch, mlp", [1.1, 0.9, 1.3], [1.1, 1.05, 1.3]),
        ("DDP, 2 processes, efficiency", [0.7, 0.6, 0.85], [0.7, 0.6, 0.75]),
        ("page-locked / ordinary", 2.0, 1.0),
    ],
)
def test_what_is_slow_is_named_with_its_cause(name: str, fast: Any, slow: Any) -> None:
    assert explain([Entry("a", "b", "c", Outcome(PASSED), {name: fast})]) == []
    (line,) = explain([Entry("a", "b", "c", Outcome(PASSED), {name: slow})])
    assert line.startswith(f"a: {name} is ")


def test_numbers_of_a_training_are_medians_without_its_first_window(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    of_all: dict[str, Any] = {"kind": "step", "data_wait": 0.1}
    windows = [
        of_all | {"step": 1, "loss": 2.0, "images_per_s": 10.0, "gpu_memory": 9e9},
        of_all | {"step": 2, "loss": 1.0, "images_per_s": 100.0, "gpu_memory": 5e9, "mfu": 0.3},
        of_all | {"step": 3, "loss": 0.5, "images_per_s": 300.0, "gpu_memory": 4e9, "mfu": 0.5},
    ]
    lines = [json.dumps(record) for record in [*windows, {"kind": "epoch", "step": 3, "images_per_s": 1.0}]]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert results.of_training(tmp_path) == pytest.approx(
        {"loss": 0.5, "images_per_s": 200.0, "data_wait": 0.1, "peak GB": 9.0, "mfu": 0.4}
    )


def test_numbers_of_pinned_memory(tmp_path: Path) -> None:
    """The rates of pinned and ordinary memory, and their ratio, follow from the times."""
    content = {
        "bytes": 2e9,
        "device_seconds": {"ordinary": [0.4, 0.4], "page-locked": [0.1, 0.1]},
        "host_seconds": {"ordinary": [0.3, 0.3], "page-locked": [1e-5, 1e-5]},
    }
    (tmp_path / "pinned.json").write_text(json.dumps(content))
    found = results.of_pinned(tmp_path)
    assert found["page-locked / ordinary"] == 4
    assert (found["ordinary, GB/s"], found["page-locked, GB/s"]) == pytest.approx((5, 20))
    assert found["page-locked, ms of the host"] == pytest.approx(0.01)
