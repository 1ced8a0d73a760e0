"""The wheel, without the checkout: it has all that its commands need, and none of the tools for this repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from raw_ddp_command import TOOLS
from tests.support.launch import REPOSITORY, clean_environment

SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


GPU_SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
value = torch.ones(1).cuda()
dist.all_reduce(value)
assert value.is_cuda and value.item() == 2
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, which has the packages of this one besides."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "docs", "results", "tests")
    source = shutil.copytree(REPOSITORY, folder / "source", ignore=left_out)
    build = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(source))
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    python, (site,) = folder / "venv" / "bin" / "python", (folder / "venv" / "lib").glob("python*/site-packages")
    install = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        str(wheel),
    )
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "venv"


def run_tool(installed: Path, folder: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``raw-ddp COMMAND``, from a folder."""
    name, *arguments = command.split()
    path = f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = clean_environment() | {"PATH": path} | variables
    return subprocess.run(
        [installed / "bin" / name, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=250
    )


@pytest.mark.examples
def test_its_commands_run(installed: Path, tmp_path: Path) -> None:
    """Where the script's own packages have our names, and it finds these."""
    for name in ("common", "ddp", "dataloading", "dataparallel"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWN = True\n")
    own = "import common, ddp\nassert common.OWN and ddp.OWN\n"
    (tmp_path / "script.py").write_text(own + SCRIPT)
    (tmp_path / "gpu.py").write_text(own + GPU_SCRIPT)
    (tmp_path / "wrapper.py").write_text("from torch.nn.parallel import DistributedDataParallel as Wrapper\n")
    small = "--device cpu --epochs 1 --train-samples 288 --test-samples 100 --model mlp --run-dir run"
    for command in (
        f"raw-ddp train {small}",
        "raw-ddp audit --quick script.py",
        "raw-ddp audit -- script.py --",
        "raw-ddp audit --explain same-order",
        "raw-ddp gpu gpu.py",
        "raw-ddp museum same_order",
        "raw-ddp doctor --explain EADDRINUSE",
        "raw-ddp conformance wrapper:Wrapper --only hooks",
        *(f"raw-ddp {name} --help" for name in TOOLS),
    ):
        done = run_tool(installed, tmp_path, command, PYTHONPATH=".")
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    unknown = run_tool(installed, tmp_path, "raw-ddp adit")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith(
        "error: adit: there is no such tool; raw-ddp TOOL ARGUMENTS, with one of audit, gpu,"
    )


@pytest.mark.examples
def test_it_holds_the_four_packages(installed: Path) -> None:
    (site,) = installed.glob("lib/python*/site-packages")
    packages = {path.name for path in site.iterdir() if not path.name.endswith((".dist-info", ".pth", "__pycache__"))}
    assert packages == {"common", "dataloading", "dataparallel", "ddp", "raw_ddp_command.py"}
    assert not (site / "ddp" / "audit" / "libraries").exists()
