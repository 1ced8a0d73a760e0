"""The page of a recording: its stills, a slider over time, and the source that each process executes. One file, without a server."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from common.recording.events import Recording
from common.recording.picture import LEFT, WIDTH, describe, draw


class Run(NamedTuple):
    """One recorded run of a page.

    :ivar title: what distinguishes it from the page's other run; may be empty
    :ivar sources: the files whose lines were followed, in the order of their numbers in the recording
    """

    title: str
    recording: Recording
    sources: list[Path]


def write_page(path: Path, title: str, text: str, command: str, checksum: str, runs: list[Run]) -> None:
    """Write the page of one run, or of two that are scrubbed in step.

    :param text: what to look for; plain text
    :param command: what makes the recording anew
    :param checksum: of the code that the recording shows
    """
    template = Template((Path(__file__).parent / "page.html").read_text())
    parts = "".join(_run(number, run) for number, run in enumerate(runs))
    data = json.dumps([_data(run) for run in runs], separators=(",", ":")).replace("</", "<\\/")
    values = {
        "title": escape(title),
        "text": escape(text),
        "command": escape(command),
        "runs": parts,
        "data": data,
        "checksum": checksum,
    }
    path.write_text(template.substitute(values, left=LEFT, width=WIDTH))


def _run(number: int, run: Run) -> str:
    sections = "".join(
        f'<section data-lane="{i}"><b>{escape(lane.name)}</b> <i></i><br><small></small><pre></pre></section>'
        for i, lane in enumerate(run.recording.lanes)
        if lane.lines
    )
    title = f"<h2>{escape(run.title)}</h2>" if run.title else ""
    still = draw(run.recording, run.title, cursor=True)
    return f'<div id="run{number}">{title}<div class="lanes">{still}</div><div class="code">{sections}</div></div>'


def _data(run: Run) -> dict[str, Any]:
    """What the page's script needs, with times in seconds to the microsecond."""
    return {
        "seconds": round(run.recording.seconds, 6),
        "milestones": [round(moment, 6) for moment in run.recording.milestones],
        "sources": [{"name": path.name, "lines": path.read_text().splitlines()} for path in run.sources],
        "lanes": [
            {
                "spans": [(round(span.start, 6), round(span.end, 6), describe(span)) for span in lane.spans],
                "lines": [(round(moment, 6), file, line) for moment, file, line in lane.lines],
            }
            for lane in run.recording.lanes
        ],
    }
