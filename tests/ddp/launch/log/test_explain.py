"""``doctor --explain LOG``: what it reads, how it says it, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from ddp.launch.log import explain
from ddp.launch.log.evidence import gathered
from ddp.launch.log.exit_codes import described
from ddp.launch.log.judge import judge
from ddp.launch.log.lines import files_of, read
from ddp.launch.log.verdict import Verdict
from tests.support.launch import REPOSITORY, run_command
from tests.support.user_errors import UserError

FAILED = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 30, in <module>
    main()
  File "/home/me/data.py", line 8, in load
    return Image.open(path)
  File "/home/me/venv/lib/python3.11/site-packages/PIL/Image.py", line 3000, in open
    fp = builtins.open(filename, "rb")
FileNotFoundError: [Errno 2] No such file or directory: '7.jpg'
"""
CLOSED = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 31, in <module>
    dist.barrier()
RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4000
"""


def verdict_of(path: Path, text: str) -> Verdict:
    path.write_text(text)
    verdict = judge(gathered([path]))
    assert verdict is not None
    return verdict


def prefixed(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


PREFIXES = (
    "[rank1]: ",
    "[default1]:",
    "1: ",
    "[1,1]<stderr>:",
    "[rank: 1] ",
    "[pod/job-0/train] [rank1]:",
    "gpu-worker-0: [rank1]: ",
    "2026-11-28T10:00:00.123Z [rank1]:",
    "\x1b[31m[rank1]:\x1b[0m ",
)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_tells_the_rank(prefix: str, tmp_path: Path) -> None:
    """The last line of the user's own code is named, whatever launcher has written the log."""
    log = prefixed(prefix.replace("1:", "0:", 1) if prefix == "1: " else "[rank0]: ", CLOSED) + prefixed(prefix, FAILED)
    verdict = verdict_of(tmp_path / "log", log)
    assert (verdict.ranks, verdict.certain) == ((1,), True)
    assert str(verdict.place) == "/home/me/data.py:8 in load"
    assert verdict.cause.startswith("FileNotFoundError")


def test_tracebacks_of_two_ranks_are_kept_apart(tmp_path: Path) -> None:
    one, other = (prefixed(f"[rank{rank}]: ", text).splitlines() for rank, text in enumerate((FAILED, CLOSED * 2)))
    verdict = verdict_of(tmp_path / "log", "\n".join(line for pair in zip(one, other, strict=True) for line in pair))
    assert (verdict.ranks, str(verdict.place)) == ((0,), "/home/me/data.py:8 in load")


def test_a_folder_has_a_file_per_rank(tmp_path: Path) -> None:
    """Ranks are told by the number in which the names differ; an error file of @record is read, too."""
    for rank in range(2):
        folder = tmp_path / f"none_x1/attempt_0/{rank}"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(CLOSED if rank else "ready\n")
    failure = {"message": {"message": "x", "extraInfo": {"py_callstack": FAILED, "timestamp": "1"}}}
    (tmp_path / "none_x1/attempt_0/0/error.json").write_text(json.dumps(failure))
    verdict = judge(gathered([tmp_path]))
    assert verdict is not None and verdict.ranks == (0,)
    slurm = [tmp_path / f"slurm-77-{task}.out" for task in range(3)]
    for file in slurm:
        file.write_text("ready\n")
    assert files_of(slurm) == dict(zip(slurm, range(3), strict=True))


def test_signals_and_codes_are_decoded() -> None:
    assert described(-9).startswith(
        "exit code -9, SIGKILL: something outside the program killed it: most often the kernel"
    )
    assert described(137).startswith("exit code 137, SIGKILL:")
    assert "/dev/shm" in described(-7) and "PYTHONFAULTHANDLER" in described(-11) and "Ctrl-C" in described(130)
    assert described(1) == "exit code 1: an exception that nobody caught, or sys.exit(1)"


def test_memory_that_ran_out_is_certain_if_the_kernel_says_so(tmp_path: Path) -> None:
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\nsrun: error: n1: task 3: Out Of Memory\n"
    verdict = verdict_of(tmp_path / "log", killed)
    assert (verdict.ranks, verdict.certain, verdict.cause) == ((3,), True, "exit code -9, SIGKILL: memory ran out")


@pytest.mark.parametrize(
    ("log", "certain", "cause"),
    [
        ("run.sh: line 28:  8156 Killed      python train.py\nDetected 1 oom-kill event(s)\n", True, "memory ran out"),
        ("Last State: Terminated\n  Reason: OOMKilled\n  Exit Code: 137\n", True, "memory ran out"),
        ("Memory cgroup out of memory: Killed process 4242 (python)\n", True, "memory ran out"),
        ("[ERROR] [launch.py:434:sigkill_handler] ['python'] exits with return code = -9\n", False, "exit code -9"),
        ("run.sh: line 4: 23 Aborted      (core dumped) python train.py\n", False, "exit code -6"),
        (
            "slurmstepd: error: *** STEP 6.0 ON n1 CANCELLED AT 2024-04-23T12:18:08 ***\nsrun: error: n1: task 0: Terminated\n",
            False,
            "the step was cancelled: by scancel, or by srun",
        ),
    ],
)
def test_words_of_shells_and_schedulers(log: str, certain: bool, cause: str, tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path / "log", log)
    assert (verdict.ranks, verdict.certain) == ((), certain)
    assert verdict.cause.startswith(cause)


