"""How a foreign script starts its ranks, and which devices it finds."""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.errors import UsageError
from common.foreign_script.run import LOCAL_RANK_VARIABLE, Outcome, run
from common.signals import early_signals
from common.signals.stop_request import stop_signals

AGENTS = Path(__file__).parent / "agents.py"
STAND_IN = Path(__file__).parent / "stand_in" / "__init__.py"
DEVICES = ("auto", "cpu", "gpu")
STARTS = ("auto", "torchrun", "python")
STARTS_ITSELF = re.compile(
    r"(?:mp|multiprocessing)\.spawn\(|start_processes\(|notebook_launcher\(|Popen\(\s*\[\s*(?:str\()?sys\.executable"
)
OF_TORCHRUN = ("LOCAL_RANK", "local_rank", "local-rank", "init_process_group(", "init_device_mesh(")
LOCAL_RANK_FLAGS = ("--local_rank", "--local-rank")  # by which torch.distributed.launch told a script its local rank

WANTS_TORCHRUN = re.compile(r"environment variable \w+ expected, but not set")  # torch/distributed/rendezvous.py


def starts_itself(arguments: Sequence[str]) -> bool:
    """Whether a script starts its own ranks, in its own file or in a module beside it."""
    text = _own_code(arguments)
    by_processes = "Process(" in text and "init_process_group" in text and "LOCAL_RANK" not in text
    return by_processes or STARTS_ITSELF.search(text) is not None


def wants_torchrun(arguments: Sequence[str]) -> bool:
    """Whether a script expects to be started by torchrun, also on one rank."""
    text = _own_code(arguments)
    return any(word in text for word in OF_TORCHRUN) and not starts_itself(arguments)


def require_script(script: Sequence[str], command: str) -> None:
    """:raises UsageError: without a script that can be run, or within a rank of torchrun; it names ``python -m COMMAND``"""
    if not script or script == ["-m"]:
        raise UsageError(f"which script? python -m {command} -- train.py ARGUMENTS")
    if "RANK" in os.environ:
        raise UsageError(f"this runs under torchrun already (RANK is set): {command} starts the script's ranks itself")
    if script[0] != "-m" and not Path(script[0]).is_file():
        raise UsageError(f"{script[0]}: there is no such script")


def _own_code(arguments: Sequence[str]) -> str:
    """The text of a script or a module, and of the modules that it imports from its folder, or from the working directory."""
    main = Path(arguments[0]).absolute()
    folder = main.parent
    if arguments[0] == "-m":
        module = folder.joinpath(*arguments[1].split("."))
        main = module.with_suffix(".py") if module.with_suffix(".py").is_file() else module / "__main__.py"
    todo, texts = [main], dict[Path, str]()
    while todo:
        path = todo.pop()
        if path in texts:
            continue
        texts[path] = ""
        with contextlib.suppress(OSError, UnicodeDecodeError, SyntaxError):
            texts[path] = path.read_text()
            for node in ast.walk(ast.parse(texts[path])):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    level = getattr(node, "level", 0)  # the dots before its name
                    within = (getattr(node, "module", None) or "").split(".")
                    roots = [path.parents[level - 1]] if level else [folder, Path.cwd()]
                    for root, name in itertools.product(roots, ["", *(alias.name for alias in node.names)]):
                        module = root.joinpath(*within, *name.split("."))
                        todo += [module.parent / f"{module.name}.py", module / "__init__.py"]
    return "\n".join(texts.values())


def device_for(device: str, ranks: int) -> str:
    """One of ``"cpu"``, ``"gpu"`` and ``"stand-in"``, for a value of ``--device``."""
    # Without torch, whose import takes as long as a small script.
    lacks_gpus = len(list(Path("/dev").glob("nvidia[0-9]*"))) < ranks
    return {"auto": "stand-in" if lacks_gpus else "gpu"}.get(device, device)


def environment_for(
    device: str, ranks: int, arguments: Sequence[str], sync_batchnorm: Path | None = None
) -> dict[str, str]:
    """The environment variables of a script's processes.

    :param device: ``"cpu"``, ``"gpu"`` or ``"stand-in"``
    :param sync_batchnorm: a file with a ``SyncBatchNorm`` that works on the CPU, for the stand-in; one rank needs none
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as torchrun sets it, which then does not warn of it
    if device != "gpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if device == "stand-in":
        environment["STAND_IN_GPUS"] = str(ranks)
    if device == "stand-in" and sync_batchnorm:
        environment["STAND_IN_SYNC_BATCHNORM"] = os.fspath(sync_batchnorm)
    own, name = _own_code(arguments), arguments[1] if arguments[0] == "-m" else arguments[0]
    for flag in LOCAL_RANK_FLAGS:
        if re.search(rf"\(\s*['\"]{flag}['\"]", own):  # the first argument of a call, such as add_argument
            environment[LOCAL_RANK_VARIABLE] = f"{flag}{os.pathsep}{name}"
    return environment


def command(arguments: Sequence[str], ranks: int, start: str, nodes: int = 1) -> list[str]:
    """The arguments of Python that start a script's ranks.

    :param nodes: agents of torchrun, each with its part of the ranks
    """
    if nodes > 1:
        return [os.fspath(AGENTS), str(nodes), str(ranks // nodes), *arguments]
    if start == "python" or (start == "auto" and starts_itself(arguments)):
        return list(arguments)
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *arguments]


def run_ranks(
    arguments: Sequence[str],
    ranks: int,
    start: str,
    environment: Mapping[str, str],
    timeout: float,
    notes: Path,
    output: Path | None = None,
    nodes: int = 1,
) -> Outcome:
    """Run a script's ranks, see :func:`command` and :func:`common.foreign_script.run.run`.

    A script that could start them itself, and then misses torchrun's variables, wants torchrun with these flags: it is run again.
    """
    # A command ends its ranks, which are in a session of their own. Another program handles signals by itself.
    with stop_signals() if early_signals.handled else contextlib.nullcontext():
        outcome = run(command(arguments, ranks, start, nodes), environment, timeout, notes, output)
        if start == "auto" and starts_itself(arguments) and WANTS_TORCHRUN.search(outcome.traceback):
            for note in notes.iterdir():
                note.unlink()
            outcome = run(command(arguments, ranks, "torchrun", nodes), environment, timeout, notes, output)
        return outcome
