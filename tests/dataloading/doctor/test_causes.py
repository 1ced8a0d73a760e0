"""Causes are named from measurements: each case is a loader's record, made by hand."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import pytest

from dataloading.doctor.causes import find
from dataloading.doctor.measured import Event, Loader, Process

SCRIPT = """\
class Clips:
    def __init__(self):
        self.names = [str(n) for n in range(100_000)]
        self.db = connect("clips.db")

    def __getitem__(self, index):
        self.cache[index] = ToTensor()(decode(index))
        return self.cache[index]
"""
MB = 1_000_000


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def loader(script: str, *, wait: float = 0.08, use: float = 0.02, **facts: Any) -> Loader:
    """Forty batches of eight samples, from two workers; a worker takes 0.2 s for each, and rests."""
    settings = {"line": f"{script}:20", "getitem": f"{script}:6", "dataset": "Clips", "workers": 2, "method": "fork"}
    settings |= {"prefetch": 2, "in_order": True, "collate": "default_collate"}
    settings |= {"handles": [], "lists": [], "tensors": [], **facts}
    start = event("iterator", 0.0, 0.0, iterator=0, reused=False, workers=[1, 2], pickled_bytes=0)
    begins = [number * (wait + use) for number in range(40)]
    batches = [event("batch", begin, begin + wait, iterator=0, received=0.0) for begin in begins]
    hot = [("getitem", f"{script}:7", "PIL.decode", 6.0), ("getitem", f"{script}:8", "", 1.0)]
    return Loader(settings, [Process(0, [start, *batches], {"seconds": []})], [worker(slot, hot) for slot in (0, 1)])


def event(kind: str, began: float, ended: float, **fields: Any) -> Event:
    return {"kind": kind, "began": began, "ended": ended, **fields}


def worker(slot: int, hot: list[Any]) -> Process:
    fetches = [
        event("fetch", float(n), n + 0.2, collate=0.01, collected=0.0, samples=8, slowest=[(f"{slot}-{n}", 0.02)])
        for n in range(20)
    ]
    return Process(slot, fetches, {"memory": [], "busy_threads": 0, "seconds": hot})


def test_each_process_has_iterations_of_its_own(script: str) -> None:
    one = loader(script)
    (main,) = one.mains
    later = [{**event, "began": event["began"] + 10.0, "ended": event["ended"] + 10.0} for event in main.events]
    both = Loader(one.facts, [main, Process(1, later, {"seconds": []})])
    assert both.starts() == pytest.approx(one.starts() * 2)
    assert [steps for steps, _ in both.epochs()] == [40, 40]
    assert both.loop_s == pytest.approx(2 * one.loop_s)
    assert both.share == pytest.approx(one.share)


def names(record: Loader, cores: int = 2) -> dict[str, int]:
    """The causes that are found, with their lines."""
    return {cause.name: int(cause.line.rpartition(":")[2]) for cause in find(record, cores)}


def memory(*megabytes: tuple[int, int]) -> dict[str, Any]:
    """A profile with what was resident and what was private at these times."""
    return {"memory": [(resident * MB, private * MB) for resident, private in megabytes]}


def test_the_hottest_line_is_named_if_nothing_else_explains_the_time(script: str) -> None:
    assert names(loader(script)) == {"slow-getitem": 7}


def test_nothing_is_said_of_a_loader_that_training_does_not_wait_for(script: str) -> None:
    assert names(loader(script, wait=0.002, use=0.1, workers=0)) == {}
    of_few_seconds = loader(script)
    of_few_seconds.all_loops_s = 1000.0
    assert names(of_few_seconds) == {}


def test_few_slow_samples_are_named_by_index(script: str) -> None:
    record = loader(script)
    for slow in record.of_workers("fetch")[5::10]:
        slow["ended"] += 3.0
        slow["slowest"] = [(slow["slowest"][0][0], 3.0)]
    assert names(record) == {"slow-samples": 7}
    assert "4 of 320 samples" in find(record, 2)[0].text and "0-5, 0-15, 1-5" in find(record, 2)[0].text
    assert find(record, 2)[0].text.endswith(
        ", and finished batches wait behind them: in_order=False, or make them faster"
    )
    for nothing_waits in ({"in_order": False}, {"workers": 1}):
        record.facts |= nothing_waits
        assert find(record, 1)[0].text.endswith("): make them faster")


def test_fewer_workers_than_cores_are_named_if_they_are_busy(script: str) -> None:
    record = loader(script)
    for number, fetch in enumerate(record.of_workers("fetch")):
        fetch.update(began=0.2 * number, ended=0.2 * number + 0.19)
    assert names(record, cores=8) == {"too-few-workers": 20}
    assert names(loader(script, workers=0)) == {"too-few-workers": 20}


def test_an_open_database_is_shared_only_over_fork(script: str) -> None:
    handles = [(script, "Clips", "db", "Connection")]
    assert names(loader(script, wait=0.001, handles=handles)) == {"shared-handle": 4}
    assert names(loader(script, wait=0.001, handles=handles, method="spawn")) == {}
    assert names(loader(script, wait=0.001, use=0.5, handles=handles, workers=0)) == {}


def test_a_list_is_copied_where_private_memory_grows_and_resident_does_not(script: str) -> None:
    record = loader(script, wait=0.001, lists=[(script, "Clips", "names", "list of 100,000")])
    record.workers[1].profile |= memory((900, 30), (905, 80), (908, 120))
    assert names(record) == {"python-list-copied": 3}


def test_a_worker_grows_where_it_goes_on_to_grow_by_more_than_batches(script: str) -> None:
    record = loader(script, wait=0.001)
    record.workers[0].profile |= memory((300, 30), (600, 330), (601, 331), (601, 331))
    assert names(record) == {}
    record.workers[0].profile |= memory((300, 30), (400, 130), (500, 230), (600, 330))
    assert names(record) == {"growing-workers": 7}
    record.all("batch")[0]["bytes"] = 100 * MB
    assert names(record) == {}


def test_garbage_collections_are_named_beside_the_line_that_is_slow(script: str) -> None:
    record = loader(script)
    for fetch in record.of_workers("fetch"):
        fetch["collected"] = 0.1
    assert names(record) == {"garbage-collection": 20, "slow-getitem": 7}


def test_threads_of_workers_are_named_where_they_are_set(script: str) -> None:
    record = loader(script)
    record.workers[0].profile["busy_threads"] = 3
    assert names(record) == {"too-many-threads": 20}
    with open(script, "a") as file:
        file.write("torch.set_num_threads(8)\n")
    linecache.checkcache(script)
    assert names(record) == {"too-many-threads": 9}
    assert names(record, cores=16) == {"slow-getitem": 7}


def test_starts_of_workers_and_pickled_data_sets(script: str) -> None:
    record = loader(script)
    start, batch = record.mains[0].events[:2]
    starts = [{**start, "iterator": n, "began": n * 1.0, "ended": n + 0.1} for n in range(4)]
    record.mains[0].events = [
        *starts,
        *({**batch, "iterator": n, "began": n + 0.1, "ended": n + 0.9} for n in range(4)),
    ]
    assert names(record) == {"workers-restarted": 20}
    starts[0]["pickled_bytes"] = 50 * MB
    assert names(record) == {"workers-restarted": 20, "dataset-pickled": 20}


def test_a_tensor_that_is_fetched_sample_by_sample(script: str) -> None:
    record = loader(script, dataset="Subset", tensors=[(script, "Clips", "images", "Tensor")])
    for fetch in record.of_workers("fetch"):
        fetch.update(ended=fetch["began"] + 0.0002, collate=0.0)
    assert names(record) == {"tensor-by-sample": 7}
    assert find(record, 2)[0].text.startswith("Clips.images lies in memory")


@pytest.mark.parametrize(("floats", "name"), [(9 * MB, "floats-for-bytes"), (0, "slow-collate")])
def test_floats_that_were_bytes_and_slow_collating(script: str, floats: int, name: str) -> None:
    record = loader(script)
    for fetch in record.of_workers("fetch"):
        fetch["collate"] = 0.15
    record.all("batch")[0].update(bytes=10 * MB, floats_of_bytes=floats)
    record.workers[0].profile["seconds"].append(("collate", f"{script}:8", "", 3.0))
    assert names(record) == {name: 7 if floats else 8}
