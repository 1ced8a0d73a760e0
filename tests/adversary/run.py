"""Run an attempt: its command in processes that are forked with torch imported, watched from outside."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import re
import shlex
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from common.launchers import TORCHRUN_VARIABLES
from common.signals import early_signals
from dataloading.dataset.decoders import installed
from ddp.rendezvous.worker_group import rendezvous
from tests.adversary.attempt import Attempt, Outcome
from tests.adversary.scenes import finished_copy, photos
from tests.support.commands import load_command
from tests.support.gpus import NO_GPUS
from tests.support.harm.disk import NEED_MOUNTS, can_mount
from tests.support.ranks import FORK_SERVER, kill_tree

POLL_S = 0.02
LIMIT_S = 120.0  # for an attempt
MOST_HASHED = 1 << 30  # bytes of a file whose content is compared


def run(attempt: Attempt) -> Outcome:
    """Run an attempt in a fresh folder, which is removed afterwards; nothing that it starts outlives it."""
    with tempfile.TemporaryDirectory(prefix="attempt-") as name, contextlib.ExitStack() as stack:
        here = Path(name, "here")
        here.mkdir()
        names: dict[str, str] = {"here": str(here)}
        if "{run}" in attempt.command:
            names["run"] = str(finished_copy(here))
        if "{faces}" in attempt.command:
            names["faces"] = str(photos())
        if attempt.scene is not None:
            names |= stack.enter_context(attempt.scene(here))
        before = files_below(here)
        environments = stack.enter_context(rendezvous(len(attempt.ranks))) if attempt.ranks else [{}]
        processes = []
        for rank, environment in enumerate(environments):
            typed = " ".join((attempt.command, *attempt.ranks[rank : rank + 1]))
            words = [_filled(word, names) for word in shlex.split(typed)]
            env = {**environment, **attempt.env, **attempt.rank_env.get(rank, {})}
            env = {key: _filled(value, names) for key, value in env.items()}
            streams = (Path(name, f"stdout{rank}"), Path(name, f"stderr{rank}"), Path(name, f"bytes{rank}"))
            processes.append(_start(words, env, here, attempt.stdout, streams))
        seconds, left = _watch(attempt, processes, Path(name))
        out, err = (
            "".join(path.read_text(errors="replace") for path in sorted(Path(name).glob(f"{kind}?")))
            for kind in ("stdout", "stderr")
        )
        after = files_below(here)
        return Outcome(
            statuses=tuple(process.exitcode if process.pid not in left else None for process in processes),
            stdout=out,
            stderr=err,
            seconds=seconds,
            bytes=max((int(path.read_text() or 0) for path in Path(name).glob("bytes?")), default=0),
            changed=tuple(file for file in before if after.get(file) != before[file]),
            made=tuple(file for file in after if file not in before),
            left=tuple(str(pid) for pid in left),
        )


def _start(
    words: list[str], env: Mapping[str, str], here: Path, stdout: str, streams: tuple[Path, Path, Path]
) -> ForkServerProcess:
    """Start ``python -m WORDS`` in a process that is forked with torch imported.

    :param stdout: as :attr:`Attempt.stdout`
    :param streams: files for its stdout, its stderr, and the bytes of memory that it takes beyond its imports
    """
    process = FORK_SERVER.Process(target=_become, args=(words, dict(env), str(here), stdout, streams))
    process.start()
    return process


def is_missing(attempt: Attempt) -> str | None:
    """Name what this machine lacks for an attempt, or None."""
    words = attempt.command.split()
    if any(limit in words for limit in NEED_MOUNTS) and not can_mount():
        return "no mount namespace can be made here"
    decoder = words[words.index("--decoder") + 1] if "--decoder" in words else "pillow"
    if decoder == "simplejpeg" and decoder not in installed():
        return f"the extra {decoder} is not installed"
    return None


def _filled(word: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], match[0]), word)


def _watch(attempt: Attempt, processes: list[ForkServerProcess], folder: Path) -> tuple[float, set[int]]:
    """Wait for the end; how long that took, and which processes did not end in time. Those are killed."""
    began, signals = time.monotonic(), list(attempt.signals)
    below: set[psutil.Process] = set()
    while any(process.is_alive() for process in processes) and time.monotonic() - began < LIMIT_S:
        time.sleep(POLL_S)
        if signals and re.search(attempt.at, _written(folder)):
            number = signals.pop(0)
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid or 0, number)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                below.update(psutil.Process(process.pid).children(recursive=True))
    seconds = time.monotonic() - began
    left = {process.pid or 0 for process in processes if process.is_alive()}
    _, alive = psutil.wait_procs(below, timeout=0 if left else 10)
    left |= {process.pid for process in alive if not left}
    for process in processes:
        kill_tree(process.pid or 0)
        process.join()
    for child in alive:
        kill_tree(child.pid)
    return seconds, left


def _written(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.glob("std*"))


def _become(words: list[str], env: dict[str, str], here: str, stdout: str, streams: tuple[Path, Path, Path]) -> None:
    """In the forked process: what ``python -m WORDS`` does."""
    sys.orig_argv = [sys.executable, "-m", *words]
    early_signals.handle_signals("ddp.train")  # before there is any of the files
    multiprocessing.set_start_method("fork", force=True)  # as on a command line, for loader workers
    for name in TORCHRUN_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(NO_GPUS | env)
    tempfile.tempdir = None  # torch._dynamo has asked for it before the fork
    os.chdir(here)
    out, err, memory = streams
    sys.stdout.flush()
    os.dup2(_stdout(stdout, out), 1)
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if stdout == "closed":
        os.close(1)
        sys.stdout = None
    else:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    main = load_command(*words)
    before = _peak_bytes()
    try:
        main()
    finally:
        memory.write_text(str(_peak_bytes() - before))


def _stdout(kind: str, path: Path) -> int:
    if kind == "gone":
        reader, writer = os.pipe()
        os.close(reader)
        return writer
    return os.open("/dev/full" if kind == "full" else path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _peak_bytes() -> int:
    """The most memory that this process has held so far."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def files_below(folder: Path) -> dict[str, str]:
    """All that is below a folder: its kind and content, or where a link leads."""
    contents = {}
    for path in _below(folder):
        mode = path.lstat().st_mode
        name = os.fsencode(path.relative_to(folder)).decode(errors="replace")
        if stat.S_ISLNK(mode):
            contents[name] = f"link to {os.readlink(path)}"
        elif stat.S_ISREG(mode):
            size = path.stat().st_size  # A file of gigabytes is one that the scene made, without content.
            contents[name] = f"{size} bytes" if size > MOST_HASHED else hashlib.sha256(path.read_bytes()).hexdigest()
        elif not stat.S_ISDIR(mode):
            contents[name] = "special"
    return contents


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(root, name)
