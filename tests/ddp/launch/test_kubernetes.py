"""ddp/launch/kubernetes*.yml pass the validators of Kubernetes' and the Kubeflow Trainer's objects, which fail them when a field is
broken. Their commands are read by torchrun's own parser and by ddp.train's. No cluster runs here."""

from __future__ import annotations

import os
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from common.cli import parse
from ddp.config import TrainConfig
from tests.support.launch import REPOSITORY, clean_environment

yaml: Any = pytest.importorskip("yaml", reason="needs the extra 'kubernetes'")
kubernetes_validate: Any = pytest.importorskip("kubernetes_validate", reason="needs the extra 'kubernetes'")
trainer_models: Any = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the extra 'kubernetes'")

LAUNCH = REPOSITORY / "ddp" / "launch"
OPERATOR, PLAIN = LAUNCH / "kubernetes.yml", LAUNCH / "kubernetes-job.yml"
CORE = [(OPERATOR, "PersistentVolumeClaim"), (PLAIN, "PersistentVolumeClaim"), (PLAIN, "Service"), (PLAIN, "Job")]
TRAINER = ["TrainingRuntime", "TrainJob"]
OLDEST = "1.31"  # that the Kubeflow Trainer supports
MISSING: Any = object()
CONTAINER = ("spec", "template", "spec", "containers", 0)
NODE = ("spec", "template", "spec", "replicatedJobs", 0)


def manifest(file: Path, kind: str) -> Any:
    (found,) = (document for document in yaml.safe_load_all(file.read_text()) if document["kind"] == kind)
    return found


def job_of_runtime() -> Any:
    """The Job that the Trainer makes of the runtime."""
    spec = at(manifest(OPERATOR, "TrainingRuntime"), (*NODE, "template", "spec"))
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "ddp-node-0"}, "spec": spec}


