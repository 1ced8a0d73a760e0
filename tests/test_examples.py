"""torchrun_examples.sh: each example that needs no GPU runs, with small sizes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dataloading.synthetic import face_cache
from tests.support.launch import REPOSITORY, clean_environment, kill_tree

SCRIPT = REPOSITORY / "torchrun_examples.sh"
SMALL = ("--train-samples", "576", "--test-samples", "50", "--epochs", "1", "--batch-size", "48")


# Examples of the benchmarks, with flags that make them small.
LOADING = {
    "loading": ("--workers", "1", "--batches", "2", "--repeats", "2", "--batch-size", "4"),
    "slow-storage": ("--batches", "1", "--repeats", "2", "--batch-size", "4"),
    "ladder": ("--batches", "1", "--repeats", "2", "--batch-size", "4"),
}
MEASURING = (
    "when-it-pays",
    "climb",
    "scaling",
    "all-reduces",
    "engines",
    "sharding",
    "memory",
    "measure",
)  # their own tests run them, some with fewer parts
# Examples that are interrupted on purpose, and what is said then. Of a rank that is killed and the one that loses it,
# torchrun names whichever ended first by its clock of whole seconds, so the exit status may be either's.
INTERRUPTED = {"preempt": r"stopped by SIGTERM on rank \d", "elastic": r"failed \(exitcode: -?\d+\) local_rank"}


@pytest.fixture(scope="session")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few of the embedded faces: two people's."""
    return face_cache.ensure(tmp_path_factory.mktemp("faces") / "faces", people=2)


def run_script(*arguments: str, timeout_s: float = 250.0) -> tuple[int, str]:
    """Its status, and its output with what it started."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        [SCRIPT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment() | {"PATH": path},
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=timeout_s)
    finally:
        kill_tree(process.pid)
        process.wait()
    return process.returncode, out


def listed() -> list[str]:
    text = SCRIPT.read_text()
    return re.findall(r"^example (\S+) '[^']+' -", text, re.MULTILINE)


def test_it_lists_every_example_with_what_it_shows() -> None:
    status, out = run_script()
    assert status == 0
    for name in (
        *listed(),
        "two-gpus",
        "gpu-check",
        "measure",
        "slurm",
        "slurm-srun",
        "lsf",
        "azure",
        "kubeflow",
        "kubernetes",
    ):
        assert re.search(rf"^  {name} +\S+", out, re.MULTILINE)


@pytest.mark.examples
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in listed()
        if name not in (*LOADING, *MEASURING, *INTERRUPTED, "doctor", "audit", "audit-again", "museum")
    ],
)
def test_an_example_prints_its_command_and_runs(name: str, tmp_path: Path, faces: Path) -> None:
    """An example prints its command and runs.

    Claim (README.md): every launch of `torchrun_examples.sh` runs.
    """
    flags = ("--data-dir", str(faces), "--train-samples", "96") if name == "files" else ()
    status, out = run_script(name, *SMALL, *flags, "--run-dir", str(tmp_path / "run"))
    assert status == 0, out
    assert re.search(r"^(torchrun|python) .*-m (ddp|dataparallel)\.train .*--train-samples \d+", out, re.MULTILINE)
    assert len(re.findall(r"^test accuracy ", out, re.MULTILINE)) == (3 if name == "resume" else 1), out
    traces = ["rank0.json.gz", "rank1.json.gz"] if name == "profile" else []
    assert sorted(path.name for path in tmp_path.glob("run/profile/*")) == traces


@pytest.mark.examples
@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_example_that_is_interrupted_goes_on_to_its_end(name: str, tmp_path: Path) -> None:
    """An example that is interrupted goes on to its end.

    Claim (README.md): every launch of `torchrun_examples.sh` runs.
    """
    status, out = run_script(name, *SMALL, "--epochs", "60", "--run-dir", str(tmp_path / "run"))
    assert status == 0, out
    assert re.search(INTERRUPTED[name], out), out
    assert "resuming after step" in out
    assert len(re.findall(r"^test accuracy ", out, re.MULTILINE)) == 1, out


@pytest.mark.examples
@pytest.mark.parametrize("name", LOADING)
def test_an_example_of_loading_prints_its_command_and_runs(name: str, tmp_path: Path, faces: Path) -> None:
    """An example of loading prints its command and runs.

    Claim (README.md): every launch of `torchrun_examples.sh` runs.
    """
    output = tmp_path / "results"
    status, out = run_script(name, *LOADING[name], "--path-to-folder", str(faces), "--output", str(output))
    assert status == 0, out
    assert re.search(rf"^python -m dataloading\..* --path-to-folder {faces}", out, re.MULTILINE)
    assert list(output.glob("*.png"))
    assert list(output.glob("*.json"))


@pytest.mark.examples
@pytest.mark.parametrize("name", MEASURING)
def test_an_example_that_measures_is_a_command_with_options(name: str) -> None:
    status, out = run_script(name, "--output", "results", "--help")
    assert status == 0, out
    assert re.search(r"^python -m (dataparallel|ddp|maintain)\.\w+.* --output results --help$", out, re.MULTILINE)
    assert "--output" in out


@pytest.mark.examples
def test_the_doctor_finds_two_ranks() -> None:
    """The doctor reports two ranks that reach each other.

    Claim (ddp/README.md): launch: the doctor finds all ranks.
    """
    status, out = run_script("doctor")
    assert status == 0, out
    assert re.search(r"^nothing is wrong\nstarted by torchrun: 2 ranks on 1 host, meeting at ", out, re.MULTILINE)
    assert re.search(r"^rank 0 +rank 1 +\d+ us +\d+ MiB/s$", out, re.MULTILINE)


def test_all_submits_nothing_to_a_cluster_and_checks_no_gpu(tmp_path: Path) -> None:
    """With programs that would tell, and in the place of all others some that do nothing."""
    for program in ("sbatch", "bsub", "az", "kubectl"):
        (tmp_path / program).write_text(f"#!/bin/sh\necho {program} was started\n")
    for program in ("python", "torchrun", "pkill", "cat"):
        (tmp_path / program).write_text("#!/bin/sh\n")
    for file in tmp_path.iterdir():
        file.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", f"sed 's#^\\[ -d .venv.*#PATH={tmp_path}:$PATH#' {SCRIPT} > {tmp_path}/script && bash {tmp_path}/script all"],
        capture_output=True, text=True, timeout=120, env=clean_environment(),
    )  # fmt: skip
    assert "was started" not in done.stdout
    assert len(re.findall(r"skipped, it takes other machines: run it by its name", done.stdout)) == 6
    assert "# gpu-check: skipped, it runs many of the others, for minutes or hours: run it by its name" in done.stdout
    assert "ddp/gpu_check" not in done.stdout


def test_a_cluster_that_is_not_here_is_one_line() -> None:
    if shutil.which("bsub"):
        pytest.skip("there is LSF here")
    assert run_script("lsf") == (2, "error: lsf needs a cluster, and its bsub here\n")


def test_an_unknown_example_is_one_line() -> None:
    status, out = run_script("three-processes")
    assert (status, out) == (2, "error: no example 'three-processes'; ./torchrun_examples.sh lists them\n")


def test_an_example_that_cannot_run_here_says_why() -> None:
    if "GPU" in subprocess.run(["sh", "-c", "nvidia-smi -L || true"], capture_output=True, text=True).stdout:
        pytest.skip("there are GPUs here")
    assert run_script("two-gpus") == (2, "error: two-gpus needs 2 GPUs, this machine has 0\n")
