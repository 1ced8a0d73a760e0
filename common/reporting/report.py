"""The end of a run: its figures and its summary."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.data.datasets import Batch, ImageData
from common.files.atomic_files import write_json
from common.files.run_directory import METRICS_FILE, RESULTS, files_line
from common.reporting.run_figures import plot_confusion, plot_curves, plot_samples, plot_text
from common.training.evaluation import Evaluation
from common.training.metrics import TIMES, Record, read_metrics

SAMPLES_SHOWN = 32


def lost_to_data(data_wait: float, gpu_busy: float | None) -> float:
    """The share of a step in which training waits for its data.

    :param data_wait: the host's share. On a GPU, that is no loss while the GPU works on what is queued
    :param gpu_busy: the share of the time in which a GPU works on steps; None on a CPU
    """
    return data_wait if gpu_busy is None else min(data_wait, 1 - gpu_busy)


def data_verdict(waiting: float, remedies: Sequence[str] = ()) -> str:
    """In plain words, whether training waits for its data.

    :param waiting: see :func:`lost_to_data`
    :param remedies: flags that may bring the data sooner, to name should it come late
    """
    share = f"{100 * waiting:.0f} % of each step waits for data"
    if waiting < 0.1:
        return f"compute-bound: {share}"
    advice = f"; try {' or '.join(remedies)}" if remedies else ""
    return f"{'partly ' if waiting < 0.3 else ''}data-bound: {share}{advice}"


# For each metric of a GPU, how the summary shows it: its text, and what it is multiplied with.
GPU_METRICS = {
    "gpu_ms_per_step": ("{:.1f} ms per step", 1.0),
    "gpu_busy": ("working {:.0f} % of the time", 100.0),
    "mfu": ("{:.0f} % MFU", 100.0),
    "gpu_memory": ("at most {:.1f} GB of tensors", 1e-9),
}


def of_gpus(records: Sequence[Record]) -> dict[str, float]:
    """The medians of the windows' GPU metrics, and the most memory; nothing of a run on CPUs."""
    medians = {}
    for name in GPU_METRICS:
        values = [record[name] for record in records if type(record.get(name)) in (int, float)]
        if values:
            medians[name] = max(values) if name == "gpu_memory" else statistics.median(values)
    return medians


def gpu_line(medians: dict[str, float]) -> str:
    """:func:`of_gpus` as a line of the summary, or nothing."""
    parts = [text.format(unit * medians[name]) for name, (text, unit) in GPU_METRICS.items() if name in medians]
    return f"GPU: {', '.join(parts)}\n" if parts else ""


def finish(
    run_dir: Path,
    title: str,
    data: ImageData,
    shown: Batch,
    predictions: Tensor,
    result: Evaluation,
    epochs: int,
    remedies: Sequence[str] = (),
) -> str:
    """Draw the figures, write ``result.json``, and return the summary. For rank 0, when the run is complete.

    :param run_dir: which holds the run's ``metrics.jsonl``
    :param shown: samples of the test set
    :param predictions: their predicted classes
    :param result: that of the evaluation
    :param epochs: passes over the training set that are done; ``metrics.jsonl`` may have lost records of some
    :param remedies: as in :func:`data_verdict`
    """
    records = read_metrics(run_dir)
    recorded = [r for r in records if r["kind"] == "epoch" and r.keys() >= set(TIMES)]
    seconds = sum(r["seconds"] for r in recorded)
    totals: dict[str, Any] = {
        "epochs": epochs,
        "epochs_recorded": len(recorded),
        "train_seconds": seconds,
    }
    for name in ("images_per_s", "data_wait"):  # means over the time
        totals[name] = sum(r["seconds"] * r[name] for r in recorded) / seconds if seconds else None
    on_gpu = of_gpus(records)
    write_json(run_dir / "result.json", {**totals, **on_gpu, "test": result.as_dict(data.classes)})

    plot_curves(run_dir / "curves.png", records, title, data.unit)
    plot_confusion(run_dir / "confusion.png", result.confusion, data.classes, title)
    if data.is_text:
        texts, guesses = lines_of(data, shown, predictions)
        plot_text(run_dir / "samples.png", texts[:SAMPLES_SHOWN], guesses[:SAMPLES_SHOWN], title)
    else:  # the wrong ones first
        chosen = (shown.labels == predictions).byte().argsort(stable=True)[:SAMPLES_SHOWN]
        images, labels = shown.images[chosen].numpy(), shown.labels[chosen].tolist()
        title += ": samples of the test set, mistakes first, in red"
        plot_samples(run_dir / "samples.png", images, labels, predictions[chosen].tolist(), data.classes, title)
    times = "the times of training are lost: metrics.jsonl has no record of an epoch\n"
    if seconds:
        part = "" if len(recorded) == epochs else f" (in the {len(recorded)} epochs that metrics.jsonl has records of)"
        times = (
            f"{seconds:.0f} s of training, {totals['images_per_s']:,.0f} {data.unit}/s{part}\n"
            f"{data_verdict(lost_to_data(totals['data_wait'], on_gpu.get('gpu_busy')), remedies)}\n"
        )
    return (
        f"test accuracy {100 * result.accuracy:.2f} % after {epochs} epochs "
        f"({result.confusion.trace()} of {result.confusion.sum()} {data.test_unit})\n"
        f"{times}{gpu_line(on_gpu)}"
        f"{files_line(run_dir, (*RESULTS, METRICS_FILE))}"
    )


def lines_of(data: Any, shown: Batch, predictions: Tensor) -> tuple[list[str], list[str]]:
    """The lines of a few samples, and what was predicted for each of their characters; the first is given."""
    given = data.to_input(shown.images)[:, :1]
    predicted = predictions.where(shown.labels >= 0, shown.labels)
    texts, guesses = (list(map(data.text_of, torch.cat([given, rest], 1))) for rest in (shown.labels, predicted))
    return texts, guesses
