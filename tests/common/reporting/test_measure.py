"""common/reporting/measure.py: a session of measurement, its records, and what it publishes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from common.reporting import measure
from tests.project.test_readme import READMES
from tests.support.launch import REPOSITORY

NUMBER = re.compile(r"\d+(?:\.\d+)?")
TABLES = [
    found
    for readme in READMES
    for found in re.findall(r"results/([^\s)\]]+\.txt)\)[^|]*\n\n\|.*\n\|.*\n((?:\|.*\n)+)", readme.read_text())
]


@pytest.mark.parametrize("doubt", [None, "other programs left 0.5 of 2 cores to this benchmark"])
def test_a_session_records_its_parts_and_publishes_none_of_a_busy_machine(
    doubt: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that fails does not end the session, and has status 1. What was measured on busy cores is not published."""
    commands = {"costs": "echo words; exit 3", "memory": "mkdir OUT && echo drawn > OUT/a.png"}
    for name, command in commands.items():
        part = {"minutes": 1, "command": command, "files": {"a.png": tmp_path / "b.png"}}
        monkeypatch.setitem(measure.PARTS, name, part)
    monkeypatch.setattr(measure, "RECORDS", (records := tmp_path / "records"))
    records.mkdir()
    monkeypatch.setattr(measure, "adopt_orphans", lambda: None)
    monkeypatch.setattr("common.reporting.other_work.OtherWork.doubt", lambda _: doubt)
    for flags, which in (((), "costs"), (("--publish",), "costs, memory" if doubt else "costs")):
        monkeypatch.setattr("sys.argv", ["", "--only", "costs,memory", "--output", str(tmp_path), *flags])
        with pytest.raises(SystemExit, match=f" failed for {which}$"):
            measure.main()
    failed, drawn = (json.loads((tmp_path / f"{name}.json").read_text()) for name in commands)
    assert (failed["status"], drawn["status"], drawn["busy"]) == (3, 0, doubt)
    assert (tmp_path / "costs.txt").read_text() == "words\n"
    assert (tmp_path / "b.png").exists() == (records / "memory.txt").exists() == (doubt is None)


def test_each_figure_of_a_readme_has_a_command_that_makes_it() -> None:
    """The parts publish the PNGs that READMEs show, and no others."""
    shown = {
        (readme.parent / figure).resolve()
        for readme in READMES
        for figure in re.findall(r"\]\((\S+\.png)\)", readme.read_text())
    }
    published = {REPOSITORY / place for part in measure.PARTS.values() for place in part["files"].values()}
    assert shown == {place for place in published if place.suffix == ".png"}


@pytest.mark.parametrize(("record", "table"), TABLES)
def test_a_table_has_the_numbers_of_the_record_above_it(record: str, table: str) -> None:
    """If the words before a table link to a record in results, the table's numbers stand there, to their last digit."""
    measured = NUMBER.findall((REPOSITORY / "results" / record).read_text().replace(",", ""))
    rounded = {f"{float(number):.{digits}f}" for number in measured for digits in range(4)}
    cells = re.sub(r"^\|[^|]*", "", table.replace(",", ""), flags=re.MULTILINE)  # without the first column
    assert set(NUMBER.findall(cells)) <= rounded
