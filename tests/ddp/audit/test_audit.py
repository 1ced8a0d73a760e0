"""``python -m ddp.audit`` on scripts of somebody else: what it says, what it leaves as it was, and what cannot be judged."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.ddp.audit import scripts
from tests.ddp.audit.forked import judge
from tests.ddp.audit.test_mutants import SCRIPTS
from tests.ddp.audit.test_vary import SCRIPT
from tests.support.launch import run_command


def write(folder: Path, name: str) -> Path:
    path = folder / f"{name.lower()}.py"
    path.write_text(getattr(scripts, name))
    (folder / "ddp.py").write_text("OWN = True\n")
    return path


def audit(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run_command("ddp.audit", *map(str, arguments), env=env)


@pytest.mark.examples
def test_a_right_script_is_quiet_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Its weights and its generator are those of a run without the audit; a module of its own may be called ``ddp``."""
    script = write(tmp_path, "RIGHT")
    audited = audit("--json", tmp_path / "audit.json", "--", script, tmp_path / "audited.pt")
    assert audited.returncode == 0, audited.stdout + audited.stderr
    assert audited.stdout.endswith("nothing wrong was found\n")
    assert json.loads((tmp_path / "audit.json").read_text())["findings"] == []
    torchrun = ("torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = run_command(*torchrun, str(script), str(tmp_path / "alone.pt"), env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    with_audit, alone = (torch.load(tmp_path / f"{name}.pt") for name in ("audited", "alone"))
    assert all(map(torch.equal, with_audit, alone))


@pytest.mark.examples
def test_a_script_that_spawns_its_ranks_is_watched_too(tmp_path: Path) -> None:
    script = write(tmp_path, "SPAWNS")
    done = audit("--", script, tmp_path / "store")
    line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if "# around" in text)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{script}:{line}: around-the-wrapper: the forward pass goes around the DDP wrapper" in done.stdout


@pytest.mark.examples
@pytest.mark.parametrize("name", ["UNUSUAL", "JOINS", "COMMON"])
def test_what_is_right_though_unusual_is_quiet(tmp_path: Path, name: str) -> None:
    assert judge(tmp_path, write(tmp_path, name)) == []


@pytest.mark.examples
@pytest.mark.parametrize("name", scripts.WRONG)
def test_what_is_wrong_is_found(tmp_path: Path, name: str) -> None:
    said, source = scripts.WRONG[name]
    path = tmp_path / "script.py"
    path.write_text(f"{scripts.LOADERS}{source}\ndist.destroy_process_group()\n")
    texts = [finding.text for finding in judge(tmp_path, path, hint=said if name in scripts.HINTS else None)]
    assert [said in text for text in texts] == [True], texts


@pytest.mark.examples
def test_the_scripts_objects_are_saved_copied_and_compiled_without_the_watch(tmp_path: Path) -> None:
    """And what this torch does not have is named; all else is watched."""
    done = audit("--device", "cpu", "--", write(tmp_path, "OBJECTS"))
    assert done.returncode == 0, done.stdout + done.stderr
    summary, part, renamed, *_ = done.stdout.splitlines()
    assert summary.startswith("2 ranks, 4 optimizer steps")
    assert renamed == "not watched, since this torch does not have it: torch.optim.renamed"
    assert part.endswith("No module named '_foreign_script_watch.gone' (so nothing of watch/gone.py)")


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("RAISES", (), "the script failed: {script}:22: RuntimeError: lost"),
        (
            "HANGS",
            ("--timeout", "15"),
            "rank 0 is at {script}:24; rank 1 is at {script}:12, called at {script}:25; the ranks part: rank 0 calls barrier at ",
        ),
        ("OTHER_ORDER", (), "the ranks part: rank 0 calls all_reduce (values: 1) at {script}:25, rank 1 calls "),
        ("WITHOUT_GROUP", (), "no process group was seen: the script calls no init_process_group"),
        ("STARTS_ALONE", ("--start", "python"), "it starts Python in a way that leaves the watch out"),
        ("WITHOUT_STEP", (), "the script took no optimizer step of torch.optim (0 backward passes were seen)"),
        ("WITHOUT_STEP", ("--ranks", "1"), "the script ran on one rank"),
    ],
)
@pytest.mark.examples
def test_what_cannot_be_judged_is_said_in_a_line(tmp_path: Path, name: str, flags: tuple[str, ...], said: str) -> None:
    script = write(tmp_path, name)
    done = audit(*flags, "--", script)
    *_, last = done.stderr.splitlines()
    assert done.returncode == 2, done.stdout + done.stderr
    assert last.startswith("error: ")
    assert said.format(script=script) in last


