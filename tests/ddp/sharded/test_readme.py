"""The measured tables of ddp/sharded/README.md are those of the JSON that ``python -m ddp.bench memory`` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ddp.bench.sharding import STAGES
from tests.support.launch import REPOSITORY

FOLDER = REPOSITORY / "ddp" / "sharded"


def rows(written: dict[str, Any]) -> Iterator[str]:
    """The lines of the README's tables."""
    parameters = written["parameters"]
    ledger = {(row["ranks"], row["variant"]): row for row in written["ledger"]}

    def line(title: str, cells: list[str]) -> str:
        return " ".join(["|", " | ".join([title, *cells]), "|"]).replace("  ", " ")

    for ranks in (2, 4):
        of_ranks = [ledger[ranks, variant] for variant in STAGES]
        yield line(
            f"{ranks} ranks, between backward and step",
            [f"{sum(row['resident'].values()) / parameters:.2f}" for row in of_ranks],
        )
        yield line(f"{ranks} ranks, peak", [f"{row['peak'] / parameters:.2f}" for row in of_ranks])
    sent = [row["sent"] / 4 / parameters for row in of_ranks]
    sent[0] = sent[1]  # replicas send the two halves as one all-reduce
    yield line(
        "bytes sent in a step (ring, 4 ranks), divided by the parameters' bytes",
        [f"{one:.2f}" if one else "" for one in sent],
    )


def test_its_tables_are_what_was_measured() -> None:
    """The README's tables have the numbers of the JSON.

    Claim (ddp/sharded/README.md, 2, 6): the measured tables are those of the JSON.
    """
    lines = (FOLDER / "README.md").read_text().splitlines()
    for row in rows(json.loads((FOLDER / "results" / "memory.json").read_text())):
        assert row in lines
