"""ddp/fast.py: what ``--fast`` chooses, and what a run that goes on keeps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

from ddp.config import TrainConfig
from ddp.rendezvous.process_group import process_group
from ddp.resilience import complete_settings
from tests.support.launch import run_forked, run_ranks

SHARED = {"strategy": "handwritten", "all_reduce": "shared-memory"}
# The flags, the ranks that have instructions for bf16, the hosts; and what is chosen.
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], int, dict[str, Any]]] = {
    "all": ({}, (0, 1), 1, SHARED | {"precision": "bf16"}),
    "no bf16 on a rank": ({}, (0,), 1, SHARED),
    "two hosts": ({}, (0, 1), 2, {"precision": "bf16"}),
    "fp32 given": ({"precision": "fp32"}, (0, 1), 1, SHARED),
    "torch given": ({"strategy": "torch"}, (), 1, {"all_reduce": "shared-memory"}),
    "naive given": ({"strategy": "naive"}, (), 1, {"strategy": "naive"}),
    "zero2 given": ({"strategy": "zero2"}, (), 1, {"strategy": "zero2", "all_reduce": "shared-memory"}),
    "zero2 on two hosts": ({"strategy": "zero2"}, (), 2, {"strategy": "zero2"}),
    "zero2 and fp32 given": (
        {"strategy": "zero2", "precision": "fp32"},
        (),
        1,
        {"strategy": "zero2", "all_reduce": "shared-memory"},
    ),
    "handwritten on two hosts": ({"strategy": "handwritten"}, (), 2, {"strategy": "handwritten"}),
    "ring given": ({"all_reduce": "ring"}, (), 1, {"strategy": "handwritten", "all_reduce": "ring"}),
    "compressed": ({"gradient_precision": "bf16"}, (), 1, SHARED | {"gradient_precision": "bf16"}),
}


def choose(configs: list[TrainConfig], with_bf16: list[tuple[int, ...]], hosts: list[int]) -> list[TrainConfig]:
    """The choice for each, on ranks that seem to be on so many hosts."""
    chosen = []
    with process_group() as env:
        for config, ranks, count in zip(configs, with_bf16, hosts, strict=True):
            seeming = dataclasses.replace(env, local_world_size=2 // count, host=f"host{env.rank}")
            with mock.patch("ddp.fast.multiplies_bf16", lambda _, ranks=ranks: env.rank in ranks):
                chosen.append(complete_settings(config, seeming))
    return chosen


def test_the_choice(tmp_path: Path) -> None:
    """The choice follows from the flags, the hosts and the processors, and gives the settings of these flags."""
    flags, with_bf16, hosts, expected = zip(*CASES.values(), strict=True)
    configs = [TrainConfig(fast=True, run_dir=tmp_path, **given) for given in flags]
    for chosen in run_ranks(choose, 2, configs, with_bf16, hosts):
        plain = [dataclasses.replace(one, fast=False) for one in chosen]
        assert dict(zip(CASES, plain, strict=True)) == {
            name: TrainConfig(run_dir=tmp_path, **settings) for name, settings in zip(CASES, expected, strict=True)
        }


def test_a_run_that_goes_on_keeps_what_was_chosen(tmp_path: Path) -> None:
    """The recorded choice counts where the run goes on, unless it cannot run there; a flag overrules it."""
    recorded = SHARED | {"fast": True, "precision": "bf16"}
    (tmp_path / "config.json").write_text(json.dumps({"dataset_fingerprint": "", "config": recorded}))
    config = TrainConfig(fast=True, resume=True, run_dir=tmp_path)
    given = dataclasses.replace(config, precision="fp32")
    anew = TrainConfig(fast=True, overwrite=True, run_dir=tmp_path)
    chosen = run_ranks(choose, 2, [config, config, given, anew], [(0, 1), (), (), ()], [1, 2, 1, 1])[1]
    shared, torch = ("handwritten", "shared-memory"), ("torch", None)
    assert [(one.strategy, one.all_reduce, one.precision) for one in chosen] == [
        (*shared, "bf16"), (*torch, "bf16"), (*shared, "fp32"), (*shared, "fp32"),
    ]  # fmt: skip


def test_the_log_says_what_and_why(tmp_path: Path) -> None:
    """The first lines of a run name the choice and its reason, and config.json records it."""
    flags = (
        f"--fast --train-samples 576 --test-samples 100 --epochs 1 --precision fp32 --device cpu --run-dir {tmp_path}"
    )
    rank_0, _ = run_forked("ddp.train", *flags.split(), world_size=2)
    assert rank_0.returncode == 0, rank_0.stderr
    assert (
        "--fast: --strategy handwritten --all-reduce shared-memory, since all ranks are on this node; --precision fp32, as given"
        in rank_0.stderr
    )
    recorded = json.loads((tmp_path / "config.json").read_text())["config"]
    assert recorded["fast"] and recorded["all_reduce"] == "shared-memory"
