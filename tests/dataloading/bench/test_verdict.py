"""The advice, from numbers that are made up, and from a folder that is slow on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataloading.bench.settings import Library, Setting, varying
from dataloading.bench.sweep import LoadingMeasurement, measure
from dataloading.bench.verdict import changes, explain, recommend

IMAGES = 320


def measured(seconds: list[float], first_batch: float = 0.01, **setting: object) -> LoadingMeasurement:
    return LoadingMeasurement(Setting(**setting), IMAGES, [first_batch] * len(seconds), seconds)  # type: ignore[arg-type]


def test_the_cheapest_of_those_that_cannot_be_told_apart_is_chosen() -> None:
    sweep = [
        measured([2.0, 2.2, 2.1], workers=1),
        measured([1.01, 1.21, 1.1], workers=2),
        measured([1.02, 1.2, 1.11], workers=3),
        measured([1.0, 1.2, 1.1], workers=4),
    ]
    assert recommend(sweep) is sweep[1]


def test_a_rate_is_the_median_of_the_runs_as_in_the_figure() -> None:
    assert measured([1.0, 2.0]).images_per_s == (IMAGES / 1.0 + IMAGES / 2.0) / 2


def test_rounds_in_bad_weather_do_not_decide() -> None:
    weather = [1.0, 5.0, 1.0, 1.0, 9.0]
    sweep = [
        measured([1.2 * w for w in weather], workers=1),
        measured([1.0 * w for w in weather], workers=2),
    ]
    assert recommend(sweep) is sweep[1]


def test_who_was_faster_in_a_quarter_of_the_rounds_is_not_called_slower() -> None:
    sweep = [measured([0.9, 1.2, 1.2, 1.2], workers=1), measured([1.0, 1.0, 1.0, 1.0], workers=2)]
    sweep[0].steady[1] = 0.9
    assert recommend(sweep) is sweep[0]


def advice(setting: Setting) -> list[str]:
    return [one.label(varying([setting, one])) for one in changes(setting, 2)]


def test_each_choice_that_may_be_the_limit_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataloading.bench.verdict.installed", lambda: ("simplejpeg", "pillow"))
    usual = Setting(workers=2)
    assert advice(usual) == ["fast", "decoder simplejpeg", "fetch-threads 16", "persistent-workers"]
    assert "batch-size 32" in advice(Setting(workers=2, batch_size=1))
    assert "2 workers" in advice(Setting(workers=4))
    assert {"fetch-threads 1", "fetch-threads 32"} < {*advice(Setting(workers=2, fetch_threads=16))}
    assert "augmentation none" in advice(Setting(workers=2, augmentation="affine"))


def test_a_change_is_advised_if_it_was_faster_in_its_rounds() -> None:
    """A change is advised if it was faster.

    Claim (dataloading/README.md): the verdict names the changes that help, as measured.
    """
    now = measured([1.0, 2.0, 4.0], workers=2)
    tried = [
        measured([0.5, 1.0, 2.0], workers=2, loader="fast"),
        measured([0.1, 0.2, 0.4], workers=2, batch_size=64),
        measured([0.98, 1.99, 3.97], workers=2, decoder="simplejpeg"),  # within the noise
        measured([0.5, 2.1, 4.1], workers=2, fetch_threads=4),  # in one round
    ]
    assert explain(now, tried, samples=10**9) == [
        "measured: with batch-size 64, an epoch is 10.00 [10.00 to 10.00] times as fast",
        "measured: with fast, an epoch is 2.00 [2.00 to 2.00] times as fast",
    ]
    assert explain(now, tried[2:], samples=10**9) == ["no faster, measured: decoder simplejpeg, fetch-threads 4"]


def test_what_starting_workers_costs_depends_on_the_length_of_an_epoch() -> None:
    now = measured([1.0, 1.0], first_batch=3.0, workers=2)
    kept = [measured([1.0, 1.0], workers=2, persistent_workers=True)]
    assert "with persistent-workers, an epoch is 3.96" in explain(now, kept, samples=IMAGES)[0]
    assert explain(now, kept, samples=10**6) == ["no faster, measured: persistent-workers"]


@pytest.mark.examples
@pytest.mark.examples
def test_threads_are_the_cure_for_files_that_open_late(pictures: Path) -> None:
    library = Library(str(pictures))
    late = Setting(workers=0, batch_size=4, latency_ms=50.0)
    threads = [one for one in changes(late, 2) if one.fetch_threads > 1]
    now, *tried = measure(library, [late, *threads], batches=2, repeats=2, after_round=lambda: False)
    assert "with fetch-threads" in explain(now, tried, samples=1000)[0]