@pytest.mark.examples
def test_the_table_of_others() -> None:
    """A row of it; most packages of the extra are not installed here."""
    done = run_command("ddp.audit.libraries", "own_loop_by_hand")
    row = f"| own_loop_by_hand (torch {torch.__version__.partition('+')[0]}"
    assert done.stdout.splitlines()[-1].startswith(row), done.stdout + done.stderr
    assert "| nothing | the same bits in 20 steps | - | - | - | - |" in done.stdout
    unknown = run_command("ddp.audit.libraries", "x")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("error: x: there is no such job; there are torch_alone, ")


def test_user_errors() -> None:
    job = ("--", SCRIPT, "--dropout=0.1", "--batch-size=7")
    for arguments, said in (
        ((), "which script? python -m ddp.audit -- train.py ARGUMENTS"),
        (("--", "nowhere.py"), "nowhere.py: there is no such script"),
        (("--vary", "resume", *job), "--vary resume needs {run} among the script's arguments"),
        (("--vary", "micro-steps", *job), "--vary micro-steps needs --accumulation-flag"),
        (("--vary", "ranks", "--batch-flag", "bs", *job), "there is no --bs with a whole number among the script's"),
        (("--vary", "ranks", "--batch-flag=--dropout", *job), "there is no --dropout with a whole number"),
        (("--vary=ranks", "--batch-flag=batch-size", *job), "--batch-size 7 cannot be varied: 14 is no multiple of 3"),
        (("--ranks", "3", "--nodes", "2", *job), "--ranks 3 cannot be divided among --nodes 2"),
        (("--nodes", "2", "--start", "python", *job), "--nodes 2 has agents of torchrun, which --start python"),
    ):
        done = audit(*arguments)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(f"error: {said}")
    within = audit(*job, env={"RANK": "0"})
    assert within.stderr.startswith("error: this runs under torchrun already (RANK is set)")


@pytest.mark.examples
@pytest.mark.parametrize(
    "flags",
    [
        ("--precision", "bf16", "--grad-accumulation-steps", "2"),
        ("--strategy", "handwritten", "--all-reduce", "shared-memory", "--sync-batchnorm", "--optimizer", "adamw"),
        ("--strategy", "naive", "--workers", "2", "--async-checkpoint", "--checkpoint-every", "3"),
        ("--strategy", "fsdp2", "--clip-norm", "1"),
        ("--strategy", "zero1"),
        ("--strategy", "zero2", "--clip-norm", "1"),
        ("--strategy", "zero3", "--grad-accumulation-steps", "2"),
        ("--fast",),
        ("--gradient-precision", "bf16", "--schedule", "one-cycle"),
        ("--dataset", "sums", "--model", "gpt"),
    ],
    ids=lambda flags: " ".join(flags),
)
def test_no_false_alarm_on_the_trainer(tmp_path: Path, flags: tuple[str, ...]) -> None:
    small = ("--train-samples", "288", "--test-samples", "100", "--epochs", "2", "--device", "cpu")
    assert judge(tmp_path, "-m", "ddp.train", *small, *flags, "--run-dir", tmp_path / "run") == []


@pytest.mark.examples
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_no_false_alarm_on_the_examples(tmp_path: Path, path: Path) -> None:
    assert judge(tmp_path, path, *SCRIPTS[path]) == []
