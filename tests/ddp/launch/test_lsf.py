"""ddp/launch/lsf.bsub: the hosts of a job in each form in which LSF tells them. (tests/launchers/test_launchers.py trains with it.)"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY, clean_environment

BLAUNCH = f"""#!{sys.executable}
import json, os, sys
names = ("HOSTS", "SLOTS", "HEAD_HOST", "FLAGS", "JOB_DIR")
print(json.dumps({{"arguments": sys.argv[1:], **{{name: os.environ[name] for name in names}}}}))
if os.environ.get("TOUCH"):
    open(os.environ["TOUCH"], "w").close()
sys.exit(int(os.environ.get("STATUS", "0")))
"""


def submit(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script as LSF does on the first host, with a ``blaunch`` that tells what it was given."""
    program = tmp_path / "bin" / "blaunch"
    program.parent.mkdir()
    program.write_text(BLAUNCH)
    program.chmod(0o755)
    own = {
        "LSB_JOBID": "12",
        "RUN_DIR": str(tmp_path / "run"),
        "PATH": f"{program.parent}:{clean_environment()['PATH']}",
    }
    return subprocess.run(
        ["bash", str(REPOSITORY / "ddp/launch/lsf.bsub")],
        cwd=tmp_path,
        env=clean_environment() | own | environment,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("form", "hosts", "slots"),
    [
        ("hostA 2 hostB 2", ["hostA", "hostB"], 4),
        ("hostB.cluster.org 1 hostA.cluster.org 1 hostC 1", ["hostB.cluster.org", "hostA.cluster.org", "hostC"], 3),
        ("hostA 8", ["hostA"], 8),
        ("hostA\nhostA\nhostB\nhostB\n", ["hostA", "hostB"], 4),
        ("hostB\nhostA\nhostB\nhostA\n", ["hostB", "hostA"], 4),
    ],
)
def test_every_form_gives_each_host_once_in_lsf_s_order(
    tmp_path: Path, form: str, hosts: list[str], slots: int
) -> None:
    """``LSB_MCPU_HOSTS`` has each host with its slots, ``LSB_DJOB_HOSTFILE`` is a file with a line per slot."""
    environment = {"LSB_MCPU_HOSTS": form}
    if "\n" in form:
        (tmp_path / "hostfile").write_text(form)
        environment = {"LSB_DJOB_HOSTFILE": str(tmp_path / "hostfile"), "LSB_MCPU_HOSTS": "another 1"}
    done = submit(tmp_path, **environment, FLAGS="--epochs 3")
    told = json.loads(done.stdout)
    assert told["arguments"][0] == "-z" and told["arguments"][1].split() == hosts
    assert told["arguments"][2:] == ["bash", f"{tmp_path}/ddp/launch/lsf-agent.sh"]
    assert (told["HOSTS"], told["SLOTS"], told["HEAD_HOST"]) == (str(len(hosts)), str(slots), hosts[0])
    assert (told["FLAGS"], told["JOB_DIR"]) == ("--epochs 3", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("saved", "status", "expected"), [(True, 1, 75), (False, 1, 1), (False, 0, 0)])
def test_a_job_that_was_stopped_asks_lsf_to_start_it_again(
    tmp_path: Path, saved: bool, status: int, expected: int
) -> None:
    """That of a start before does not count."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "requeue.json").write_text("{}")
    touch = str(tmp_path / "run" / "requeue.json") if saved else ""
    assert submit(tmp_path, LSB_MCPU_HOSTS="hostA 1", STATUS=str(status), TOUCH=touch).returncode == expected


def test_the_script_outlives_a_warning_of_lsf(tmp_path: Path) -> None:
    """LSF signals all processes of a job. The ranks leave requeue.json; then the script asks for another start."""
    stops = "kill -TERM 0; mkdir -p $RUN_DIR; touch $RUN_DIR/requeue.json; exit 1"
    program = tmp_path / "stop" / "blaunch"
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\ntrap : TERM\n{stops}\n")
    program.chmod(0o755)
    path = f"{program.parent}:{clean_environment()['PATH']}"
    assert submit(tmp_path, LSB_MCPU_HOSTS="hostA 1", PATH=path).returncode == 75


def test_75_is_the_status_with_which_lsf_requeues() -> None:
    script = (REPOSITORY / "ddp/launch/lsf.bsub").read_text()
    assert "\n#BSUB -Q 75\n" in script and "exit 75" in script
