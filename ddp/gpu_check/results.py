"""The numbers that a check is about, from the JSON that its command has written.

Each function takes the check's folder and returns numbers by name, or spreads: [median, lower quartile, upper quartile].
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from common.reporting.report import lost_to_data
from common.reporting.timing import Spread, paired_ratio
from common.training.metrics import read_metrics


def of_training(folder: Path) -> dict[str, Any]:
    """Medians over the windows but the first, in which kernels are chosen and caches filled; of memory the most."""
    windows = [record for record in read_metrics(folder / "run") if record["kind"] == "step"]
    counted = windows[1:] or windows
    found: dict[str, Any] = {"loss": windows[-1]["loss"]}
    for name in ("images_per_s", "data_wait", "gpu_ms_per_step", "gpu_busy", "mfu"):
        if values := [window[name] for window in counted if name in window]:
            found[name] = statistics.median(values)
    found["data_wait"] = lost_to_data(found["data_wait"], found.get("gpu_busy"))
    if peaks := [window["gpu_memory"] for window in windows if "gpu_memory" in window]:
        found["peak GB"] = 1e-9 * max(peaks)  # of the rank that needed most
    return found


def of_equivalence(folder: Path) -> dict[str, Any]:
    return {"difference": _json(folder, "equivalence")["difference"]}


def of_engines(folder: Path) -> dict[str, Any]:
    """For each model the time of the DDP by hand, in multiples of torch's."""
    ratios = {}
    for model in _json(folder, "engines")["models"]:
        seconds = model["seconds"]
        ratios[f"by hand / torch, {model['title']}"] = _spread(
            paired_ratio(seconds["handwritten"], seconds[model["reference"]])
        )
    return ratios


def of_overhead(folder: Path) -> dict[str, Any]:
    written = _json(folder, "overhead")
    seconds, against = written["seconds_per_step"], written["against"]
    return {f"trainer / {against}": _spread(paired_ratio(seconds["trainer"], seconds[against]))}


def of_safety(folder: Path) -> dict[str, Any]:
    return {name: _spread(Spread.of(ratios)) for name, ratios in _json(folder, "safety")["ratios"].items()}


def of_strategies(folder: Path) -> dict[str, Any]:
    """For each strategy its efficiency: how many times it is as fast as one process on one device, by its devices."""
    single, *others = _json(folder, "strategies")["strategies"]
    found = {}
    for one in others:
        name, devices = one["strategy"]["name"], one["strategy"]["devices"]
        speedup = paired_ratio(single["seconds"], one["seconds"])
        found[f"{name}, efficiency"] = [value / devices for value in _spread(speedup)]
    return found


def of_gaps(folder: Path) -> dict[str, Any]:
    return dict(_json(folder, "gaps")["per_step"])


def of_pinned(folder: Path) -> dict[str, Any]:
    """GB/s of a copy, and the milliseconds that the host spends in the call."""
    written, found = _json(folder, "pinned"), {}
    medians = {kind: statistics.median(seconds) for kind, seconds in written["device_seconds"].items()}
    for kind, seconds in medians.items():
        found[f"{kind}, GB/s"] = 1e-9 * written["bytes"] / seconds
        found[f"{kind}, ms of the host"] = 1e3 * statistics.median(written["host_seconds"][kind])
    return found | {"page-locked / ordinary": medians["ordinary"] / medians["page-locked"]}  # of the rates


def of_allreduce(folder: Path) -> dict[str, Any]:
    backend = _json(folder, "allreduce")["algorithms"][0]
    return {f"{size} B, bus GB/s": 1e-9 * bandwidth for size, bandwidth in backend["bus_bandwidth"].items()}


def of_timeline(folder: Path) -> dict[str, Any]:
    """The share of the all-reduces' time that is hidden behind backward, over all ranks and steps."""
    parts = [rank["parts"] for step in _json(folder, "steps")["steps"] for rank in step]
    whole = sum(part["all_reduce"] for part in parts)
    return {"hidden": sum(part["hidden"] for part in parts) / whole if whole else 1.0}


def _json(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return content


def _spread(spread: Spread) -> list[float]:
    return [spread.median, spread.low, spread.high]
