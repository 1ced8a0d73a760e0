"""ddp/launch/symptoms.md: each entry is complete and is found, and today's torch prints what the page quotes."""

from __future__ import annotations

import ast
import inspect
import re
import signal
import sys
import traceback
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data._utils import signal_handling

from ddp.launch import symptoms
from ddp.launch.symptoms import PAGE, QUOTED, Entry, masked, matches
from ddp.museum.__main__ import exhibits
from ddp.rendezvous.process_group import process_group
from tests.ddp.launch import provoked
from tests.support.launch import REPOSITORY, run_command, run_ranks, start_program
from tests.support.ranks import run_in_group
from tests.support.user_errors import UserError

ENTRIES = {entry.title: entry for entry in symptoms.entries()}
LABELS = ["Cause", "Cure", "Thread", "Chapter", "See it"]
SEE_IT = re.compile(r"`(\w+)` in \[provoked\.py\]")
POSTED = re.findall(
    r"^### (.+)\n\nAnswer: (.+)\n\n~~~\n((?:.*\n)+?)~~~$",
    Path(__file__).with_name("posted.md").read_text(),
    re.MULTILINE,
)
PROGRAMS = {name for entry in ENTRIES.values() for name in SEE_IT.findall(entry.body)}

# Messages that people paste: other numbers, paths and ranks than on the page, or a traceback around it.
PASTED = {
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 81061 got signal: 1": "SignalException",
    "train.py: error: unrecognized arguments: --local-rank=5": "unrecognized",
    "[c10d] The client socket has timed out after 900s while trying to connect to (IP1, 2222).": "Rendezvous",
    "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out connecting: "
    "SO_ERROR: Connection refused, remote=[127.0.0.1]:40123 (rank=8, size=16, local=[127.0.0.1])": "connectFullMesh",
    "initializing ddp: GLOBAL_RANK: 3, MEMBER: 4/16": "Stuck at",
    "RuntimeError: CUDA error: invalid device ordinal\nCUDA kernel errors might be reported asynchronously": "ordinal",
    "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, "
    "name: EADDRINUSE, message: address already in use": "EADDRINUSE",
    "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's workers are "
    "out of shared memory. Please try to raise your shared memory limit.": "Bus error",
    'Traceback (most recent call last):\n  File "/home/me/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1251, '
    "in _try_get_data\n    data = self._data_queue.get(timeout=timeout)\nRuntimeError: DataLoader worker (pid 7) is killed by signal: "
    "Killed.\n\nThe above exception was the direct cause of the following exception:\n\nRuntimeError: DataLoader worker (pid(s) 7) "
    "exited unexpectedly": "signal: Killed",
    "DataLoader worker (pid 5) is killed by signal: Bus error. DataLoader worker (pid(s) 5) exited unexpectedly": "Bus",
    "[rank3]: RuntimeError: received 0 items of ancdata": "ancdata",
    "[rank1]: Parameter at index 440 with name backbone.layers.3.fc2.bias has been marked as ready twice.": "ready twice",
    "one of the variables needed for gradient computation has been modified by an inplace operation: [torch.cuda.FloatTensor [256]] "
    "is at version 5; expected version 4 instead.": "inplace",
    "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation to complete": "recv",
    "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two options": "Weights only",
    "RuntimeError: aten._foreach_mul_.Tensor: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before "
    "calling distributed operators!": "mixed",
}


