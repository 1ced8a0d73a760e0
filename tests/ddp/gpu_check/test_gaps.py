"""``python -m ddp.gpu_check.gaps``: the GPU's idle time in a trace, behind synchronizations and elsewhere."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ddp.gpu_check import gaps
from ddp.gpu_check.gaps import Gaps
from tests.support.user_errors import UserError


def event(name: str, category: str, start: float, end: float) -> dict[str, Any]:
    """One of Chrome's trace event format; ``start`` and ``end`` in ms."""
    return {"ph": "X", "name": name, "cat": category, "ts": 1e3 * start, "dur": 1e3 * (end - start)}


# Two steps of 10 ms. In the first the host waits for the kernels, and the GPU idles for 3 ms behind that. In the second, kernels
# on two streams overlap, and 1 ms is idle although the host has not waited. Outside of the steps nothing counts.
TRACE = [
    event("before", "kernel", -5, -1),
    event("cudaDeviceSynchronize", "cuda_runtime", -2, -1),
    event("ProfilerStep#5", "user_annotation", 0, 10),
    event("ProfilerStep#5", "gpu_user_annotation", 1, 9),
    event("gemm", "kernel", 0, 4),
    event("cudaStreamSynchronize", "cuda_runtime", 2, 4.01),
    event("Memcpy HtoD", "gpu_memcpy", 7, 10),
    event("ProfilerStep#6", "user_annotation", 10, 20),
    event("conv", "kernel", 10, 15),
    event("ncclDevKernel_AllReduce", "kernel", 14, 16),
    event("cudaEventSynchronize", "cuda_runtime", 12, 13),  # over while the GPU still works
    event("sgd", "kernel", 17, 20),
    {"ph": "i", "name": "a mark", "ts": 1.0},
]


def test_what_the_gpu_idles_behind_a_synchronization() -> None:
    """The idle time behind each synchronization is summed per step."""
    found = Gaps.of(TRACE)
    assert found.steps == 2
    assert (found.seconds, found.busy, found.behind) == pytest.approx((0.020, 0.016, 0.003))
    assert found.per_step() == pytest.approx(
        {
            "ms": 10.0,
            "busy": 0.8,
            "idle behind a synchronization": 0.15,
            "cudaEventSynchronize": 0.5,
            "cudaStreamSynchronize": 0.5,
        }
    )


@pytest.mark.parametrize("packed", [True, False])
def test_the_command_reads_a_trace(
    packed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"traceEvents": TRACE}).encode()
    path = tmp_path / ("rank0.json.gz" if packed else "rank0.json")
    path.write_bytes(gzip.compress(text) if packed else text)
    monkeypatch.setattr("sys.argv", ["gaps", "--trace", str(path), "--output", str(tmp_path / "out")])
    gaps.main()
    assert "2 steps of 10.00 ms" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "gaps.json").read_text())["per_step"]["busy"] == pytest.approx(0.8)


def test_a_trace_of_the_cpu_alone() -> None:
    """A trace without a GPU has no busy and no idle time."""
    found = Gaps.of([event("ProfilerStep#5", "user_annotation", 0, 10), event("aten::mm", "cpu_op", 1, 2)])
    assert (found.busy, found.behind, found.per_step()["idle behind a synchronization"]) == (0, 0, 0)


def test_a_mistake_is_one_line(user_error: UserError, tmp_path: Path) -> None:
    damaged, empty = tmp_path / "damaged.json.gz", tmp_path / "empty.json"
    damaged.write_bytes(b"\x1f\x8b nothing")
    empty.write_text('{"traceEvents": []}')
    output = ("--output", tmp_path / "out")
    assert "which trace? give --trace RUN/profile/rank0.json.gz" in user_error(gaps.main)
    assert "No such file" in user_error(gaps.main, "--trace", tmp_path / "none.json", *output)
    assert "is not a trace of torch.profiler" in user_error(gaps.main, "--trace", damaged, *output)
    assert "the trace has no ProfilerStep" in user_error(gaps.main, "--trace", empty, *output)
