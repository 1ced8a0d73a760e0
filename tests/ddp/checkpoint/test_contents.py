"""ddp/checkpoint/contents.py: what does not fit the job is refused before it is loaded, whatever the digests say."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.cli import from_settings
from common.distributed.process_group import find_dist_env, process_group
from common.errors import UsageError
from ddp.checkpoint import storage
from ddp.checkpoint.folder import Damaged
from ddp.checkpoint.state import manifest_of, restore, state_of_job, state_of_rank
from ddp.config import TrainConfig
from ddp.data import load_data
from ddp.evaluate import settings_of_run
from ddp.job import Job
from ddp.resilience.resume import check_identity
from ddp.train import build_job, train_step
from tests.ddp.checkpoint.samples import forge
from tests.ddp.jobs import small
from tests.support.launch import run_ranks

SETTINGS: dict[str, Any] = {"train_samples": 96, "test_samples": 20, "batch_size": 24, "model": "fashion-cnn"}
Forgery = Callable[[Any], Any]


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


def saved(folder: Path, **settings: Any) -> tuple[Job, Path]:
    """A job of one rank after one step, and its checkpoint. Within a process group."""
    config = small(**SETTINGS, run_dir=folder, **settings)
    env = find_dist_env("cpu")
    job = build_job(config, env, load_data(config, env))
    job.sampler.set_epoch(0)
    train_step(job, iter(job.loader))
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


def attempt(job: Job, path: Path) -> str | None:
    try:
        take_up(job, path)
    except UsageError as error:
        return str(error)
    return None


MOMENTUM = ("state", 0, "momentum_buffer")


@pytest.mark.parametrize(
    ("kind", "place", "value", "problem"),
    [
        (
            "optimizer",
            MOMENTUM,
            torch.zeros(3),
            r"optimizer\.pt has momentum_buffer of parameter 0 as float32 \[3\] instead of",
        ),
        ("optimizer", MOMENTUM, torch.zeros(1, dtype=torch.int8), r"as int8 \[1\] instead of float32"),
        ("optimizer", MOMENTUM, "text", "as a str"),
        ("optimizer", ("state", 0), {"exp_avg": torch.zeros(3)}, "has the state .*exp_avg.* for parameter 0"),
        ("optimizer", ("state", 3), ..., "lacks the state of parameter 3"),
        ("optimizer", ("state", 3), {}, "lacks the state of parameter 3"),
        ("optimizer", ("state", 3, "momentum_buffer"), None, "lacks the state of parameter 3"),
        ("optimizer", ("state",), {}, "lacks the state of parameter 0"),
        ("optimizer", ("state", 99), {}, "a state of parameters that the model has not"),
        ("optimizer", ("state",), [], "a state of parameters that the model has not"),
        ("optimizer", ("param_groups",), 3, "param_groups that are no list of dicts"),
        ("optimizer", ("param_groups", 0, "params"), [0], "the parameters of another model"),
        ("optimizer", ("param_groups", 0, "params"), ..., "the parameters of another model"),
        ("optimizer", (), {}, r"holds \[\] instead of \['param_groups', 'state'\]"),
        ("ranks", (), ["text"], "has 'text' for rank 0"),
        ("ranks", (), [], "has 0 ranks instead of 1"),
        ("ranks", (0, "window"), (1, 2), r"has the window \(1, 2\) for rank 0"),
        ("ranks", (0, "window"), (1, 2, "3", 4, 5), "has the window "),
        ("ranks", (0, "buffers"), {}, r"lacks features\.\S+, for rank 0"),
        ("ranks", (0, "buffers", "features.1.running_mean"), torch.zeros(2), r"as float32 \[2\] instead of float32"),
        ("model", (), {}, r"model\.pt lacks features\.0\.weight"),
        ("model", ("extra",), torch.zeros(3), "has 'extra', which the model has not"),
        ("model", ("features.0.weight",), 3, r"has features\.0\.weight as a int"),
        ("model", ("features.0.weight",), torch.zeros(3).to_sparse(), "not all in memory, once each|cannot be loaded"),
        ("model", ("features.0.weight",), torch.zeros(3, dtype=torch.int64), "as int64"),
        ("optimizer", MOMENTUM, torch.zeros(1).expand(32, 1, 3, 3), "not all in memory, once each"),
        ("model", ("features.0.weight",), torch.zeros(3), "was trained on other data than is there now"),
    ],
)
def test_contents_that_do_not_fit_are_refused(
    whole: tuple[Job, Path], path: Path, kind: str, place: tuple[Any, ...], value: Any, problem: str
) -> None:
    job, _ = whole
    assert attempt(job, path) is None
    content = storage.read(path, kind)
    torch.save(changed(content, place, value) if place else value, path / f"{kind}.pt")
    forge(path)
    with pytest.raises(UsageError, match=problem):
        take_up(job, path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"progress": {}}, "has a progress without scaler, windows, skipped_steps, accuracy, best"),
        ({"best": "text"}, "has a progress whose best is 'text'"),
        ({"best": {"name": 3, "accuracy": 0.5}}, "whose best is "),
        ({"windows": [{}]}, r"whose windows is \[\{\}\]"),
        ({"windows": 3}, "whose windows is 3"),
        ({"scaler": {"scale": 1.0}}, "whose scaler is "),
        ({"scaler": []}, r"whose scaler is \[\]"),
        ({"skipped_steps": -1}, "whose skipped_steps is -1"),
        ({"skipped_steps": True}, "whose skipped_steps is True"),
        ({"accuracy": "high"}, "whose accuracy is 'high'"),
    ],
)
def test_a_progress_that_no_run_has_written_is_damage(path: Path, changes: dict[str, Any], problem: str) -> None:
    progress = json.loads((path / "manifest.json").read_bytes())["facts"]["progress"]
    forge(path, progress={} if changes == {"progress": {}} else progress | changes)
    with pytest.raises(Damaged, match=rf"manifest\.json .*{problem}"):
        storage.verify(path)


@pytest.mark.parametrize("facts", [{"step_in_epoch": 99}, {"step_in_epoch": -1}, {"epoch": 5}])
def test_numbers_of_steps_that_do_not_add_up_are_damage(
    whole: tuple[Job, Path], path: Path, facts: dict[str, int]
) -> None:
    job, _ = whole
    forge(path, **facts)
    name = storage.name_of(facts.get("epoch", 0), 1)
    moved = path.rename(path.with_name(name))
    with pytest.raises(UsageError, match=r"has step -?\d+ of an epoch of 4|is less than the 5 epochs"):
        take_up(job, moved)


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


# A forged value: of another type, of another size, or nothing.
NONSENSE: list[Any] = [
    ..., None, "text", "", -1, 10**30, 1e300, float("nan"), True, [], {}, (), [1, 2], {"a": 1}, b"bytes", 2.5, -(2**63),
    torch.zeros(3), torch.zeros(0), torch.zeros(()), torch.zeros(3, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.bool),
    torch.zeros(1).expand(32, 1, 3, 3), torch.zeros(4).to_sparse(), torch.full((3,), float("nan")), torch.zeros(10**6),
]  # fmt: skip


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in nested dicts and lists."""
    found = [path]
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


