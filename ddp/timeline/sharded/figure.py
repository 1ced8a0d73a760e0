"""The picture of a sharded step: for each rank what it computes and sends, and below, on the same axis, its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.reporting.gantt import Gantt, new_gantt, save_gantt
from common.reporting.run_figures import COLORS
from ddp.by_hand.buckets import MIB
from ddp.timeline.figure import CHARACTER_PX, HEIGHT, LABEL_SIZE, LATE, OPTIMIZER, WAIT, lanes
from ddp.timeline.overlap import Interval, union
from ddp.timeline.recording import Sending
from ddp.timeline.sharded.parts import WAITS, ShardedParts, begun_by_all
from ddp.timeline.sharded.recording import ROOT, ShardedStep, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

ROW_INCHES, MEMORY_INCHES = 0.4, 1.9
BLOCK_COLORS, ROOT_COLOR = (COLORS[0], COLORS[2], COLORS[3]), COLORS[4]
FORWARD, WHOLE, PARAMETERS = 0.55, 0.22, 0.85  # opacity of a unit's color
SLICES = {"state": OPTIMIZER, "parameter_slices": "#a9b8c4", "gradient_slices": "#d9dde0"}
WORDS = {
    "state": "optimizer state",
    "parameter_slices": "slices of parameters",
    "gradient_slices": "slices of gradients",
}
LEAST_LABELED = 0.09  # of the axis; a thinner band has no label


def plot_step(
    path: Path,
    ranks: Sequence[ShardedStep],
    parts: Sequence[ShardedParts],
    units: Mapping[str, int],
    replica: int,
    title: str,
) -> None:
    """Draw one step on all ranks.

    :param ranks: its moments on each; :param parts: how long each part took there
    :param units: names, in the order in which they run
    :param replica: bytes that a replica would hold
    """
    origin, end = min(step.began for step in ranks), max(step.ended for step in ranks)
    steps = [step.since(origin) for step in ranks]
    drawings = [_Drawing(step, list(units)) for step in steps]
    inches = [part for one in drawings for part in (ROW_INCHES * one.rows, MEMORY_INCHES)]
    figure, axes = new_gantt(inches, 1.3 + 0.35 * len(ranks) + sum(inches), title, sharex=True)
    begun = {kind: begun_by_all(steps, kind) for kind in ("gather", "reduce-scatter")}
    top = 1.12 * max([replica, *(its.peak for its in parts)]) / MIB
    for rank, (one, its) in enumerate(zip(drawings, parts, strict=True)):
        chart = Gantt(axes[2 * rank], end - origin, height=HEIGHT, character_px=CHARACTER_PX)
        one.compute(chart)
        one.collectives(chart, begun)
        chart.plot.set_title(f"rank {rank}: {_summary(its)}", loc="left", fontsize=11, fontweight="bold")
        chart.plot.set_xlim(0, 1000 * (end - origin))
        one.memory(axes[2 * rank + 1], replica, top)
    axes[-1].set_xlabel("ms since the first rank began the step.  A unit has the same color everywhere")
    save_gantt(path, figure, _legend(), rows=2, fontsize=9)


class _Drawing:
    """One rank's rows: 0 is what it computes; gathers are below, then reduce-scatters.

    A gather keeps its lane until the unit is freed, if it is: then the next may have it.

    :param step: in seconds from the left edge
    :param units: see :func:`plot_step`
    """

    def __init__(self, step: ShardedStep, units: list[str]) -> None:
        self._step = step
        blocks = [unit for unit in units if unit != ROOT]
        self._colors = {unit: BLOCK_COLORS[number % len(BLOCK_COLORS)] for number, unit in enumerate(blocks)}
        self._colors[ROOT] = ROOT_COLOR
        self._freed = [self._end_of(gather) for gather in step.of("gather")]
        held = zip(step.of("gather"), self._freed, strict=True)
        self._lanes = lanes([Sending(gather.start, freed) for gather, freed in held])
        self._reduce_row = 2 + max(self._lanes, default=-1)
        self.rows = 1 + self._reduce_row

    def _end_of(self, gather: Span) -> float:
        frees = (free.start for free in self._step.of("free") if free.unit == gather.unit)
        return min((moment for moment in frees if moment >= gather.end), default=gather.end)

    def compute(self, chart: Gantt) -> None:
        """Row 0."""
        waits = union((span.start, span.end) for span in self._step.of(*WAITS))
        for span in self._step.of("forward", "backward", "optimizer"):
            if span.kind == "optimizer":
                _box(chart, 0, span.start, span.end, OPTIMIZER, "optimizer")
            else:
                alpha = FORWARD if span.kind == "forward" else 1
                parts = list(_outside(waits, span.start, span.end))
                longest = max(parts, key=lambda part: part[1] - part[0], default=None)
                for part in parts:
                    labels = _names(span.unit) if part == longest else ()
                    _box(chart, 0, *part, self._colors[span.unit], *labels, alpha=alpha)
        for start, end in waits:
            _box(chart, 0, start, end, WAIT, "waits", linewidth=0)

    def collectives(self, chart: Gantt, begun: Mapping[str, Sequence[float]]) -> None:
        """The other rows, and the axes.

        :param begun: for each kind, the moments at which all ranks have begun
        """
        step, plot = self._step, chart.plot
        gathers = zip(step.of("gather"), self._freed, self._lanes, begun["gather"], strict=True)
        for span, freed, lane, moment in gathers:
            named = self._transfer(chart, 1 + lane, span, moment)
            labels = () if named else _names(span.unit)
            _box(chart, 1 + lane, span.end, freed, self._colors[span.unit], *labels, alpha=WHOLE, linewidth=0)
            if freed > span.end:
                bottom = 1 + lane - HEIGHT / 2
                plot.plot([1000 * freed] * 2, [bottom, bottom + HEIGHT], color=self._colors[span.unit], linewidth=2)
        for span, moment in zip(step.of("reduce-scatter"), begun["reduce-scatter"], strict=True):
            self._transfer(chart, self._reduce_row, span, moment)
        gathers_label = "gathers,\nholds" if step.of("free") else "gathers"
        plot.set_yticks([0, self._reduce_row / 2, self._reduce_row], ["computes", gathers_label, "reduce-\nscatters"])
        plot.set_ylim(self._reduce_row + 0.6, -0.6)
        chart.time_axis()

    def _transfer(self, chart: Gantt, row: float, span: Span, begun: float) -> bool:
        """Draw a collective, and return whether its unit is named."""
        color = self._colors[span.unit]
        _box(chart, row, span.start, min(begun, span.end), LATE, hatch="////", edgecolor=color)
        return _box(chart, row, begun, max(begun, span.end), color, *_names(span.unit))

    def memory(self, plot: Axes, replica: int, top: float) -> None:
        """Bytes over time, stacked: slices, whole parameters, whole gradients.

        :param top: of the axis, in MiB
        """
        samples = self._step.memory
        moments = [*(1000 * memory.moment for memory in samples), 1000 * self._step.ended]
        below = [0.0] * len(moments)

        def stack(values: list[int], **style: Any) -> float:
            """Add a band, and return the middle of its left end."""
            nonlocal below
            upper = [base + value / MIB for base, value in zip(below, [*values, values[-1]], strict=True)]
            plot.fill_between(moments, below, upper, step="post", linewidth=0, **style)
            middle, below = (below[0] + upper[0]) / 2, upper
            return middle

        for name, color in SLICES.items():
            values = [getattr(memory, name) for memory in samples]
            middle = stack(values, color=color)
            if values[0] / MIB > LEAST_LABELED * top:
                text = f" {WORDS[name]}: {values[0] / MIB:.1f} MiB"
                plot.text(
                    moments[0],
                    middle,
                    text,
                    va="center",
                    fontsize=LABEL_SIZE,
                    color="white" if name == "state" else "black",
                )
        for unit, color in sorted(self._colors.items(), key=lambda one: one[0] != ROOT):
            stack([memory.parameters[unit] for memory in samples], facecolor=color, alpha=PARAMETERS)
        for unit, color in self._colors.items():
            values = [memory.gradients[unit] for memory in samples]
            stack(values, facecolor="white", hatch="xxxx", edgecolor=color)
        plot.axhline(replica / MIB, color="0.3", linewidth=1, linestyle="--")
        plot.text(
            0, replica / MIB, f" a replica: {replica / MIB:.1f} MiB", va="bottom", fontsize=LABEL_SIZE, color="0.3"
        )
        plot.set_ylim(0, top)
        plot.set_ylabel("memory, MiB")
        plot.grid(axis="x", alpha=0.25)
        plot.set_axisbelow(True)
        for side in ("top", "right", "left"):
            plot.spines[side].set_visible(False)


def _box(chart: Gantt, y: float, start: float, stop: float, color: str, *labels: str, **style: Any) -> bool:
    """A box with the first of the labels that has room in it. Returns whether one has."""
    chart.box(y, start, stop, **{"edgecolor": "white", "linewidth": 0.5, "facecolor": color, **style})
    room = chart.pixels(start, stop)
    text = next((label for label in labels if chart.text_pixels(label, LABEL_SIZE) < room), "")
    dark = color != WAIT and style.get("alpha", 1) == 1
    chart.write(y, start, stop, text, fontsize=LABEL_SIZE, color="white" if dark else "black")
    return bool(text)


def _outside(intervals: Sequence[Interval], start: float, end: float) -> Iterator[Interval]:
    """The parts from ``start`` to ``end`` that lie in none of the disjoint intervals, which are in order."""
    for first, last in intervals:
        if start < first < end:
            yield start, first
        if first < end:
            start = max(start, last)
    if start < end:
        yield start, end


def _names(unit: str) -> tuple[str, str]:
    return unit, unit.rpartition(".")[2]


def _summary(its: ShardedParts) -> str:
    waits = its.wait_gather + its.wait_reduce
    return (
        f"step {1000 * its.step:.0f} ms, waits for {1000 * waits:.0f} ms of it; at most {its.peak / MIB:.1f} MiB, "
        f"{its.rest / MIB:.1f} MiB between steps"
    )


def _legend() -> list[Patch]:
    from matplotlib.patches import Patch

    color = BLOCK_COLORS[0]
    return [
        Patch(color=color, alpha=FORWARD, label="forward of a unit"),
        Patch(color=color, label="backward, or a collective, of a unit"),
        Patch(color=WAIT, label="waits"),
        Patch(color=OPTIMIZER, label="optimizer, and its state"),
        Patch(facecolor=LATE, edgecolor=color, hatch="////", label="begun, but not yet by the slowest rank"),
        Patch(color=color, alpha=WHOLE, label="parameters are whole, until freed"),
        Patch(color=SLICES["parameter_slices"], label="memory: slices of parameters"),
        Patch(color=SLICES["gradient_slices"], label="memory: slices of gradients"),
        Patch(color=color, alpha=PARAMETERS, label="memory: whole parameters of a unit"),
        Patch(facecolor="white", edgecolor=color, hatch="xxxx", linewidth=0, label="memory: whole gradients of a unit"),
    ]
