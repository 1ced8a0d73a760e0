"""The advice, from numbers that are made up."""

from __future__ import annotations

from dataloading.bench.settings import Setting
from dataloading.bench.stages import Stage, StageCosts
from dataloading.bench.sweep import LoadingMeasurement
from dataloading.bench.verdict import confidence, explain, recommend, wait_share, waiting_for

BATCHES = 10


def measured(seconds: list[float], first_batch: float = 0.01, **setting: object) -> LoadingMeasurement:
    return LoadingMeasurement(Setting(**setting), BATCHES, [first_batch] * len(seconds), seconds, [])  # type: ignore[arg-type]


def costs(**stages: tuple[float, float]) -> StageCosts:
    return StageCosts({name.replace("_", "-"): Stage(wall, cpu) for name, (wall, cpu) in stages.items()}, receiving=0.0)


DECODING = costs(open=(10e-6, 10e-6), decode=(200e-6, 200e-6))


def test_the_cheapest_of_those_that_cannot_be_told_apart_is_chosen() -> None:
    sweep = [
        measured([2.0, 2.2, 2.1], workers=1),
        measured([1.01, 1.21, 1.1], workers=2),
        measured([1.02, 1.2, 1.11], workers=3),
        measured([1.0, 1.2, 1.1], workers=4),
    ]
    recommendation = recommend(sweep)
    assert recommendation.chosen is sweep[1]
    assert recommendation.equals == sweep[2:]
    assert confidence(recommendation, ["workers"]) == "within noise of it, and no cheaper: 3 workers; 4 workers"


def test_a_clear_winner_says_how_much_slower_the_next_is() -> None:
    recommendation = recommend([measured([2.0, 3.0], workers=1), measured([1.0, 1.5], workers=2)])
    assert recommendation.chosen.setting.workers == 2
    assert confidence(recommendation, ["workers"]).startswith("the next takes 2.00 [2.00 to 2.00] times as long")


def test_rounds_in_bad_weather_do_not_decide() -> None:
    weather = [1.0, 5.0, 1.0, 1.0, 9.0]
    sweep = [
        measured([1.2 * w for w in weather], workers=1),
        measured([1.0 * w for w in weather], workers=2),
    ]
    assert recommend(sweep).chosen is sweep[1]


def test_who_was_faster_in_a_quarter_of_the_rounds_is_not_called_slower() -> None:
    sweep = [measured([0.9, 1.2, 1.2, 1.2], workers=1), measured([1.0, 1.0, 1.0, 1.0], workers=2)]
    sweep[0].steady[1] = 0.9
    assert recommend(sweep).chosen is sweep[0]


def test_what_limits_is_named() -> None:
    """The verdict names what limits the throughput.

    Claim (dataloading/README.md): the verdict names what limits.
    """
    setting = measured([1.0, 1.0], workers=2)

    def why(stage_costs: StageCosts) -> str:
        return explain(setting, stage_costs, samples=100_000, cores=2)

    assert why(DECODING).startswith(
        "decode-bound: 95 % of an image's 210 µs of work goes into decoding, on 2 of 2 cores"
    )
    assert why(costs(decode=(2e-4, 2e-4), IPC=(4e-4, 4e-4))).startswith("transfer-bound: 67 %")
    assert why(costs(decode=(2e-4, 2e-4), augment=(4e-4, 4e-4))).startswith("augment-bound")
    assert why(costs(open=(5e-4, 5e-4), decode=(2e-4, 2e-4))).startswith("storage-bound")


def test_waiting_for_storage_is_cured_by_more_requests_not_by_more_cores() -> None:
    slow = costs(open=(20e-3, 0.1e-3), decode=(0.4e-3, 0.4e-3))
    text = explain(measured([1.0, 1.0], workers=2), slow, samples=100_000, cores=2)
    assert text.startswith("latency-bound: 98 %")
    assert "--fetch-threads 41" in text


def test_enough_requests_at_a_time_make_it_a_question_of_cores_again() -> None:
    slow = costs(open=(20e-3, 0.1e-3), decode=(0.4e-3, 0.4e-3))
    text = explain(measured([1.0, 1.0], workers=2, fetch_threads=64), slow, samples=100_000, cores=2)
    assert text.startswith("waiting for storage is hidden by 128 requests at a time; now decode-bound")


def test_a_main_process_that_only_receives_is_the_limit() -> None:
    busy = StageCosts({"decode": Stage(2e-4, 2e-4)}, receiving=1e-3)
    text = explain(measured([0.3, 0.3], workers=16), busy, samples=100_000, cores=16)
    assert text.startswith("transfer-bound: the main process is busy")


def test_a_first_batch_that_one_worker_makes_alone_is_not_its_start() -> None:
    slow = costs(decode=(10e-3, 10e-3))
    setting = measured([0.4, 0.4], first_batch=0.33, workers=8)
    assert explain(setting, slow, samples=320, cores=8).startswith("decode-bound")


def test_a_short_epoch_is_all_start() -> None:
    text = explain(measured([1.0, 1.0], first_batch=3.0, workers=2), DECODING, samples=320, cores=2)
    assert text.startswith("startup-bound")
    assert "--persistent-workers yes" in text
    threads = explain(
        measured([1.0, 1.0], first_batch=3.0, workers=2, loader="fast-threads"), DECODING, samples=320, cores=2
    )
    assert threads.startswith("decode-bound")  # there is nothing to start


def test_training_waits_until_loading_is_as_fast_as_its_step() -> None:
    sweep = [
        measured([2.0, 2.0], workers=0),
        measured([2.0, 2.0], workers=1),
        measured([1.0, 1.0], workers=2),
    ]  # 200, 200 and 100 ms per batch
    assert wait_share(sweep[0], 0.2) == 0.5
    assert wait_share(sweep[1], 0.2) == 0
    assert wait_share(sweep[2], 0.05) == 0.5
    assert waiting_for(sweep, 0.2, ["workers"]) == "a training step of 200 ms does not wait for its batch with 1 worker"
    assert "waits for data 50 % of the time even with 2 workers" in waiting_for(sweep, 0.05, ["workers"])
    assert "2.0 times as fast" in waiting_for(sweep, 0.05, ["workers"])
