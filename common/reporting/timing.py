"""Timings that can be trusted on a noisy machine: candidates interleaved in one run, medians, paired ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Spread:
    """A median with the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The median and quartiles of at least two values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} [{self.low:{spec}} to {self.high:{spec}}]"


def interleave(
    candidates: Mapping[str, Callable[[], float]],
    rounds: int,
    warmup: int = 1,
    after_round: Callable[[int], None] | None = None,
) -> dict[str, list[float]]:
    """Time candidates in turn, ``rounds`` times, so that all meet the same weather.

    The order rotates by one each round, so that none always runs in another's wake.

    :param candidates: functions that do their work once and return its seconds
    :param warmup: rounds that come first and do not count
    :param after_round: called with the number of rounds done, for a progress bar
    :returns: for each candidate its seconds, one per round, in the rounds' order
    """
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            taken = candidates[name]()
            if number >= warmup:
                seconds[name].append(taken)
        if after_round is not None:
            after_round(number + 1)
    return seconds


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait until all is done that was queued on the GPUs among them, as a clock must that is to tell its time."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def paired_ratio(seconds: list[float], reference: list[float]) -> Spread:
    """``seconds / reference`` round by round: noise that both met in the same round cancels."""
    return Spread.of([a / b for a, b in zip(seconds, reference, strict=True)])
