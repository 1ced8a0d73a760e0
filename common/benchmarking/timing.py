"""Timings for a noisy machine: variants interleaved in one run, medians, paired ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

NOISE = 0.03  # variants that differ by less count as equal


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

    def within_noise(self, noise: float = 0.0) -> bool:
        """Whether a ratio, or its noise, may be 1: then neither of the two is called faster."""
        return self.low <= 1 + noise and self.high >= 1 - noise

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} [{self.low:{spec}} to {self.high:{spec}}]"


def interleave(
    variants: Mapping[str, Callable[[], float]],
    rounds: int,
    warmup: int = 1,
    after_round: Callable[[], object] = lambda: False,
) -> dict[str, list[float]]:
    """Time variants in turn, ``rounds`` times, so that slow phases of the machine affect all of them.

    The order rotates by one each round, so that no variant always follows the same other one.

    :param variants: functions that do their work once and return its seconds
    :param rounds: measured rounds
    :param warmup: rounds before them that do not count
    :param after_round: called after each round; if it returns something true, the rounds end as soon as two have been measured
    :returns: for each variant its seconds, one entry per round
    """
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            measured = variants[name]()
            if number >= warmup:
                seconds[name].append(measured)
        if after_round() and number > warmup:
            break
    return seconds


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait for all work queued on the GPUs among ``devices``. Call it before a clock is read."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def paired_ratios(seconds: list[float], reference: list[float]) -> list[float]:
    """``seconds / reference`` round by round: noise that affects both in the same round cancels."""
    return [a / b for a, b in zip(seconds, reference, strict=True)]


def paired_ratio(seconds: list[float], reference: list[float]) -> Spread:
    """The median and quartiles of :func:`paired_ratios`."""
    return Spread.of(paired_ratios(seconds, reference))


def share_of_limit(share: float) -> str:
    """A share in percent. More than 100 % cannot be: that is a doubt about the measurement, and no result."""
    return (
        f"{share:.0%}"
        if share <= 1
        else "? (more than the limit, so something disturbed one of the two: measure again)"
    )