def test_every_entry_is_complete() -> None:
    """There are at least 40 symptoms, each with its cause, cure, thread, chapter and a way to see it."""
    assert len(ENTRIES) >= 40
    assert f"{len(ENTRIES)} messages and symptoms" in (REPOSITORY / "README.md").read_text()
    for title, entry in ENTRIES.items():
        lines = re.findall(r"^- \*\*(.+?)\*\*: (\S.*)", entry.body, re.MULTILINE)
        assert [label for label, _ in lines if label != "Also"] == LABELS, title
        thread = dict(lines)["Thread"]
        assert re.match(r"\[\S+#(\d+)\]\(https://github\.com/\S+/(issues|pull)/\1\)|none; ", thread), title
    contents = re.findall(r"^- \[(.+)\]\(#(.+)\)", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in contents] == re.findall(r"^## (.+)", PAGE.read_text(), re.MULTILINE)
    data = ConfigParser()
    data.read(REPOSITORY / "setup.cfg")
    assert data["options.package_data"]["*"] == "*.md"


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_what_it_names_is_there() -> None:
    """Pages, chapters, exhibits, examples, commands and small programs that the page names exist, and no program is left out."""
    text = PAGE.read_text()
    for path, chapter in re.findall(r"\]\((?!https)([^)#]*)#?([^)]*)\)", text):
        page = PAGE.parent / path if path else PAGE
        assert page.exists(), path
        headings = re.findall(r"^#+ (.+)", page.read_text(), re.MULTILINE) if chapter else []
        assert not chapter or chapter in map(anchor, headings), (path, chapter)
    assert set(re.findall(r"python -m ddp\.museum (\w+)", text)) <= exhibits().keys()
    examples = (REPOSITORY / "torchrun_examples.sh").read_text()
    assert all(f"\nexample {name} " in examples for name in re.findall(r"torchrun_examples\.sh ([\w-]+)", text))
    for module in re.findall(r"-m ((?:ddp|dataloading)[\w.]*)", text):
        path = REPOSITORY / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    assert all((REPOSITORY / file).exists() for file in re.findall(r"`python -m pytest (\S+)`", text))
    functions = [node for node in ast.parse(inspect.getsource(provoked)).body if isinstance(node, ast.FunctionDef)]
    assert {function.name for function in functions if not function.args.args} == PROGRAMS


@pytest.mark.parametrize("title", [title for title, entry in ENTRIES.items() if QUOTED.search(entry.names)])
def test_its_messages_find_an_entry(title: str) -> None:
    for text in QUOTED.findall(ENTRIES[title].names):
        assert matches(f"noise before\n[rank7]: {text} and after")[0].title == title


@pytest.mark.parametrize("pasted", PASTED)
def test_what_people_paste_finds_the_entry(pasted: str) -> None:
    assert PASTED[pasted] in matches(pasted)[0].title


@pytest.mark.parametrize(("thread", "answer", "posted"), POSTED)
def test_a_message_of_a_tracker_finds_its_entry_or_nothing(thread: str, answer: str, posted: str) -> None:
    assert [entry.title for entry in matches(posted)[:1]] == [answer] * (answer != "nothing"), thread


def test_a_consequence_comes_after_what_caused_it() -> None:
    pasted = (
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)\nCUDA out of memory. Tried\nChildFailedError:"
    )
    assert [entry.title.split("`")[1] for entry in matches(pasted)] == [
        "CUDA out of memory",
        "Watchdog caught collective operation timeout",
        "ChildFailedError",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "the kernel killed it, memory error of a worker",
        "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
        "ValueError: not enough values to unpack (expected 2, got 0)",
        "loss is nan",
        "Signal 2 (SIGINT) received by PID 9",
    ],
)
def test_words_that_messages_share_find_nothing(text: str) -> None:
    assert matches(text) == []


