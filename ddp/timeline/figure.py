"""The picture of a training step: for each rank what it computes, its collectives below, and the memory of its shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.reporting.gantt import LABEL_SIZE, Gantt, new_gantt, readable_on, save_gantt
from common.reporting.run_figures import COLORS
from common.reporting.spans import COUNTERS, Span, in_lane, shifted, stacked
from ddp.by_hand.buckets import MIB
from ddp.timeline.parts import COLLECTIVES, COMPUTE, Step, begun_by_all, phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_INCHES, MEMORY_INCHES = 0.36, 1.4
OPTIMIZER, WAIT = COLORS[5], "#f3c3b2"
LATE = {"facecolor": "0.9", "hatch": "////", "linewidth": 0.5}  # the style of what not all ranks have begun
HELD = 0.22  # the opacity of what a gather has made whole, until it is freed
LANES = {"all-reduce": "all-reduce", "gather": "gathers", "reduce-scatter": "reduce-\nscatters"}
LEAST_LABELED = 0.1  # of a replica; a thinner band has no label


@dataclass(frozen=True)
class Look:
    """The look of the spans and counters by their names; others are not drawn.

    :param colors: matplotlib's, with an opacity or without
    :param legend: see :func:`common.reporting.gantt.save_gantt`
    :param replica: bytes that a replica would hold; 0 where no memory is recorded
    """

    colors: Mapping[str, Any]
    legend: Mapping[str, Any]
    replica: int = 0


def plot_step(path: Path, ranks: Sequence[Step], headings: Sequence[str], look: Look, title: str) -> None:
    """Draw one step on all ranks.

    :param headings: of each rank
    """
    origin, has_memory = min(step[0].start for step in ranks), look.replica > 0
    ranks = [shifted(step, origin) for step in ranks]
    end = max(phase(step, "step").end for step in ranks)
    charts = [_Chart(step, look) for step in ranks]
    inches = [height for chart in charts for height in (chart.inches, MEMORY_INCHES)[: 1 + has_memory]]
    figure, axes = new_gantt(inches, 1.2 + 0.35 * len(ranks) + sum(inches), title)
    begun = {lane: begun_by_all(ranks, lane) for lane in COLLECTIVES}
    for rank, (chart, heading) in enumerate(zip(charts, headings, strict=True)):
        gantt = Gantt(axes[rank * (1 + has_memory)], end, f"rank {rank}: {heading}")
        chart.draw(gantt, begun)
        if has_memory:
            chart.memory(axes[2 * rank + 1], end)
    axes[-1].set_xlabel("ms since the first rank began the step")
    save_gantt(path, figure, look.legend)


class _Chart:
    """One rank's rows: 0 is what it computes; its collectives are below.

    A gather keeps its row until its unit is freed, if it is: then the next may have it.

    :param step: in seconds from the left edge
    """

    def __init__(self, step: Step, look: Look) -> None:
        self._step, self._look = step, look
        self._rows: dict[str, list[int]] = {}
        self._bottom = 1
        for lane in COLLECTIVES:
            rows = stacked((span.start, self._held_until(span)) for span in in_lane(step, lane))
            self._rows[lane] = [self._bottom + row for row in rows]
            self._bottom = max([self._bottom - 1, *self._rows[lane]]) + 1
        self.inches = ROW_INCHES * (self._bottom + 0.2)

    def draw(self, gantt: Gantt, begun: Mapping[str, Sequence[float]]) -> None:
        """All rows, and the axes.

        :param begun: for each lane of collectives, the moments at which all ranks have begun
        """
        plot, colors = gantt.plot, self._look.colors
        for span in in_lane(self._step, COMPUTE):
            if span.name in colors:
                gantt.box(0, span.start, span.end, colors[span.name], *_labels(span.name))
        ticks = {0.0: "computes"}
        for lane, rows in self._rows.items():
            for span, row, moment in zip(in_lane(self._step, lane), rows, begun[lane], strict=True):
                until, color, labels = self._held_until(span), colors[span.name], _labels(span.name)
                gantt.box(row, span.start, min(moment, span.end), "0.9", **LATE, edgecolor=color)
                is_named = gantt.box(row, moment, max(moment, span.end), color, *labels)
                if until > span.end:
                    gantt.box(row, span.end, until, (color, HELD), *(() if is_named else labels), linewidth=0)
            if rows:
                ticks[(min(rows) + max(rows)) / 2] = LANES[lane]
        plot.set_yticks(list(ticks), list(ticks.values()))
        plot.set_ylim(self._bottom - 0.4, -0.6)

    def memory(self, plot: Axes, end: float) -> None:
        """Bytes over time, stacked: the optimizer's state, shards, and what is whole.

        :param end: of the time axis
        """
        Gantt(plot, end)
        counts, replica = in_lane(self._step, COUNTERS), self._look.replica / MIB
        moments = [1000 * count.start for count in counts] + [1000 * phase(self._step, "step").end]
        sizes = {name: [count.facts[name] / MIB for count in (*counts, counts[-1])] for name in counts[0].facts}
        colors = [self._look.colors[name] for name in sizes]
        plot.stackplot(moments, list(sizes.values()), colors=colors, step="post", linewidth=0)
        below = 0.0
        for (name, (size, *_)), color in zip(sizes.items(), colors, strict=True):
            if size > LEAST_LABELED * replica:
                text, letters = f" {name}: {size:.1f} MiB", readable_on(color)
                plot.text(moments[0], below + size / 2, text, va="center", fontsize=LABEL_SIZE, color=letters)
            below += size
        plot.axhline(replica, color="0.3", linewidth=1, linestyle="--")
        plot.text(0, replica, f" a replica: {replica:.1f} MiB", va="bottom", fontsize=LABEL_SIZE, color="0.3")
        plot.set_ylim(0, 1.12 * replica)
        plot.set_ylabel("memory, MiB")

    def _held_until(self, gather: Span) -> float:
        frees = [free.start for free in in_lane(self._step, "free") if free.name == gather.name]
        later = [moment for moment in frees if moment >= gather.end and gather.lane == "gather"]
        return min(later, default=gather.end)


def _labels(name: str) -> Sequence[str]:
    """Labels of a box: a gradient's module; otherwise the name of the span, or its number where there is no room for more."""
    number = name.replace(".", " ").rpartition(" ")[2]
    return (name, number) if number.isdigit() else (name.rpartition(".")[0] or name,)
