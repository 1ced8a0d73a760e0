"""Recordings: what is read from events, what a recorded all-reduce sends, and that no page is older than its code."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from maintain.recording import __main__ as recording
from maintain.recording.events import read
from maintain.recording.page import write_page
from maintain.recording.scenes import Scene

MILLISECOND = 1000
CALL = {"lane": "", "note": "", "bytes": 0, "peer": None}


def write(folder: Path, process: str, *events: dict[str, object]) -> None:
    """A file of a process. Events are a millisecond apart unless they say when they are."""
    lines = [
        {"t": n * MILLISECOND, "pid": hash(process), "process": process, **CALL, **event}
        for n, event in enumerate(events)
    ]
    (folder / f"{process}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_no_recording_is_older_than_its_code() -> None:
    stale = recording.stale()
    assert not stale, f"older than the code that they show: run python -m maintain.recording {' '.join(stale)}"
    assert (recording.OUTPUT / "README.md").read_text() == recording.index()


def test_lanes_are_read_from_events(tmp_path: Path) -> None:
    """Spans lie in spans, a message goes from lane to lane, a killed process ends its spans, and the window cuts."""
    write(
        tmp_path,
        "rank 0",
        {"begin": 1, "name": "before"},
        {"end": 1},
        {"begin": 2, "name": "step"},
        {"begin": 3, "name": "isend", "lane": "messages", "peer": 1, "bytes": 4},
        {"begin": 4, "name": "inner"},
        {"end": 4, "note": "said at its end"},
        {"end": 3},
        {"end": 2},
    )
    write(
        tmp_path,
        "rank 1",
        {"line": 7, "file": 0},
        {"begin": 1, "name": "step"},
        {"begin": 2, "name": "irecv", "lane": "messages", "peer": 0, "bytes": 4, "t": 3 * MILLISECOND},
        {"end": 2, "t": 5 * MILLISECOND},
        {"line": 8, "file": 0, "t": 9 * MILLISECOND},  # killed
    )
    got = read(tmp_path, ("step", 1, "step", 1))
    assert [lane.name for lane in got.lanes] == ["rank 0", "rank 0, messages", "rank 1", "rank 1, messages"]
    first, _, killed, _ = got.lanes
    assert [(span.name, span.note, span.depth) for span in first.spans] == [
        ("step", "", 0),
        ("inner", "said at its end", 1),
    ]
    assert killed.spans[0].end == got.end == 8000
    assert [line[1:] for line in killed.lines] == [(0, 8)]
    assert [message[2:] for message in got.messages] == [("rank 0", "rank 1", 4)]
    assert got.messages[0][:2] == (2000, 4000)
    assert got.milestones == [6000]


def test_a_page_is_one_file(tmp_path: Path) -> None:
    """It loads nothing, it holds the sources and the still, and what it embeds cannot end the script."""
    source = tmp_path / "source.py"
    source.write_text("print('</script>')\n")
    write(tmp_path, "process", {"begin": 1, "name": "load"}, {"line": 1, "file": 0}, {"end": 1})
    scene = Scene("A <title>", "Text.", str(source), {"as it is": ()})
    page = tmp_path / "page.html"
    write_page(page, scene, [read(tmp_path, scene.window)], "checksum")
    text = page.read_text()
    assert not re.findall(r"src=|<link", text)
    assert "<noscript>" in text and "A &lt;title&gt;" in text and text.count("</script>") == 1 and "<svg" in text
    assert json.loads(re.search(r"const DATA = (.*);\n", text)[1])["sources"] == [["source.py", ["print('</script>')"]]]  # type: ignore[index]


@pytest.mark.examples
@pytest.mark.parametrize(("name", "messages"), [("ring", 6), ("halving-doubling", 4)])
def test_a_recorded_all_reduce_sends_what_it_must(tmp_path: Path, name: str, messages: int) -> None:
    """Each of four ranks sends six quarters of 4 MiB in a ring; with halving and doubling, two halves and two quarters."""
    got = recording.record(f"all-reduce-{name}", (name,), tmp_path)
    assert Counter(message.sender for message in got.messages) == {f"rank {rank}": messages for rank in range(4)}
    assert sum(message.nbytes for message in got.messages) == 4 * 6 << 20
    assert all(lane.lines for lane in got.lanes if "messages" not in lane.name)
