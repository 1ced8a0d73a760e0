"""ddp/launch/kubernetes*.yml pass the validators of Kubernetes' and the Kubeflow Trainer's objects. Their
commands are read by torchrun's own parser and by ddp.train's. No cluster runs here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from common.command_line.cli import parse
from ddp.config import TrainConfig
from tests.support.launch import REPOSITORY, clean_environment

yaml: Any = pytest.importorskip("yaml", reason="needs the extra 'kubernetes'")
kubernetes_validate: Any = pytest.importorskip("kubernetes_validate", reason="needs the extra 'kubernetes'")
trainer_models: Any = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the extra 'kubernetes'")

LAUNCH = REPOSITORY / "ddp" / "launch"
OPERATOR, PLAIN = LAUNCH / "kubernetes.yml", LAUNCH / "kubernetes-job.yml"
CORE = [(OPERATOR, "PersistentVolumeClaim"), (PLAIN, "PersistentVolumeClaim"), (PLAIN, "Service"), (PLAIN, "Job")]
OLDEST = "1.31"  # that the Kubeflow Trainer supports
CONTAINER = ("spec", "template", "spec", "containers", 0)
NODE = ("spec", "template", "spec", "replicatedJobs", 0)


def manifest(file: Path, kind: str) -> Any:
    (document,) = (document for document in yaml.safe_load_all(file.read_text()) if document["kind"] == kind)
    return document


def job_of_runtime() -> Any:
    """The Job that the Trainer makes of the runtime."""
    spec = at(manifest(OPERATOR, "TrainingRuntime"), (*NODE, "template", "spec"))
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "ddp-node-0"}, "spec": spec}


def at(document: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


@pytest.mark.parametrize("version", [OLDEST, ""])
def test_core_objects_are_valid(version: str) -> None:
    """With the job that the Trainer makes of the runtime.

    Claim (ddp/README.md): launch: the manifests pass their validators.
    """
    for document in (*(manifest(file, kind) for file, kind in CORE), job_of_runtime()):
        kubernetes_validate.validate(document, version or kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("kind", ["TrainingRuntime", "TrainJob"])
def test_objects_of_the_trainer_are_valid(kind: str) -> None:
    """The models drop fields that they do not know."""
    document = manifest(OPERATOR, kind)
    assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    kept = getattr(trainer_models, f"TrainerV1alpha1{kind}").from_dict(document).to_dict()
    assert kept == document


def test_the_names_in_one_document_are_those_of_another() -> None:
    job, service = manifest(PLAIN, "Job"), manifest(PLAIN, "Service")
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    runtime, train_job = manifest(OPERATOR, "TrainingRuntime"), manifest(OPERATOR, "TrainJob")
    group = runtime["apiVersion"].partition("/")[0]
    reference = {"apiGroup": group, "kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    assert train_job["spec"]["runtimeRef"] == reference


def test_both_manifests_make_the_same_pods_but_for_the_launch() -> None:
    assert manifest(OPERATOR, "PersistentVolumeClaim") == manifest(PLAIN, "PersistentVolumeClaim")
    pods = [job["spec"]["template"]["spec"] for job in (job_of_runtime(), manifest(PLAIN, "Job"))]
    resources = manifest(OPERATOR, "TrainJob")["spec"]["trainer"]["resourcesPerNode"]
    assert pods[1]["containers"][0].pop("resources") == resources
    for pod in pods:
        claim, memory = pod["volumes"]
        assert (
            claim["persistentVolumeClaim"]["claimName"] == manifest(PLAIN, "PersistentVolumeClaim")["metadata"]["name"]
        )
        assert memory["emptyDir"]["medium"] == "Memory"
        (container,) = pod["containers"]
        assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]
        for name in ("command", "args", "env"):
            container.pop(name, None)
        pod.pop("subdomain", None)
    assert pods[0] == pods[1]


def test_the_image_is_built_from_the_dockerfile_that_they_name() -> None:
    for file, job in ((OPERATOR, job_of_runtime()), (PLAIN, manifest(PLAIN, "Job"))):
        head = file.read_text().partition("\n\n")[0]
        words = next(line for line in head.splitlines() if "docker build" in line).split()
        assert (REPOSITORY / words[words.index("--file") + 1]).is_file()
        assert words[words.index("--tag") + 1] == at(job, CONTAINER)["image"]
        assert f"kubectl apply --filename {file.relative_to(REPOSITORY)}" in head


def test_torchrun_takes_what_the_trainer_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = manifest(OPERATOR, "TrainJob")["spec"]["trainer"]
    nodes, ranks = trainer["numNodes"], trainer["numProcPerNode"]
    for name, value in {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(ranks),
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "ddp-node-0-0.ddp",
        "PET_MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    program, *flags = at(job_of_runtime(), CONTAINER)["command"]
    assert program == "torchrun"
    agent = get_args_parser().parse_args([*flags, *trainer["args"]])
    assert (agent.nnodes, agent.nproc_per_node, agent.node_rank) == ("2", "2", 1)
    assert (agent.rdzv_backend, agent.master_addr, agent.master_port) == ("static", "ddp-node-0-0.ddp", 29500)
    assert_trains(agent, nodes * ranks)


@pytest.mark.parametrize("index", [0, 1])
def test_each_pod_of_the_plain_job_starts_an_agent(tmp_path: Path, index: int) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    torchrun.chmod(0o755)
    job = manifest(PLAIN, "Job")
    container, name = at(job, CONTAINER), job["metadata"]["name"]
    assert "$(" not in "".join(container["command"]), "Kubernetes would take it for a variable of its own"
    environment = clean_environment() | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "JOB_NAME": name,
        "JOB_COMPLETION_INDEX": str(index),
    }
    command = [*container["command"], *container["args"]]
    words = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()

    agent = get_args_parser().parse_args(words)
    assert int(agent.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert agent.rdzv_endpoint.partition(":")[0] == f"{name}-0.{manifest(PLAIN, 'Service')['metadata']['name']}"
    assert agent.rdzv_id == name
    assert agent.max_restarts == 0, "an agent that restarts hangs with that of a new pod"
    assert f"is_host={int(index == 0)}" in agent.rdzv_conf.split(",")
    assert agent.local_addr == f"{name}-{index}.{name}"
    assert_trains(agent, int(agent.nnodes) * int(agent.nproc_per_node))


def assert_trains(agent: Any, world_size: int) -> None:
    """torchrun starts a run of ddp.train that resumes, on the volume, in a number of ranks that its batch allows."""
    assert (agent.module, agent.training_script) == (True, "ddp.train")
    config = parse(TrainConfig, "ddp.train", None, agent.training_script_args)
    assert config.auto_resume
    assert config.epochs == 12
    assert config.run_dir.parent == Path("/runs")
    config.check(world_size)
