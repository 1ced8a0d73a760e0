"""Exit codes and signals: what ended a process, and who usually does that."""

from __future__ import annotations

import re
import signal

KILLERS = {
    "SIGKILL": "something outside the program killed it: most often the kernel, because memory ran out (`dmesg | grep -i kill`), "
    "or the scheduler (`sacct -j JOB --format=State,MaxRSS`), or a person",
    "SIGSEGV": "it read or wrote memory that is not its own: a fault in a library or an extension, "
    "or libraries of different versions; PYTHONFAULTHANDLER=1 prints the line of Python",
    "SIGABRT": "C or C++ code gave up: a failed assertion, an uncaught C++ exception, damaged memory, or NCCL's watchdog; "
    "its message stands above, and PYTHONFAULTHANDLER=1 prints the line of Python",
    "SIGBUS": "a page of a mapped file is missing: /dev/shm is full (in a container, give --shm-size), or a file was cut while it was read",
    "SIGTERM": "something asked it to end: a scheduler at the end of the job's time or at a preemption, or a person",
    "SIGINT": "somebody pressed Ctrl-C, or sent that signal",
    "SIGHUP": "the terminal was closed: start the job in tmux, or with setsid",
    "SIGFPE": "an integer was divided by zero in C or C++ code",
    "SIGILL": "the processor does not know an instruction: a library was built for a newer one",
    "SIGXFSZ": "a file grew over the limit of `ulimit -f`",
    "SIGXCPU": "it used more processor time than `ulimit -t` allows",
    "SIGUSR1": "a scheduler's warning came (SLURM's --signal), and nothing handled it",
}
CODES = {
    0: "it ended without an error",
    1: "an exception that nobody caught, or sys.exit(1)",
    2: "wrong arguments, or a file that Python could not start",
    126: "the command is not executable",
    127: "the command was not found",
}
SHELL_WORDS = {
    "segmentation fault": signal.SIGSEGV,
    "bus error": signal.SIGBUS,
    "aborted": signal.SIGABRT,
    "killed": signal.SIGKILL,
    "terminated": signal.SIGTERM,
    "out of memory": signal.SIGKILL,
    **{one.name.lower(): one for one in signal.Signals},
}


def signal_of(code: int) -> str:
    """The name of the signal behind an exit code: -9 and, from a shell or a container, 137; or nothing."""
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name if number > 0 else ""
    except ValueError:
        return ""


def described(code: int) -> str:
    """``exit code -9, SIGKILL: ...``"""
    name = signal_of(code)
    if name:
        return f"exit code {code}, {name}: {KILLERS.get(name, 'a signal ended it')}"
    return f"exit code {code}: {CODES.get(code, 'the program chose it, or sys.exit was called with it')}"


def code_of(words: str) -> int | None:
    """The exit code that a line of srun, a shell or DeepSpeed tells."""
    if found := re.search(r"(?:exit|return) code (?:= )?(-?\d+)", words, re.I):
        return int(found[1])
    return next((-number for word, number in SHELL_WORDS.items() if word in words.lower()), None)
