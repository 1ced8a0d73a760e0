"""ddp/launch/dumps: which rank did not join which collective, from dumps and stacks; and nothing in them is executed."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp.launch.dumps import explain
from ddp.launch.dumps.explain import gathered, report
from ddp.rendezvous.process_group import process_group
from ddp.watchdog.flight_recorder import write_collectives
from tests.ddp.checkpoint.samples import Malicious
from tests.support.launch import REPOSITORY, run_command, run_ranks
from tests.support.user_errors import UserError

LIBRARY = {
    "name": "all_reduce",
    "filename": "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
    "line": 3,
}
# operation, size, type, file, line, function, group
CALLS: dict[str, tuple[Any, ...]] = {
    "s": ("all_reduce", [4, 5], "Float", "train.py", 88, "train", "0"),  # a step's
    "l": ("all_reduce", [3, 5], "Float", "train.py", 88, "train", "0"),  # a last batch that is smaller
    "h": ("all_reduce", [4, 5], "BFloat16", "train.py", 88, "train", "0"),
    "b": ("barrier", [], "Int", "evaluate.py", 20, "evaluate", "0"),
    "m": ("all_reduce", [4, 5], "Float", "evaluate.py", 31, "evaluate", "0"),  # a metric that looks like a step
    "g": ("all_gather", [4, 5], "Float", "evaluate.py", 40, "gather", "0"),
    "i": ("broadcast", [4, 5], "Float", "parts.py", 7, "exchange", "1"),
}


def dump(calls: str) -> dict[str, Any]:
    """A dump as torch writes it (torch/csrc/distributed/c10d/FlightRecorder.hpp), with what is read of it."""
    counts: Counter[str] = Counter()
    entries = []
    for name, size, dtype, file, line, function, group in map(CALLS.__getitem__, calls):
        counts[group] += 1
        frames = [LIBRARY, {"name": function, "filename": f"/home/me/{file}", "line": line}]
        sizes, dtypes = (
            {"input_sizes": [size], "output_sizes": [size]},
            {"input_dtypes": [dtype], "output_dtypes": [dtype]},
        )
        entry = {
            "profiling_name": f"nccl:{name}",
            "process_group": (group, "default_pg"),
            "collective_seq_id": counts[group],
        }
        entries.append({**entry, **sizes, **dtypes, "frames": frames, "is_p2p": False, "state": "completed"})
    groups = {"0": "[0, 1, 2, 3]", "1": "[0, 1]"}
    config = {
        name: {"name": name, "desc": "default_pg", "ranks": ranks}
        for name, ranks in groups.items()
        if counts["1"] or name == "0"
    }
    return {"version": "2.10", "pg_config": config, "entries": entries}


def written(folder: Path, ranks: str) -> Path:
    """A folder with a dump of each rank, whose calls are letters; a rank that is "-" wrote none."""
    for rank, calls in enumerate(ranks.split()):
        if calls != "-":
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(calls.strip("."))))
    return folder


STEP, BARRIER = "all_reduce {}, train.py:88 in train()", "barrier {}, evaluate.py:20 in evaluate()"
CASES = {
    "one rank is behind": (
        "ssb ssb ssb ss",
        f"ranks 0-2 called {BARRIER.format(3)}; rank 3 did not: its last there is {STEP.format(2)}",
    ),
    "some went on without waiting": (
        "sssss ssss sssss ss",
        f"ranks 0-2 called {STEP.format(3)}; rank 3 did not: its last there is {STEP.format(2)}",
    ),
    "one rank skipped a collective": (
        "sbss sbss sbss sss",
        f"ranks 0-2 called {BARRIER.format(2)}; rank 3 called {STEP.format(2)}: rank 3 skipped {BARRIER.format(2)}",
    ),
    "the one that it skipped looks as the others": (
        "smss smss smss sss",
        f"ranks 0-2 called {STEP.format(4)}; rank 3 did not: its last there is {STEP.format(3)}: rank 3 skipped all_reduce 2, "
        "evaluate.py:31 in evaluate()",
    ),
    "rank 0 alone has a barrier": (
        "sbss sss sss sss",
        f"ranks 1-3 called {STEP.format(2)}; rank 0 called {BARRIER.format(2)}: rank 0 called it in addition",
    ),
    "another order": (
        "sbg sgb sbg sbg",
        f"ranks 0, 2, 3 called {BARRIER.format(2)}; rank 1 called all_gather 2, evaluate.py:40 in gather(): rank 1 called the two in "
        "another order",
    ),
    "another shape": (
        "ss sl ss ss",
        f"ranks 0, 2, 3 called {STEP.format(2)}; rank 1 called {STEP.format(2)}: with other shapes, [4, 5] -> [4, 5] and "
        "[3, 5] -> [3, 5]",
    ),
    "another type": (
        "ss ss ss sh",
        f"ranks 0-2 called {STEP.format(2)}; rank 3 called {STEP.format(2)}: with other types, Float and BFloat16",
    ),
    "one rank called none": ("b b b .", f"ranks 0-2 called {BARRIER.format(1)}; rank 3 called none"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rank_that_differs_is_named(tmp_path: Path, case: str) -> None:
    ranks, expected = CASES[case]
    first, second = report(gathered(written(tmp_path, ranks)))
    assert (first, second) == ("read dumps of ranks 0-3", f"group 0: {expected}")


def test_a_rank_without_a_dump_is_named(tmp_path: Path) -> None:
    _, line = report(gathered(written(tmp_path, "sb sb - sb")))
    assert line.startswith("rank 2 wrote no dump: dead, stopped or cut off")


def test_equal_ranks_point_to_the_link(tmp_path: Path) -> None:
    _, line, advice = report(gathered(written(tmp_path, "ss ss ss ss")))
    assert line.startswith(f"all ranks called the same collectives, up to {STEP.format(2)}: no rank is behind")
    assert "link" in advice


def test_a_group_in_which_a_rank_waits_explains_another(tmp_path: Path) -> None:
    """Rank 1 waits for rank 0 in group 1, and so ranks 2 and 3 wait for it in the group of all."""
    _, first, second = report(gathered(written(tmp_path, "s si ss ss")))
    assert first == "group 1: rank 1 called broadcast 1, parts.py:7 in exchange(); rank 0 called none"
    assert second.startswith("group 0: ranks 2, 3 called all_reduce 2") and "rank 1 did not" in second


FAULTHANDLER = """The Python stacks of rank 3 (pid 7), the latest call first:
Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007e (most recent call first):
  File "/venv/lib/python3.11/site-packages/PIL/Image.py", line 12 in open
  File "/home/me/data.py", line 33 in load
  File "/home/me/train.py", line 90 in <module>
