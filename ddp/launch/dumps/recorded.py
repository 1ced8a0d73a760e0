"""A flight recorder's dump: the collectives of one rank, from a pickle or from JSON, without running anything that is in it.

The format is that of torch's ``torch/csrc/distributed/c10d/FlightRecorder*.hpp``. ProcessGroupNCCL writes pickles when its watchdog finds
a timeout (``TORCH_NCCL_DUMP_ON_TIMEOUT``), ours does for gloo, too, and ``_dump_fr_trace_json`` and ``_dump_nccl_trace_json`` give the same
as JSON, but without lines of Python. Gloo's entries stay "scheduled" for ever, so there the order alone tells who is behind.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ddp.launch.dumps.stacks import users_frame
from ddp.launch.frames import Frame

UNEQUAL_SIZES = (
    "all_to_all",
    "scatter",
    "gather",
    "all_gather_v",
    "reduce_scatter_v",
)  # whose ranks may have other sizes


class Collective(NamedTuple):
    """One call of one rank."""

    group: str  # its name in torch
    number: int  # counts the group's collectives; alike on all of its ranks
    name: str
    sizes: tuple[str, ...]  # of what goes in, and what comes out
    dtypes: tuple[str, ...]
    frame: Frame | None  # of the user's code
    is_undone: bool  # known of NCCL alone

    def __str__(self) -> str:
        return f"{self.name} {self.number}" + (f", {self.frame.short}" if self.frame else "")

    @property
    def call(self) -> tuple[object, ...]:
        """Alike on all ranks, if they agree."""
        return self.name, self.sizes, self.dtypes


class Recorded(NamedTuple):
    """One rank's dump."""

    groups: Mapping[str, tuple[int, ...]]  # the ranks of each group, as far as they are known
    collectives: tuple[Collective, ...]  # in the order of their calls

    def calls_of(self, group: str) -> dict[int, Collective]:
        """The collectives of a group by their numbers; of coalesced ones, which share theirs, the last."""
        return {one.number: one for one in self.collectives if one.group == group}


class _Unpickler(pickle.Unpickler):
    """Knows numbers, strings, lists and dictionaries. A dump has nothing else, and what runs code needs a global name."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no dump does: nothing in it was run")


def read_dump(path: Path) -> Recorded:
    """A dump.

    :raises ValueError: when it is none, or is cut off; says what is wrong
    """
    content = path.read_bytes()
    try:
        raw = json.loads(content) if content.lstrip()[:1] == b"{" else _Unpickler(io.BytesIO(content)).load()
        return _parsed(raw)
    except Exception as error:  # a forged pickle can raise anything
        raise ValueError(f"no whole dump ({type(error).__name__}: {error})") from None


def _parsed(raw: dict[str, Any]) -> Recorded:
    groups = {name: tuple(map(int, re.findall(r"\d+", group["ranks"]))) for name, group in raw["pg_config"].items()}
    return Recorded(groups, tuple(_collective(entry) for entry in raw["entries"] if not entry.get("is_p2p")))


def _collective(entry: dict[str, Any]) -> Collective:
    backend, _, name = entry["profiling_name"].rpartition(":")
    sizes = [] if name in UNEQUAL_SIZES else [*entry["input_sizes"], "->", *entry["output_sizes"]]
    frames = [Frame(one["filename"], int(one["line"]), one["name"]) for one in entry.get("frames", ())]
    dtypes = (*entry["input_dtypes"], *entry["output_dtypes"])
    return Collective(
        entry["process_group"][0],
        int(entry["collective_seq_id"]),
        name,
        tuple(map(str, sizes)),
        dtypes,
        users_frame(frames),
        backend == "nccl" and entry.get("state") in ("scheduled", "started"),
    )
