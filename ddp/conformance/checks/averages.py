"""Averages: after backward, every rank's gradients are the average over the ranks."""

from __future__ import annotations

from ddp.conformance.check import Wrap, check
from ddp.conformance.tools import alone, average, expect_same, gradients, inputs, layers, loss_of


@check
def gradients_are_the_average_of_the_ranks(wrap: Wrap) -> None:
    """After backward, every .grad is the average of what the ranks computed alone."""
    network = layers(3, 5, 2)
    expected = average(alone(network))
    model = wrap(network)
    loss_of(model(inputs())).backward()
    expect_same(gradients(network), expected)