def forged(path: Path, random_: random.Random) -> str:
    """Forge one place of a checkpoint, with digests that match; returns what was done."""
    kind = random_.choice(["model", "optimizer", "ranks", "manifest", "manifest"])
    if kind == "manifest":
        content = json.loads((path / "manifest.json").read_bytes())["facts"]
        values = [value for value in NONSENSE if not isinstance(value, Tensor | bytes | tuple)]
    else:
        content, values = storage.read(path, kind), NONSENSE
    place, value = random_.choice(places(content)), random_.choice(values)
    if not place and value is ...:
        value = {}
    made = changed(content, place, value) if place else value
    if kind == "manifest":
        if not isinstance(made, dict):
            made = {"facts": made}
        forge(
            path, **dict.fromkeys(content.keys() - made.keys(), ...), **{n: v for n, v in made.items() if n != "facts"}
        )
    else:
        torch.save(made, path / f"{kind}.pt")
        forge(path)
    return f"{kind} {place}: {value!r}"


def forgeries(folder: Path, seed: int, cases: int) -> list[str]:
    """On one rank: what became of each forged checkpoint; raises what is no user error."""
    with process_group(threads=1):
        whole = [saved(folder / name, optimizer=name) for name in ("sgd", "adam")]
        return [forgery(folder / str(number), whole, random.Random(1000 * seed + number)) for number in range(cases)]


def forgery(folder: Path, whole: list[tuple[Job, Path]], random_: random.Random) -> str:
    """What was forged, and what became of it."""
    job, path = random_.choice(whole)
    copied = Path(shutil.copytree(path, folder / path.name))
    what = forged(copied, random_)
    try:
        told = attempt(job, copied)
    except BaseException as error:
        raise AssertionError(what) from error
    shutil.rmtree(folder)
    assert attempt(job, path) is None  # the job still works
    assert told is None or "\n" not in told, what
    return f"{what} -> {told}"


# Not used: the settings of the run before and its optimizer's groups, which the present flags replace. And numbers that a run
# may have.
TAKEN = re.compile(
    r"optimizer \('param_groups', 0, |optimizer \('state', \d+, 'step'\)|manifest \('(config|versions|extra)'"
    r"|manifest \('(seed|dataset|model|optimizer|batch_size|grad_accumulation_steps)',\)"
    r"|manifest \('progress', '(accuracy|skipped_steps|best|scaler|windows)'"
)


def check(folder: Path, seed: int, cases: int) -> None:
    (told,) = run_ranks(forgeries, 1, folder, seed, cases, timeout_s=100 + cases, fresh=True)
    assert len(told) == cases
    refused = [line for line in told if not line.endswith(" -> None")]
    assert len(refused) > 0.8 * cases
    assert [line for line in told if line.endswith(" -> None") and not TAKEN.match(line)] == []


def test_forged_checkpoints_are_refused_in_one_line(tmp_path: Path) -> None:
    check(tmp_path, seed=0, cases=60)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_forged_checkpoints(tmp_path: Path) -> None:
    check(tmp_path, seed=1, cases=1000)