def test_the_command_answers_without_torch(tmp_path: Path) -> None:
    """``--explain`` prints the entries for a terminal, with status 0; without one, a line and status 1; it never imports torch."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')")
    first = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    found = run_command("ddp.launch.doctor", "--explain", "received 0 items of ancdata", env=first)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("received 0 items of ancdata")
    assert "https://github.com/pytorch/pytorch/issues/973" in found.stdout
    assert "(dataloading/README.md#8" in found.stdout and "**" not in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 120
    nothing = run_command("ddp.launch.doctor", "--explain", "my cat sat on the keyboard", env=first)
    assert (nothing.returncode, nothing.stderr) == (1, "")
    assert nothing.stdout.startswith(f"nothing fits among the {len(ENTRIES)} symptoms of {PAGE}\n")
    assert symptoms.CHECKLIST.exists() and str(symptoms.CHECKLIST) in nothing.stdout


@pytest.mark.parametrize("arguments", [["--explain", " "], ["--explain"], []])
def test_an_empty_message_is_a_user_error(user_error: UserError, arguments: list[str]) -> None:
    assert user_error(symptoms.main, *arguments).startswith("error: --explain")


def entry_of(program: str) -> Entry:
    (entry,) = (entry for entry in ENTRIES.values() if program in SEE_IT.findall(entry.body))
    return entry


def assert_quoted(program: str, printed: str) -> None:
    """A program prints a message of its entry, which is found first."""
    entry = entry_of(program)
    assert entry.contained_in(masked(printed)), printed
    assert matches(printed)[0] == entry


def caught(program: Callable[[], Any]) -> str:
    try:
        program()
    except (Exception, SystemExit):
        return traceback.format_exc()
    return ""


@pytest.mark.parametrize("program", provoked.MESSAGES)
def test_torch_prints_what_the_page_quotes(
    program: Callable[[], None], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of one process have the messages of the page, and find their entries."""
    before = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)  # common/data/loaders.py may have set it
    printed = caught(program)
    signal.signal(signal.SIGCHLD, before)
    assert_quoted(program.__name__, printed + capfd.readouterr().err)


def test_symptoms_without_a_message() -> None:
    """torch takes one thread in a worker, two workers make a whole batch each in turn, and a prefix keeps weights from loading."""
    assert provoked.threads_of_workers() == 1
    first, second, *others = provoked.whole_batches()
    assert others == [first, second] and first != second
    assert provoked.prefixed_keys() == (False, ["module.weight", "module.bias"])


def on_this_rank(timeout_s: float, programs: list[Callable[[], None]]) -> list[str]:
    with process_group(timeout_s=timeout_s):
        return [caught(program) for program in programs]


@pytest.mark.examples
def test_ddp_prints_what_the_page_quotes() -> None:
    """Errors of two ranks have the messages of the page, on both, and find their entries."""
    for printed in run_ranks(on_this_rank, 2, 60, list(provoked.ON_TWO_RANKS)):
        for program, text in zip(provoked.ON_TWO_RANKS, printed, strict=True):
            if text or program is not provoked.two_forward_passes:  # that one is an error of older versions of torch
                assert_quoted(program.__name__, text)


@pytest.mark.examples
@pytest.mark.parametrize(("program", "timeout_s"), [(provoked.uneven_batches, 3), (provoked.peer_leaves, 30)])
def test_a_rank_waits_for_one_that_does_not_come(program: Callable[[], None], timeout_s: float) -> None:
    printed = run_ranks(on_this_rank, 2, timeout_s, [program], fresh=True)
    assert printed[0] == [""]
    assert_quoted(program.__name__, printed[1][0])


@pytest.mark.examples
def test_the_norm_of_a_shard_is_not_the_norm() -> None:
    """The local parts of a sharded norm differ, and their squares add up to the whole, which clipping returns."""
    (local_0, whole, returned), (local_1, *others) = run_in_group(provoked.norm_of_shards, 2)
    assert others == [whole, returned] == pytest.approx([whole, whole])
    assert local_0**2 + local_1**2 == pytest.approx(whole**2)
    assert local_0 != local_1


@pytest.mark.examples
def test_no_machine_hosts_the_rendezvous(capfd: pytest.CaptureFixture[str]) -> None:
    printed = caught(provoked.no_rendezvous_host)
    capfd.readouterr()
    assert_quoted("no_rendezvous_host", printed)


@pytest.mark.examples
@pytest.mark.parametrize("signal", ["HUP", "USR1"])
def test_torchrun_dies_of_a_signal(signal: str) -> None:
    """torchrun dies of SIGHUP under nohup, and of SIGUSR1: as the lines of shell on the page say, and with their messages."""
    (entry,) = (entry for entry in ENTRIES.values() if f"kill -{signal}" in entry.body)
    (line,) = re.findall(rf"`(.*kill -{signal}.*)`", entry.body)
    path = f"PATH={Path(sys.executable).parent}:$PATH"  # torchrun's
    with start_program("bash", "-c", f"{path}\n{line}\nexit $?") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert matches(out + err)[0] == entry
