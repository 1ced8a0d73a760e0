"""A user error is one line: printed once per node and not once per rank, and after torchrun's report of the failure.

Every rank of a job may meet the same error. Which one prints it? If all have met it together, the node's first rank. Otherwise
the first one that says so in the store of torchrun's agent, or without such a store, the node's first rank again. The others
wait a moment: torchrun ends all ranks when one has ended, and must not end the one that still closes its files.

When a rank has failed, torchrun ends the others and prints some thirty lines, below which ours would be lost. So a small
process waits for torchrun's end, and prints the line then.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import subprocess
import sys
import time

from common.errors import UsageError, one_line

# Seconds that a rank waits for its node's first rank to print the error. Its imports may take a while longer.
WAIT_FOR_LOCAL_RANK_ZERO_S = 4.0
WAIT_IF_PRINTED_S = 2.0
STORE_S = 2.0
REPORT_S = 45.0  # torchrun gives the other ranks 30 s to end before it reports

# Waits for the process with that number to end, even if its parent has not waited for it (unlike `kill -0`), then prints.
PRINT_AFTER = """
import os, select, sys
try:
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [], float(sys.argv[2]))
except OSError:
    pass
os.write(2, os.fsencode(sys.argv[3]) + b"\\n")
"""


def print_error(error: UsageError) -> None:
    """Print the error, if this rank is the one to do so; returns when this process may end."""
    message = one_line(str(error))
    local_rank = os.environ.get("LOCAL_RANK", "0")
    first = local_rank == "0" or not local_rank.isdecimal()
    claimed = None
    if not error.seen_by_all:  # or else the node's first rank does it, when it has closed what it had open
        claimed = _is_first_to_print(error.about or message)
        first = first if claimed is None else claimed
    if first:
        _print(f"error: {message}")
    elif error.seen_by_all or claimed is not None:
        time.sleep(WAIT_IF_PRINTED_S)
    else:
        time.sleep(WAIT_FOR_LOCAL_RANK_ZERO_S)  # torchrun or the scheduler ends this one, if the first has met it too
        _print(f"error: [rank {os.environ.get('RANK')}] {message}")


def _is_first_to_print(about: str) -> bool | None:
    """Whether this rank is the first of its node with a message about this; None if there is no store to ask."""
    torch = sys.modules.get("torch")
    if torch is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    start = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{os.environ.get('GROUP_RANK')}"
    key = f"user-error/{start}/{hashlib.sha256(about.encode()).hexdigest()}"
    from common.native_stderr import frames_to_log

    try:
        with frames_to_log():
            store = torch.distributed.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=datetime.timedelta(seconds=STORE_S),
            )
            return bool(store.add(key, 1) == 1)
    except (KeyError, ValueError, RuntimeError):
        return None


def _print(line: str) -> None:
    agent = _agent_that_will_report()
    if agent is None:
        print(line, file=sys.stderr, flush=True)
        return
    sys.stderr.flush()
    command = [sys.executable, "-I", "-S", "-c", PRINT_AFTER, str(agent), str(REPORT_S), line]
    needed = {
        name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"
    }  # it is no rank of the job
    # A session of its own, since torchrun ends the session of each rank.
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=needed, start_new_session=True)


def _agent_that_will_report() -> int | None:
    """The process of torchrun's agent, if it is about to end and reports on the same stderr."""
    restarts, most = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if not (restarts.isdecimal() and most.isdecimal() and int(restarts) >= int(most)):
        return None
    try:
        ours, its = os.fstat(2), os.stat(f"/proc/{os.getppid()}/fd/2")
    except OSError:
        return None
    return os.getppid() if os.path.samestat(ours, its) else None
