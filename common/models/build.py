"""The models: a small CNN, a wide MLP whose gradients are large, ResNet-18 and -50, a GPT, and the user's own models.

All but the GPT (common/models/gpt.py) take float images ``[n, channels, height, width]`` and return logits ``[n, classes]``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.command_line.cli import is_function_name
from common.command_line.functions import import_function
from common.errors import UsageError
from common.models.gpt import HEAD_WIDTH, TextModel
from common.models.modules import evaluating

RESNETS = ("resnet18", "resnet50")
MODELS = ("fashion-cnn", "mlp", *RESNETS)  # of images
TEXT_MODEL = "gpt"
# Minimum samples of a forward pass in training, where it is more than one. The last feature maps of a ResNet have one pixel for
# images of up to 32x32, and BatchNorm finds no variance in a single value.
LEAST_SAMPLES = dict.fromkeys(RESNETS, 2)
MLP_WIDTH = 2048
LEAST_SIDE = 8  # pixels; below, nothing is left after the pooling of fashion-cnn


class GPTSize(NamedTuple):
    """The size of ``gpt``, and where it is built.

    :param on_meta: without memory, on the meta device: for what shards it, which gives it values one unit at a time
    """

    width: int = 128
    layers: int = 4
    on_meta: bool = False


class FashionCNN(nn.Sequential):
    """Two conv-BN-ReLU-pool blocks of 32 and 64 channels, then 600, 120 and ``classes`` units; 1.5 M parameters at 28x28.

    :param dropout: probability, after the first fully connected layer; 0 makes the model deterministic
    """

    def __init__(self, channels: int, height: int, width: int, classes: int, dropout: float) -> None:
        features = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=3),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        remaining = [(side // 2 - 2) // 2 for side in (height, width)]
        classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64 * remaining[0] * remaining[1], 600),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(600, 120),
            nn.ReLU(),
            nn.Linear(120, classes),
        )
        super().__init__(OrderedDict(features=features, classifier=classifier))


class MLP(nn.Sequential):
    """Fully connected layers of 2048 units. Its gradients are large and its compute is small, so a step mostly
    synchronizes: 14.2 M parameters (57 MB in fp32) at 28x28, two flops per parameter and sample in forward."""

    def __init__(self, inputs: int, classes: int, dropout: float) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for width in (inputs, MLP_WIDTH, MLP_WIDTH, MLP_WIDTH):
            layers += [nn.Linear(width, MLP_WIDTH), nn.ReLU()]
        super().__init__(*layers, nn.Dropout(dropout), nn.Linear(MLP_WIDTH, classes))


def build_model(
    name: str, shape: tuple[int, int, int], classes: int, dropout: float = 0.0, size: GPTSize | None = None
) -> nn.Module:
    """Build a model for images of ``shape`` (channels, height, width), in fp32 on the CPU.

    :param name: one of :data:`MODELS`, :data:`TEXT_MODEL`, or ``module:function`` for ``function(shape, classes) -> nn.Module``
    :param dropout: of ``fashion-cnn`` and ``mlp``
    :param size: of ``gpt``
    :raises UsageError: when the function cannot be imported or called, or its result is no such module. Exceptions that the
        function itself raises pass as they are
    """
    channels, height, width = shape
    if is_function_name(name):
        return _build_own(name, shape, classes)
    if name == "fashion-cnn":
        if min(height, width) < LEAST_SIDE:
            raise UsageError(
                f"--model fashion-cnn needs images of {LEAST_SIDE}x{LEAST_SIDE} pixels or more, not {height}x{width}"
            )
        return FashionCNN(channels, height, width, classes, dropout)
    if name == "mlp":
        return MLP(channels * height * width, classes, dropout)
    if name in RESNETS:
        from torchvision import models  # takes a second to import

        model: nn.Module = getattr(models, name)(num_classes=classes)
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        return model
    if name == TEXT_MODEL:
        size = size or GPTSize()
        with torch.device("meta" if size.on_meta else "cpu"):
            return TextModel(classes, size.width, size.layers, context=width)  # a line of text is an image of one row
    raise ValueError(f"unknown model {name!r}; there are {', '.join(MODELS)}, {TEXT_MODEL} and module:function")


def require_heads(width: int) -> None:
    """:raises UsageError: when the heads of the GPT's attention do not divide its width"""
    if width > HEAD_WIDTH and width % HEAD_WIDTH:
        below = width // HEAD_WIDTH * HEAD_WIDTH
        raise UsageError(
            f"--width {width} is no multiple of {HEAD_WIDTH}, the width of a head: use {below} or {below + HEAD_WIDTH}"
        )


def find_own(name: str) -> Callable[[tuple[int, int, int], int], object]:
    """The function ``module:function`` that builds the user's own model.

    :raises UsageError: when it cannot be imported, or takes other arguments
    """
    return import_function("--model", name, "build(shape, classes) -> nn.Module", ((1, 28, 28), 10))


def _build_own(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The model that the user's function builds, checked by one forward pass, which also materializes lazy layers."""
    model = find_own(name)(shape, classes)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"--model {name} returned a {type(model).__name__} instead of an nn.Module: build(shape, classes) must return a "
            f"module that takes float images [n, {', '.join(map(str, shape))}] and returns logits [n, {classes}]"
        )
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        logits = model(torch.zeros(2, *shape))
    if not isinstance(logits, Tensor) or logits.shape != (2, classes):
        returned = list(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise UsageError(
            f"--model {name}: its module returned {returned} for images [2, {', '.join(map(str, shape))}]: it must return logits "
            f"[2, {classes}], one per class"
        )
    return model
