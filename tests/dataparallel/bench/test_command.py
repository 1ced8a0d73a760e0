"""``python -m dataparallel.bench``, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launch import run_forked


@pytest.mark.examples
def test_it_measures_draws_and_explains(tmp_path: Path) -> None:
    """The bench measures, draws its figure and says from which batch size on it pays.

    Claim (dataparallel/README.md): the bench measures, draws and explains; the steps add up.
    """
    flags = ("--batch-sizes", "16,4", "--rounds", "2", "--devices", "cpu,cpu", "--output", str(tmp_path))
    (done,) = run_forked("dataparallel.bench", *flags)
    assert done.returncode == 0, done.stderr
    for mode in ("inference", "training"):
        assert f"{mode}, ms per call by batch size" in done.stdout
    assert done.stdout.count("handwritten: ") == 2
    assert (tmp_path / "steps.png").is_file()
    written = json.loads((tmp_path / "dataparallel.json").read_text())
    assert [(point["mode"], point["batch_size"]) for point in written["points"]] == [
        ("inference", 4), ("inference", 16), ("training", 4), ("training", 16)
    ]  # fmt: skip
    assert all(len(seconds) == 2 for point in written["points"] for seconds in point["seconds"].values())