def at(document: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def replace(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy with another value at the path, or none."""
    document = deepcopy(document)
    inner = at(document, path[:-1])
    if value is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return document


def validate_core(document: Any, version: str = "") -> None:
    """:raises ValueError: when it is not valid, with the path of the field"""
    try:
        kubernetes_validate.validate(document, version or kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        raise ValueError(f"{'.'.join(map(str, error.path))}: {error.message}") from None


def validate_trainer(document: Any) -> None:
    """:raises ValueError: when it is not valid. pydantic's own error is one."""
    assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    kept = getattr(trainer_models, f"TrainerV1alpha1{document['kind']}").from_dict(document).to_dict()
    # The models drop fields that they do not know.
    if lost := differences(document, kept):
        raise ValueError(f"unknown to the Trainer: {', '.join(lost)}")


def differences(given: Any, kept: Any, path: str = "") -> list[str]:
    if isinstance(given, dict) and isinstance(kept, dict):
        keys = given.keys() | kept.keys()
        return [found for key in keys for found in differences(given.get(key), kept.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [found for number, pair in pairs for found in differences(*pair, f"{path}.{number}")]
    return [] if given == kept else [path]


def test_the_validators_see_every_document() -> None:
    for file in (OPERATOR, PLAIN):
        kinds = [document["kind"] for document in yaml.safe_load_all(file.read_text())]
        core = [kind for core_file, kind in CORE if core_file == file]
        assert sorted(kinds) == sorted(core + (TRAINER if file == OPERATOR else []))


@pytest.mark.parametrize("version", [OLDEST, "latest"])
@pytest.mark.parametrize("file, kind", CORE)
def test_core_objects_are_valid(file: Path, kind: str, version: str) -> None:
    validate_core(manifest(file, kind), version.replace("latest", ""))


@pytest.mark.parametrize("kind", TRAINER)
def test_objects_of_the_trainer_are_valid(kind: str) -> None:
    validate_trainer(manifest(OPERATOR, kind))


def test_the_job_of_the_runtime_is_valid() -> None:
    validate_core(job_of_runtime())


@pytest.mark.parametrize(
    "kind, path, value, named",
    [
        ("Job", ("spec", "completions"), "two", "spec.completions"),
        ("Job", ("spec", "completionmode"), "Indexed", "completionmode"),  # strict: no unknown field
        ("Job", ("spec", "podFailurePolicy", "rules", 0, "action"), MISSING, "action"),
        ("Job", ("spec", "template", "spec", "terminationGracePeriodSeconds"), "2m", "terminationGracePeriodSeconds"),
        ("Job", ("spec", "template", "spec", "volumes", 1, "name"), MISSING, "name"),
        ("Job", ("spec", "template", "spec", "volumes", 1, "emptyDir", "medium"), 1, "emptyDir.medium"),
        ("Job", (*CONTAINER, "args"), "--epochs=12", "args"),
        ("Job", (*CONTAINER, "env", 0, "valueFrom", "fieldRef", "fieldPath"), MISSING, "fieldPath"),
        ("Job", (*CONTAINER, "resources", "limit"), {"memory": "4Gi"}, "limit"),
        ("Service", ("spec", "publishNotReadyAddresses"), "yes", "publishNotReadyAddresses"),
        ("Service", ("spec", "clusterIp"), "None", "clusterIp"),
        ("PersistentVolumeClaim", ("spec", "accessModes"), "ReadWriteMany", "accessModes"),
    ],
)
def test_a_broken_core_object_is_named(kind: str, path: tuple[str | int, ...], value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        validate_core(replace(manifest(PLAIN, kind), path, value))


@pytest.mark.parametrize(
    "kind, path, value, named",
    [
        ("TrainJob", ("spec", "trainer", "numNodes"), "two", "numNodes"),
        ("TrainJob", ("spec", "trainer", "numProcPerNode"), "auto", "numProcPerNode"),  # an int since 2.2
        ("TrainJob", ("spec", "trainer", "args"), "--epochs=12", "args"),
        ("TrainJob", ("spec", "runtimeRef"), MISSING, "runtimeRef"),
        ("TrainJob", ("spec", "runtimeRef", "name"), MISSING, "name"),
        ("TrainJob", ("spec", "podTemplateOverrides"), [{}], "podTemplateOverrides"),  # gone with 2.2
        ("TrainingRuntime", ("spec", "mlPolicy", "numNodes"), "2", "numNodes"),
        (
            "TrainingRuntime",
            ("spec", "mlPolicy", "torch", "numProcPerNode"),
            2,
            "torch.numProcPerNode",
        ),  # gone with 2.2
        ("TrainingRuntime", ("spec", "template", "spec", "failurePolicy", "maxRestart"), 3, "maxRestart"),
        ("TrainingRuntime", (*NODE, "name"), MISSING, "name"),
        ("TrainingRuntime", (*NODE, "template", "spec", "backoffLimit"), "0", "backoffLimit"),
    ],
)
def test_a_broken_object_of_the_trainer_is_named(
    kind: str, path: tuple[str | int, ...], value: Any, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        validate_trainer(replace(manifest(OPERATOR, kind), path, value))


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
    found = get_args_parser().parse_args([*flags, *trainer["args"]])
    assert (found.nnodes, found.nproc_per_node, found.node_rank) == ("2", "2", 1)
    assert (found.rdzv_backend, found.master_addr, found.master_port) == ("static", "ddp-node-0-0.ddp", 29500)
    assert_trains(found, nodes * ranks)


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

    found = get_args_parser().parse_args(words)
    assert int(found.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert found.rdzv_endpoint.partition(":")[0] == f"{name}-0.{manifest(PLAIN, 'Service')['metadata']['name']}"
    assert found.rdzv_id == name
    assert found.max_restarts == 0, "an agent that restarts hangs with that of a new pod"
    assert f"is_host={int(index == 0)}" in found.rdzv_conf.split(",")
    assert found.local_addr == f"{name}-{index}.{name}"
    assert_trains(found, int(found.nnodes) * int(found.nproc_per_node))


def assert_trains(found: Any, world_size: int) -> None:
    """What torchrun starts is a run of ddp.train that resumes, on the volume, in a number of ranks that its batch allows."""
    assert (found.module, found.training_script) == (True, "ddp.train")
    config = parse(TrainConfig, "ddp.train", None, found.training_script_args)
    assert config.auto_resume
    assert config.epochs == 12
    assert config.run_dir.parent == Path("/runs")
    config.check(world_size)
