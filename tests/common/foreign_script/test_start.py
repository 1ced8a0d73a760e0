"""How a script is started: what its code says, in its own file and in the modules that it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UsageError
from common.foreign_script.run import injected
from common.foreign_script.start import environment_for, require_script, starts_itself, wants_torchrun

TRAIN = """
import argparse
from .loop import main
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--epochs", type=int)
print(parser.parse_args())
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__init__.py").touch()
    (tmp_path / "job" / "train.py").write_text(TRAIN)
    (tmp_path / "job" / "loop.py").write_text("def main():\n    torch.distributed.init_process_group()\n")
    return tmp_path / "job"


def test_the_code_of_a_module_is_read(package: Path) -> None:
    for relative in (".loop import main", ". import loop"):
        (package / "train.py").write_text(TRAIN.replace(".loop import main", relative))
        assert wants_torchrun(["-m", "job.train"])
    (package / "loop.py").write_text("def main():\n    mp.spawn(train)\n")
    assert starts_itself(["-m", "job.train"]) and not wants_torchrun(["-m", "job.train"])
    (package / "train.py").rename(package / "__main__.py")
    assert starts_itself(["-m", "job"])
    (package / "run.py").write_text("import job.loop")
    assert starts_itself(["job/run.py"])  # its modules are in the working directory


@pytest.mark.parametrize("script", [("-m", "job.train"), ("train.py",)])
def test_a_script_gets_its_local_rank_by_its_flag(script: tuple[str, ...], package: Path) -> None:
    (package.parent / "train.py").write_text(TRAIN.replace(".loop", "job.loop"))
    environment = environment_for("cpu", 2, script) | injected() | {"LOCAL_RANK": "1"}
    del environment["FOREIGN_SCRIPT_WATCH"]
    done = subprocess.run(
        [sys.executable, *script, "--epochs=3"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "Namespace(local_rank=1, epochs=3)\n"


def test_a_script_is_required(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_script(["-m", "job.train"], "ddp.audit")
    for script in ([], ["-m"]):
        with pytest.raises(UsageError, match=r"which script\? python -m ddp.audit -- train.py"):
            require_script(script, "ddp.audit")