"""
PY_SPY = """Process 41: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 41 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3906)
    evaluate (evaluate.py:20)
    <module> (train.py:90)
Thread 55 (idle): "Thread-1"
    wait (threading.py:331)
    _bootstrap (threading.py:1002)
"""


def test_stacks_say_where_the_ranks_are(tmp_path: Path) -> None:
    """One rank is in code of its own, while the others wait in a collective: with the dumps, and without."""
    for rank, text in enumerate([PY_SPY, PY_SPY, PY_SPY, FAULTHANDLER]):
        (tmp_path / f"rank{rank}.log").write_text(text)
    places = [
        "rank 3 now at data.py:33 in load()",
        "ranks 0-2 now at evaluate.py:20 in evaluate(), which waits in all_reduce",
    ]
    assert list(report(gathered(tmp_path)))[1:] == places
    assert list(report(gathered(written(tmp_path, "ssb ssb ssb ss"))))[2:] == places


def test_the_number_after_rank_is_the_rank(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"rank{rank}_node{rank // 2}.txt").write_text(FAULTHANDLER)
    assert list(report(gathered(tmp_path)))[1:] == ["ranks 0-3 now at data.py:33 in load()"]


def test_a_file_alone_is_told_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "stack_3.txt").write_text(FAULTHANDLER)
    assert list(report(gathered(tmp_path)))[1:] == ["rank 3 now at data.py:33 in load()"]


@pytest.mark.parametrize("protocol", range(6))
def test_a_forged_dump_executes_nothing(tmp_path: Path, protocol: int, user_error: UserError) -> None:
    folder, target = tmp_path / "dumps", tmp_path / "made"
    folder.mkdir()
    forged = pickle.dumps({**dump("s"), "forged": Malicious(target)}, protocol=protocol)
    (folder / "rank0").write_bytes(forged)
    line = user_error(explain.main, "--dumps", str(folder))
    assert f"no dump and no stacks in it; {folder}/rank0: no whole dump" in line
    assert not target.exists()
    pickle.loads(forged)
    assert target.exists()  # so the forgery works


WHOLE = pickle.dumps(dump("sb"))


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"{", b"[]", b'{"entries": 7}', b"\x00" * 100, pickle.dumps([1]), WHOLE[:-9]]
)
def test_what_is_no_dump_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path, "ss ss ss ss") / "nccl_trace_rank_3"
    path.write_bytes(content)
    _, left_out, missing = report(gathered(tmp_path))
    assert left_out.startswith(f"left out {path}: no whole dump (") and "\n" not in left_out
    assert missing.startswith("rank 3 wrote no dump")


def test_only_the_last_attempt_counts(tmp_path: Path) -> None:
    for attempt, ranks in (("1", "b ."), ("2", "s s s s")):
        (tmp_path / attempt).mkdir()
        for path in written(tmp_path / attempt, ranks).iterdir():
            os.utime(path, (int(attempt), int(attempt)))
    assert "no rank is behind" in list(report(gathered(tmp_path)))[1]


def test_folders_of_nodes_belong_together(tmp_path: Path) -> None:
    """Each node has a folder of its own ranks. A file whose name has a year is of no rank."""
    dumps = written(tmp_path, "ssb ssb ssb ss")
    for rank in range(4):
        (tmp_path / f"node{rank // 2}").mkdir(exist_ok=True)
        (dumps / f"nccl_trace_rank_{rank}").rename(tmp_path / f"node{rank // 2}/nccl_trace_rank_{rank}")
    (tmp_path / "metrics_2026.json").write_text("{}")
    first, second = report(gathered(tmp_path))
    assert first == "read dumps of ranks 0-3"
    assert second.startswith("group 0: ranks 0-2 called") and "rank 3 did not" in second


def test_a_call_that_all_have_enqueued_hangs(tmp_path: Path) -> None:
    """NCCL's calls return before they are done, so that a rank may have enqueued more than another behind the one that hangs."""
    written(tmp_path, "sssss sssss sssss ssss")
    for path in tmp_path.iterdir():
        changed = pickle.loads(path.read_bytes())
        for number, entry in enumerate(changed["entries"], 1):
            entry["state"] = "completed" if number < 3 else "scheduled"
        path.write_bytes(pickle.dumps(changed))
    _, line, _ = report(gathered(tmp_path))
    assert line.startswith(f"all ranks called the same collectives, up to {STEP.format(3)}: no rank is behind")


