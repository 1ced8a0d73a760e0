"""maintain/measure.py: a session of measurement, its records, and what it publishes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from maintain import measure
from tests.project.test_prose import PAGES, paragraphs, sentences
from tests.project.test_readme import READMES
from tests.support.launch import REPOSITORY

NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?")
UNIT = re.compile(r"\d ?(?:ms|µs|s|%|images/s|[GM]B/s|x|times)(?!\w)")
RECORD = re.compile(r"results/([\w/.-]+\.txt)")
SOURCES = (REPOSITORY / "results/README.md").read_text().replace(",", "")
TABLES = [  # each with its page and the paragraph above it
    (str(page.relative_to(REPOSITORY)), *found)
    for page in READMES
    for found in re.findall(r"((?:.+\n)*)\n(\|.*\n\|[-|]+\n(?:\|.*\n)+)", page.read_text().replace(",", ""))
    if RECORD.search("".join(found)) or re.search(r"^\|.*\b(?:images/s|ms|µs)", found[1])
]


@pytest.mark.parametrize("doubt", [None, "other programs left 0.5 of 2 cores to this benchmark"])
def test_a_session_records_its_parts_and_publishes_none_of_a_busy_machine(
    doubt: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that fails does not end the session, and has status 1. What was measured on busy cores is not published."""
    commands = {"engines": "echo words; exit 3", "memory": "mkdir OUT && echo drawn > OUT/a.png"}
    for name, command in commands.items():
        part = {"minutes": 1, "command": command, "files": {"a.png": tmp_path / "b.png"}}
        monkeypatch.setitem(measure.PARTS, name, part)
    monkeypatch.setattr(measure, "RECORDS", (records := tmp_path / "records"))
    records.mkdir()
    monkeypatch.setattr(measure, "adopt_orphans", lambda: None)
    monkeypatch.setattr("common.benchmarking.other_work.OtherWork.doubt", lambda _: doubt)
    for flags, which in (((), "engines"), (("--publish",), "engines, memory" if doubt else "engines")):
        monkeypatch.setattr("sys.argv", ["", "--only", "engines,memory", "--output", str(tmp_path), *flags])
        with pytest.raises(SystemExit, match=f" failed for {which}$"):
            measure.main()
    failed, drawn = (json.loads((tmp_path / f"{name}.json").read_text()) for name in commands)
    assert (failed["status"], drawn["status"], drawn["busy"]) == (3, 0, doubt)
    assert (tmp_path / "engines.txt").read_text() == "words\n"
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


def numbers_in(words: str, *units: float) -> set[str]:
    """The numbers of the records to which these words link, in each of these units, rounded to any number of digits."""
    records = "".join((REPOSITORY / f"results/{record}").read_text() for record in RECORD.findall(words))
    measured = [float(number) * unit for number in NUMBER.findall(records.replace(",", "")) for unit in units]
    return {f"{number:.{digits}f}" for number in measured for digits in range(4)}


@pytest.mark.parametrize(("page", "above", "table"), TABLES)
def test_a_table_has_the_numbers_of_its_record(page: str, above: str, table: str) -> None:
    """The numbers of a table stand in the records to which it or the words above it link, to their last digit. A table without a
    record is named in results/README.md."""
    if RECORD.search(above + table):
        cells = re.sub(r"^\|[^|]*|\]\(.*?\)", "", table, flags=re.MULTILINE)  # without the first column
        assert set(NUMBER.findall(cells)) <= numbers_in(above + table, 1)
    else:
        assert f"| {page} | the table of {table.split('|')[2].strip()} |" in SOURCES


@pytest.mark.parametrize("page", PAGES)
def test_each_measured_number_says_where_it_comes_from(page: str) -> None:
    """The numbers of a sentence with a measured one stand in a record to which the page links, or in results/README.md."""
    text = (REPOSITORY / page).read_text().replace(",", "")
    measured = {one for part in paragraphs(text) for one in sentences(part) if UNIT.search(one)}
    numbers = set(NUMBER.findall(" ".join(measured)))
    named = set(NUMBER.findall(" ".join(re.findall(rf"^\| {page} \| (.+?) \|", SOURCES, re.MULTILINE))))
    # A share may be given in per cent, and µs in ms.
    assert named <= numbers <= named | numbers_in(text, 1, 100, 0.001)
