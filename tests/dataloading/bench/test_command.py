"""The loader benchmark and the ladder, and their parts."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from common.benchmarking.other_work import OtherWork
from common.command_line.cli import parse
from common.data.datasets import BatchKey
from common.machine import usable_cores
from dataloading import ladder
from dataloading.bench import __main__ as bench
from dataloading.bench.__main__ import LoadingBenchConfig
from dataloading.bench.settings import LOADERS, Library, Listed, Setting, varying
from dataloading.bench.stages import measure_stages
from dataloading.bench.sweep import measure
from dataloading.dataset.storage import LocalFolder
from tests.dataloading.faults import Traces
from tests.support.launch import run_forked
from tests.support.user_errors import UserError


def config(*arguments: str) -> LoadingBenchConfig:
    return parse(LoadingBenchConfig, "dataloading.bench", None, arguments)


def test_all_combinations_are_tried_without_equivalent_ones() -> None:
    settings = config("--workers", "0,1", "--prefetch-factor", "2,4", "--batch-size", "8,16").settings()
    assert len(settings) == 2 + 4  # without workers there is nothing to prefetch
    assert varying(settings) == ["workers", "batch_size", "prefetch_factor"]
    assert len(config("--workers", "0,2", "--loader", "stock,fast", "--fetch-threads", "1,4").settings()) == 4 + 3
    assert max(setting.workers for setting in config().settings()) == usable_cores() + 2


def test_every_kind_of_setting_is_measured_and_leaves_nothing(pictures: Path) -> None:
    """Every kind of setting is measured and leaves nothing.

    Claim (dataloading/README.md, 5): a folder can be served with latency.
    """
    settings = [Setting(loader=loader, workers=workers, batch_size=4) for loader in LOADERS for workers in (0, 1)]
    settings += [
        Setting(workers=1, batch_size=4, fetch_threads=2, latency_ms=0.1),
        Setting(workers=2, batch_size=4, persistent_workers=True, prefetch_factor=3),
        Setting(loader="fast", workers=2, batch_size=4, augmentation="affine"),
    ]
    settings = list(dict.fromkeys(setting.canonical() for setting in settings))
    library = Library(str(pictures), image_size=16)
    before = Traces()
    sweep = measure(library, settings, batches=2, repeats=2, after_round=lambda: False)
    assert Traces() == before
    assert [measured.setting for measured in sweep] == settings
    for measured in sweep:
        assert measured.images == 2 * 4
        assert len(measured.steady) == len(measured.first_batch) == 2


@pytest.mark.parametrize(
    ("setting", "stages"),
    [
        (Setting(workers=0), ["read", "decode", "resize", "transform", "collate"]),
        (
            Setting(workers=1, augmentation="affine"),
            ["read", "decode", "resize", "augment", "transform", "collate", "IPC"],
        ),
        (Setting(loader="fast", workers=1), ["read", "decode", "resize"]),
    ],
)
def test_the_stages_that_a_setting_has_are_timed(pictures: Path, setting: Setting, stages: list[str]) -> None:
    library = Library(str(pictures), image_size=16)
    costs = measure_stages(library.dataset(setting), setting)
    assert list(costs) == stages
    assert all(seconds >= 0 for seconds in costs.values())


def test_a_busy_machine_has_stages_and_is_told_how_busy(
    monkeypatch: pytest.MonkeyPatch, pictures: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(OtherWork, "doubt", lambda _: "other programs left 0.3 of 2 cores")
    sizes = ("--image-size", "16", "--batch-size", "4", "--batches", "2", "--repeats", "2", "--workers", "0")
    chosen = config("--path-to-folder", str(pictures), *sizes, "--output", str(tmp_path))
    printed = bench.report(chosen, bench.run(chosen))
    assert "no verdict: other programs left 0.3 of 2 cores" in printed
    assert "decode: " in printed


def test_the_ceiling_decodes_the_files_of_its_batch(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [path.read_bytes() for path in sorted(pictures.glob("*/*.jpg"))]
    decoded: list[bytes] = []
    monkeypatch.setattr("dataloading.ladder.get_decoder", lambda name: lambda data, out: decoded.append(data))
    (samples,) = ladder.Ceiling(images, "pillow").__getitems__(BatchKey(0, np.array([3, 1])))
    assert len(samples) == 2
    assert decoded == [images[3], images[1]]


def test_the_command_ends_with_a_verdict_and_leaves_its_results(pictures: Path, tmp_path: Path) -> None:
    (done,) = run_forked(
        *("dataloading.bench", "--path-to-folder", str(pictures), "--workers", "0,1", "--loader", "stock,fast"),
        *("--image-size", "16", "--batches", "2", "--repeats", "2", "--batch-size", "4", "--output", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert len(content["settings"]) == 4
    # On a machine that is busy, there are the stages, and instead of the verdict it is said how busy.
    verdict = "best setting: " if content["verdict"]["recommended"] else "no verdict: other programs left"
    for words in ("images/s", "sweep.png", "decode", verdict):
        assert words in done.stdout
    assert content["machine"]["usable_cores"] == usable_cores()
    assert (tmp_path / "sweep.png").is_file()


def test_rungs_and_ceiling_share_a_random_sample_of_the_files(tmp_path: Path) -> None:
    for person in "AB":  # sorted, the first half of the names is of one class
        (tmp_path / person).mkdir()
        for number in range(50):
            (tmp_path / person / f"{number}.jpg").touch()
    storage = LocalFolder(str(tmp_path))
    names = Listed(storage, 50).names()
    assert names == Listed(storage, 50).names()
    assert len(set(names)) == 50
    assert 10 < sum(name.startswith("A/") for name in names) < 40
    assert sorted(Listed(storage).names()) == sorted(storage.names())


def test_the_ladder_ends_with_a_picture(pictures: Path, tmp_path: Path) -> None:
    augmentation = "affine"  # without one, it is among torchrun_examples.sh's
    (done,) = run_forked(
        *("dataloading.ladder", "--path-to-folder", str(pictures), "--batches", "1"),
        *("--repeats", "2", "--batch-size", "4", "--workers", "1", "--augmentation", augmentation),
        *("--output", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    rungs = [line for line in done.stdout.splitlines() if "[" in line]
    assert "the course's pipeline" in rungs[1]
    assert rungs[-1].split()[0] == "ceiling"
    assert "fast loader" in rungs[-2]
    assert (tmp_path / f"ladder-{augmentation}.png").is_file()
    assert json.loads((tmp_path / f"ladder-{augmentation}.json").read_text())["images_per_s"]["ceiling"]


@pytest.mark.parametrize("command", [bench, ladder])
def test_a_damaged_file_is_one_line(user_error: UserError, pictures: Path, tmp_path: Path, command: ModuleType) -> None:
    (tmp_path / "one.jpg").write_bytes(next(pictures.glob("*/*.jpg")).read_bytes()[:300])
    flags = ("--path-to-folder", tmp_path, "--output", tmp_path / "out")
    assert "one.jpg is damaged" in user_error(command.main, *flags)
