"""ddp/launch/azureml.yml passes Azure's own validation. Nothing is sent to Azure."""

from __future__ import annotations

import re
from typing import Any

import pytest

from common.command_line.cli import parse
from ddp.config import TrainConfig
from tests.support.launch import REPOSITORY

ml: Any = pytest.importorskip("azure.ai.ml", reason="needs the extra 'azure'")
yaml: Any = pytest.importorskip("yaml", reason="needs the extra 'azure'")

# Azure's library calls marshmallow as its next version will not allow.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FILE = REPOSITORY / "ddp" / "launch" / "azureml.yml"


def manifest() -> Any:
    return yaml.safe_load(FILE.read_text())


def submit_commands() -> list[list[str]]:
    """The words of each ``az ml job create`` in the head of the file."""
    return [
        line.lstrip("# ").split() for line in FILE.read_text().splitlines() if line.startswith("#   az ml job create")
    ]


def test_it_is_a_job_of_two_instances_with_two_ranks_each() -> None:
    """It is a job of two instances with two ranks each.

    Claim (ddp/README.md): launch: the manifests pass their validators.
    """
    job = ml.load_job(FILE)
    job._to_job()._validate()  # the next step of sending it, which compares the command with the inputs
    assert job.distribution.type.lower() == "pytorch"
    assert (job.resources.instance_count, job.distribution.process_count_per_instance) == (2, 2)
    assert job.outputs["run"].mode == "rw_mount"
    assert job.compute == "cpu-cluster"


def test_its_head_tells_how_to_submit_it_on_cpus_and_on_gpus() -> None:
    cpu, gpu = submit_commands()
    assert cpu == ["az", "ml", "job", "create", "--file", str(FILE.relative_to(REPOSITORY))]
    assert gpu[:7] == [*cpu, "--set"]
    overrides = [dict([word.split("=")]) for word in gpu[7:]]
    job = ml.load_job(FILE, params_override=overrides)
    assert (job.compute, int(job.distribution.process_count_per_instance)) == ("gpu-cluster", 4)


def test_its_paths_exist() -> None:
    document = manifest()
    assert (FILE.parent / document["code"]).resolve() == REPOSITORY
    build = document["environment"]["build"]
    assert (FILE.parent / build["path"]).resolve() == REPOSITORY
    assert (REPOSITORY / build["dockerfile_path"]).is_file()


def test_azure_starts_the_ranks_and_train_takes_their_flags() -> None:
    document = manifest()
    words = document["command"].split()
    assert words[:3] == ["python", "-m", "ddp.train"], "Azure starts each rank: torchrun would start them again"
    filled = [fill(word, document) for word in words[3:]]
    config = parse(TrainConfig, "ddp.train", None, filled)
    assert config.auto_resume
    assert str(config.run_dir) == "/mnt/run"
    assert config.epochs == document["inputs"]["epochs"]
    for ranks in (2 * 2, 2 * 4):  # those of the two commands
        config.check(ranks)


def fill(word: str, document: Any) -> str:
    """The word with the value of each input, and the folder of each output."""

    def value(found: re.Match[str]) -> str:
        return str(document[found[1]][found[2]]) if found[1] == "inputs" else f"/mnt/{found[2]}"

    return re.sub(r"\$\{\{(inputs|outputs)\.(\w+)\}\}", value, word)
