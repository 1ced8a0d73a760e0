"""Where a GPU idles in a trace of ``ddp.train --profile``: behind the host's synchronizations, and elsewhere.

    python -m ddp.gpu_check.gaps --trace runs/glyphs-fashion-cnn/profile/rank0.json.gz

While the host waits for the GPU, it queues nothing. So when the wait ends, the GPU is idle until the host's next kernel
arrives. A step that does not wait lets the host run ahead, and the GPU idles only where kernels are so short that the
host cannot queue them fast enough.
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.cli import command, option
from common.errors import UsageError
from common.files.run_directory import files_line
from common.reporting.spans import Interval, length, union
from common.reporting.turns import run_benchmark, write_results

ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of torch.profiler's events
SYNCHRONIZATIONS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
STEP = "ProfilerStep"
CLOCKS_S = 2e-5  # by which the profiler's clocks of the host and of the GPU may differ


@dataclass(frozen=True)
class GapsConfig:
    """Settings of ``ddp.gpu_check.gaps``.

    :raises UsageError: without a trace
    """

    trace: Path = option(None, "a trace of torch.profiler, as RUN/profile/rank0.json.gz")
    output: Path = option(Path("runs/gpu-check-gaps"), "folder of the JSON")

    def __post_init__(self) -> None:
        if self.trace is None:
            raise UsageError("which trace? give --trace RUN/profile/rank0.json.gz, which ddp.train --profile writes")


@dataclass(frozen=True)
class Gaps:
    """A trace's recorded steps.

    :param steps: their number
    :param seconds: from the beginning of the first to the end of the last
    :param busy: seconds in which the GPU had work
    :param behind: seconds in which it idled when the host had just waited for it
    :param synchronizations: how often the host waited, by the function of CUDA
    """

    steps: int
    seconds: float
    busy: float
    behind: float
    synchronizations: dict[str, int]

    @classmethod
    def of(cls, events: Sequence[dict[str, Any]]) -> Gaps:
        """:param events: of Chrome's trace event format, in microseconds

        :raises UsageError: for a trace without steps
        """
        spans = [event for event in events if event.get("ph") == "X"]
        # The profiler names the steps on the GPU too, where they begin with their first kernel.
        of_host = [event for event in spans if event.get("cat") != "gpu_user_annotation"]
        steps = {event["name"]: _interval(event) for event in of_host if str(event.get("name")).startswith(f"{STEP}#")}
        if not steps:
            raise UsageError(f"the trace has no {STEP}: record it with ddp.train --profile")
        began, ended = min(start for start, _ in steps.values()), max(end for _, end in steps.values())
        within = [event for event in spans if began <= 1e-6 * event["ts"] <= ended]
        working = union(_interval(event) for event in within if event.get("cat") in ON_THE_GPU)
        waits = [event for event in within if event.get("name") in SYNCHRONIZATIONS]
        idle = [(end, start) for (_, end), (start, _) in itertools.pairwise(working)]
        moments = [_interval(event)[1] for event in waits]
        behind = [gap for gap in idle if any(gap[0] - CLOCKS_S <= moment <= gap[1] for moment in moments)]
        counts = Counter(str(event["name"]) for event in waits)
        return cls(len(steps), ended - began, length(working), length(behind), dict(counts))

    def per_step(self) -> dict[str, float]:
        """Means. Shares are of the time of a step."""
        return {
            "ms": 1e3 * self.seconds / self.steps,
            "busy": self.busy / self.seconds,
            "idle behind a synchronization": self.behind / self.seconds,
            **{name: count / self.steps for name, count in sorted(self.synchronizations.items())},
        }


@command
def main() -> None:
    run_benchmark(
        GapsConfig, "ddp.gpu_check.gaps", __doc__, None, lambda config: Gaps.of(read_trace(config.trace)), report
    )


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace.

    :raises UsageError: when there is none
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        text = gzip.decompress(content) if path.suffix == ".gz" else content
        events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a trace of torch.profiler: {error}") from error
    return events


def report(config: GapsConfig, gaps: Gaps) -> str:
    """Write the JSON, and return the summary to print."""
    per_step = gaps.per_step()
    write_results(config.output / "gaps.json", {"trace": str(config.trace), "steps": gaps.steps, "per_step": per_step})
    lines = [f"{gaps.steps} steps of {per_step['ms']:.2f} ms"]
    if gaps.busy:
        lines.append(
            f"the GPU works {100 * per_step['busy']:.0f} % of the time, and idles {100 * per_step['idle behind a synchronization']:.0f} % "
            "behind synchronizations of the host"
        )
        lines += [f"{name}: {count / gaps.steps:.1f} per step" for name, count in gaps.synchronizations.items()]
    else:
        lines.append("no GPU worked in it")
    return "\n".join([*lines, files_line(config.output, ("gaps.json",))])


def _interval(event: dict[str, Any]) -> Interval:
    """In seconds."""
    return 1e-6 * event["ts"], 1e-6 * (event["ts"] + event.get("dur", 0))


if __name__ == "__main__":
    main()