def test_dumps_that_have_only_the_latest_calls(tmp_path: Path) -> None:
    """A rank that is far behind has none of the calls that the others still have."""
    written(tmp_path, "s" * 40 + 3 * (" " + "s" * 9))
    ahead = dump("s" * 40)
    ahead["entries"] = ahead["entries"][20:]
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(ahead))
    _, line = report(gathered(tmp_path))
    assert line.startswith(
        f"group 0: rank 0 called {STEP.format(21)}; rank 1 did not: its last there is {STEP.format(9)}"
    )


def test_dumps_without_collectives(tmp_path: Path) -> None:
    _, line = report(gathered(written(tmp_path, ". . . .")))
    assert line == "no collectives in the dumps; send and recv are not compared"


def test_the_command_answers_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')")
    written(tmp_path, "ssb ssb ssb ss")
    done = run_command("ddp.launch.doctor", "--dumps", str(tmp_path), env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"})
    assert (done.returncode, done.stderr, done.stdout.splitlines()) == (0, "", list(report(gathered(tmp_path))))


def evaluate() -> None:
    dist.barrier()


def skip_a_barrier(folder: Path) -> None:
    """Rank 2 leaves out the barrier. Each rank leaves a dump in both forms, and its stack."""
    with contextlib.suppress(RuntimeError), process_group("cpu", timeout_s=3) as env:
        dist.all_reduce(torch.ones(4))
        if env.rank == 2:
            time.sleep(4)
        else:
            with contextlib.suppress(RuntimeError):
                evaluate()
        write_collectives(folder / "pickled", env.rank, env.device)
        (folder / "json").mkdir(exist_ok=True)
        dumped = torch._C._distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined, unused-ignore]
        (folder / "json" / f"rank{env.rank}.json").write_bytes(dumped)
        with (folder / "pickled" / f"rank{env.rank}.log").open("w") as log:
            faulthandler.dump_traceback(log)
        time.sleep(2)


@pytest.mark.examples
def test_dumps_of_a_real_job(tmp_path: Path) -> None:
    run_ranks(skip_a_barrier, 3, tmp_path, fresh=True)
    for form in ("pickled", "json"):
        verdict = list(report(gathered(tmp_path / form)))[1]
        assert "ranks 0, 1 called barrier" in verdict and "rank 2 did not: its last there is all_reduce" in verdict
        assert ("test_dumps.py" in verdict) == (form == "pickled")  # torch's JSON has no lines of Python
    assert sorted(gathered(tmp_path / "pickled").stacks) == [0, 1, 2]
