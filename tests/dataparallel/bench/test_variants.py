"""dataparallel/bench/variants.py: every variant is timed, and the one step by step gives the parts of its time."""

from __future__ import annotations

import pytest
import torch

from dataparallel.bench.variants import HANDWRITTEN, MODES, PLAIN, STEP_BY_STEP, build_variants


@pytest.mark.parametrize("mode", MODES)
def test_every_variant_is_timed(mode: str) -> None:
    threads = torch.get_num_threads()
    variants = build_variants("fashion-cnn", (torch.device("cpu"),) * 2, mode, 5)  # 5: so that two parts differ
    results = {name: variant() for name, variant in variants.items()}
    assert set(results) == {PLAIN, HANDWRITTEN, STEP_BY_STEP}
    assert all(seconds > 0 for seconds, _ in results.values())
    steps = ["scatter", "replicate", "forward", "gather"]
    if mode == "training":
        steps += ["loss", "backward", "reduce", "optimizer"]
    seconds, own = results[STEP_BY_STEP]
    assert sorted(own) == sorted(steps)
    assert min(own.values()) > 0 and sum(own.values()) <= seconds
    assert torch.get_num_threads() == threads