SPAWNED = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 178, in <module>
    mp.spawn(main, nprocs=2)
  File "/venv/lib/python3.9/site-packages/torch/multiprocessing/spawn.py", line 158, in join
    raise ProcessRaisedException(msg, error_index, failed_process.pid)
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 1 terminated with the following error:
"""


def test_spawn_only_sums_up(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path / "log", SPAWNED + FAILED)
    assert (verdict.ranks, verdict.certain) == ((1,), True)
    assert verdict.cause.startswith("FileNotFoundError")


def test_the_exception_that_was_handled_is_told(tmp_path: Path) -> None:
    second = "\nDuring handling of the above exception, another exception occurred:\n\n" + FAILED.replace(
        "FileNotFoundError", "AttributeError"
    )
    verdict = verdict_of(tmp_path / "log", FAILED + second)
    assert verdict.cause.startswith("AttributeError")
    assert verdict.notes[0].startswith("raised while FileNotFoundError")


REPORT = """\
E0726 10:59:51 1 torch/distributed/elastic/multiprocessing/api.py:826] failed (exitcode: 1) local_rank: 2 (pid: 21) of binary: python
Root Cause (first observed failure):
[0]:
  rank      : 10 (local_rank: 2)
  exitcode  : 1 (pid: 21)
=====
srun: error: n2: task 1: Exited with exit code 1
"""


def test_local_ranks_and_tasks_are_no_ranks(tmp_path: Path) -> None:
    """On several nodes, torchrun's report alone has the rank."""
    assert verdict_of(tmp_path / "log", FAILED + REPORT).ranks == (10,)


def test_only_the_last_start_counts(tmp_path: Path) -> None:
    """torchrun has a folder for each start of the ranks."""
    for attempt, kind in enumerate(("ValueError", "KeyError")):
        folder = tmp_path / f"none_x/attempt_{attempt}/0"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(FAILED.replace("FileNotFoundError", kind))
    verdict = judge(gathered([tmp_path]))
    assert verdict is not None and verdict.cause.startswith("KeyError")


def test_numbers_of_steps_are_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"{step}: loss 0.3\n" for step in range(20)) + prefixed(" 7: ", FAILED))
    assert gathered([tmp_path / "log"]).ranks == {7}


def test_the_command_reads_a_log_without_torch(tmp_path: Path) -> None:
    """``--explain FILE`` prints the verdict, its consequences and the entry of symptoms.md, with status 0; it never imports torch."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "job.out").write_text(
        prefixed(
            "[rank1]: ", FAILED.replace("[Errno 2] No such file or directory: '7.jpg'", "received 0 items of ancdata")
        )
        + prefixed("[rank0]: ", CLOSED)
    )
    done = run_command(
        "ddp.launch.doctor", "--explain", str(tmp_path / "job.out"), env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "read 12 lines of 1 file, ranks 0, 1"
    assert lines[1] == "first failure: rank 1: FileNotFoundError: received 0 items of ancdata"
    assert lines[3] == "only consequences:" and lines[4].endswith("the rank at the other end had gone")
    assert "received 0 items of ancdata" in lines[7]


def test_standard_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddp.launch.doctor", "--explain", "-"]
    done = subprocess.run(command, input=FAILED, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "FileNotFoundError" in done.stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty"), (b"\x80\0\1" * 99, "is binary"), (zlib.compress(bytes(10**6)), "is binary")],
)
def test_what_is_no_log_is_one_line(content: bytes, said: str, user_error: UserError, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(content)
    line = user_error(explain.main, "--explain", tmp_path / "log")
    assert said in line and f"{len(content)} bytes were read" in line


def test_a_log_that_is_not_there_is_one_line(user_error: UserError) -> None:
    for paths in (["runs/no-such.log"], [__file__, "runs/no-such.log"]):
        line = user_error(explain.main, "--explain", *paths)
        assert line == "error: --explain runs/no-such.log: there is no such file"


def test_a_text_without_a_failure(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("epoch 1: loss 0.3\n" * 5)
    evidence = gathered([tmp_path / "log"])
    assert judge(evidence) is None
    assert (
        explain.report(evidence, None)
        == "read 5 lines of 1 file: no error, exit code or watchdog's line of a training job is in it"
    )


def test_an_error_that_was_handled_is_not_certain(tmp_path: Path) -> None:
    """Neither one with many lines after it, nor one in a job that the scheduler ended."""
    assert not verdict_of(tmp_path / "log", FAILED + "epoch 1: loss 0.3\n" * 200).certain
    limit = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-28T10:00:00 DUE TO TIME LIMIT ***\n"
    assert not verdict_of(tmp_path / "log", FAILED + limit).certain
    for before in ("", FAILED + "epoch 1: loss 0.3\n" * 200):
        assert verdict_of(tmp_path / "log", before + limit).cause == "the scheduler ended the job: due to time limit"


def test_repeated_tracebacks_are_kept_once(tmp_path: Path) -> None:
    """Tracebacks that come again, and a line without an end, are kept once."""
    (tmp_path / "log").write_text(prefixed("[rank1]: ", FAILED) * 300 + "x" * 300_000)
    evidence = gathered([tmp_path / "log"])
    assert len(evidence.errors) == 1
    assert max(len(line.text) for line in read(tmp_path / "log", None)) <= 65536
