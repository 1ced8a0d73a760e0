"""ddp/checkpoint/contents.py: what does not fit the job is refused before it is loaded, whatever the digests say."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.cli import from_settings
from common.distributed.process_group import find_dist_env, process_group
from common.errors import UsageError
from ddp.checkpoint import storage
from ddp.checkpoint.folder import Damaged
from ddp.checkpoint.state import manifest_of, restore, state_of_job, state_of_rank
from ddp.config import TrainConfig
from ddp.evaluate import settings_of_run
from ddp.job import Job
from ddp.resilience.resume import check_identity
from tests.ddp.checkpoint.samples import forge
from tests.ddp.jobs import small, start

SETTINGS: dict[str, Any] = {"train_samples": 96, "test_samples": 20, "batch_size": 24, "model": "fashion-cnn"}


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of nested dicts and lists with another value in one place; ``...`` removes it."""
    made = copy.deepcopy(content)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return made


def saved(folder: Path) -> tuple[Job, Path]:
    """A job of one rank after one step, and its checkpoint. Within a process group."""
    config = small(**SETTINGS, run_dir=folder)
    env = find_dist_env("cpu")
    job, _ = start(config, env, steps=1)
    return job, storage.write(folder, manifest_of(job), state_of_job(job, [state_of_rank(job)]))


def take_up(job: Job, path: Path) -> None:
    """What a resumed run and ``ddp.evaluate`` do with a checkpoint. Within a process group."""
    manifest = storage.verify(path)
    check_identity(manifest, job.config, job.data)
    settings_of_run(path, manifest)
    storage.load_weights(job.network, path)
    restore(job, path, manifest)
    job.optimizer.step()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Path]]:
    """A job and its checkpoint, which no test changes."""
    with process_group(threads=1):
        yield saved(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def path(whole: tuple[Job, Path], tmp_path: Path) -> Path:
    """A copy of that checkpoint, to be forged."""
    return Path(shutil.copytree(whole[1], tmp_path / whole[1].name))


MOMENTUM = ("state", 0, "momentum_buffer")


@pytest.mark.parametrize(
    ("kind", "place", "value", "problem"),
    [
        (
            "optimizer",
            MOMENTUM,
            torch.zeros(3),
            r"has momentum_buffer:features\.0\.weight of shape \[3\] instead of",
        ),
        ("optimizer", MOMENTUM, torch.zeros(32, 1, 3, 3, dtype=torch.int8), "in torch.int8 instead of torch.float32"),
        (
            "optimizer",
            ("state", 0),
            {"exp_avg": torch.zeros(3)},
            r"has exp_avg:features\.0\.weight, which the run has not",
        ),
        ("optimizer", ("state", 3), ..., r"lacks the optimizer's state of features\.1\.bias"),
        ("optimizer", ("state", 3, "momentum_buffer"), None, r"lacks the optimizer's state of features\.1\.bias"),
        ("optimizer", ("state", 99), {}, "holds something else than a run writes"),
        ("model", (), [1], "holds a list instead of a dict"),
        ("model", (), {}, r"model\.pt lacks features\.0\.weight"),
        ("model", ("extra",), torch.zeros(3), "has 'extra', which the model has not"),
        ("model", ("features.0.weight",), torch.zeros(3).to_sparse(), "not all in memory, once each|cannot be loaded"),
        ("model", ("features.0.weight",), torch.zeros(3, dtype=torch.int64), "as int64"),
        ("optimizer", MOMENTUM, torch.zeros(1).expand(32, 1, 3, 3), "not all in memory, once each"),
        ("model", ("features.0.weight",), torch.zeros(3), "was trained on other data than is there now"),
    ],
)
def test_contents_that_do_not_fit_are_refused(
    whole: tuple[Job, Path], path: Path, kind: str, place: tuple[Any, ...], value: Any, problem: str
) -> None:
    """Contents of the wrong kind, shape or dtype are refused with their place.

    Claim (ddp/README.md, 9): contents that do not fit the job are refused before they are loaded.
    """
    job, _ = whole
    take_up(job, path)
    content = storage.read(path, kind)
    torch.save(changed(content, place, value) if place else value, path / f"{kind}.pt")
    forge(path)
    with pytest.raises(UsageError, match=problem):
        take_up(job, path)


def test_settings_of_another_version_are_refused_by_evaluation(path: Path) -> None:
    config = json.loads((path / "manifest.json").read_bytes())["facts"]["config"]
    for change, words in (({"speed": 3}, "--speed=3"), ({"lr": "fast"}, "--lr"), ({"model": 5}, "--model")):
        forge(path, config=config | change)
        with pytest.raises(Damaged, match=f"has settings that this version does not take: .*{words}"):
            settings_of_run(path, storage.verify(path))


def test_settings_come_back_from_json() -> None:
    others: list[dict[str, Any]] = [
        {"augment": False, "precision": "fp16", "clip_norm": 1.0},
        {"dataset": "lfw", "resume": True},
    ]
    for settings in ({}, *others):
        config = TrainConfig(**settings)
        assert from_settings(TrainConfig, "ddp.train", json.loads(json.dumps(config.as_json()))) == config
