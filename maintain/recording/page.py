"""The page of a recording: its stills, a slider over time, and the source that each process executes. One file, without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from maintain.recording.events import Recording
from maintain.recording.picture import describe, draw
from maintain.recording.scenes import Scene


def write_page(path: Path, scene: Scene, runs: Sequence[Recording], checksum: str) -> None:
    """Write the page of one run, or of two that are scrubbed in step.

    :param runs: one of each variant of the scene
    :param checksum: of the code that the recording shows
    """
    sources = [(file.name, file.read_text().splitlines()) for file in scene.files]
    data = json.dumps({"sources": sources, "runs": list(map(_data, runs))}, separators=(",", ":"))
    template = Template(Path(__file__).with_name("page.html").read_text())
    page = template.substitute(
        title=escape(scene.title),
        text=escape(scene.text),
        command=f"python -m maintain.recording {path.stem}",
        runs="".join(map(_run, scene.variants, runs)),
        data=data.replace("</", "<\\/"),  # no tag ends the script
        checksum=checksum,
    )
    path.write_text(page)


def _run(title: str, run: Recording) -> str:
    sections = "".join(
        f"<section><b>{escape(lane.name)}</b> <i></i><br><small></small><pre></pre></section>"
        for lane in run.lanes
        if lane.lines
    )
    still = f'<div class="lanes">{draw(run, title)}</div>'
    return f'<div class="run"><h2>{escape(title)}</h2>{still}<div class="code">{sections}</div></div>'


def _data(run: Recording) -> dict[str, Any]:
    """The data that the page's script needs."""
    return {
        "end": run.end,
        "milestones": run.milestones,
        "lanes": [
            {"spans": [(span.start, span.end, describe(span)) for span in lane.spans], "lines": lane.lines}
            for lane in run.lanes
        ],
    }
