"""Random models of the kinds that users bring: layouts, dtypes, sharing, freezing, buffers, parametrizations, normalizations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

CHANNELS, SIDE, CLASSES = 4, 4, 3
ROWS = 41  # of an embedding of rounded pixels
POISON = 1.99  # the first pixel of an image whose loss is nan


@dataclass(frozen=True)
class Part:
    """A layer ``[n, CHANNELS, SIDE, SIDE]`` to itself.

    :param kind: one of :data:`PARTS`
    :param variant: chooses its options
    :param layout: one of :data:`LAYOUTS`, of its parameters
    :param runs: how often it is used in each pass
    """

    kind: str
    variant: int = 0
    layout: str = "as it is"
    frozen: bool = False
    runs: int = 1


@dataclass(frozen=True)
class Model:
    parts: tuple[Part, ...]
    dtype: torch.dtype = torch.float32
    seed: int = 0


def conv(variant: int = 0) -> nn.Conv2d:
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=1 + variant % 2, bias=False)


def computed(variant: int) -> nn.Module:
    """A layer whose weight is computed from others, in a parametrization or before forward."""
    hows = (
        weight_norm,
        spectral_norm,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
        lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    )
    how: Callable[[nn.Module], nn.Module] = hows[variant % len(hows)]
    return how(conv())


def batchnorm(variant: int) -> nn.Module:
    affine, tracked = bool(variant & 1), bool(variant & 2)
    return nn.BatchNorm2d(CHANNELS, momentum=None if variant & 4 else 0.3, affine=affine, track_running_stats=tracked)


class Scale(nn.Module):
    """Channels times a parameter of another dtype or shape."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        dtype = (torch.bfloat16, torch.float64, torch.float32)[variant % 3]
        self.scale = nn.Parameter(torch.rand(() if variant & 1 else (CHANNELS, 1, 1)).to(dtype))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.table = nn.Parameter(torch.arange(CHANNELS), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.table] * self.scale.to(x.dtype) + self.none.sum()


class Fourier(nn.Module):
    """A complex filter."""

    seen: Tensor

    def __init__(self, variant: int) -> None:
        super().__init__()
        width = SIDE // 2 + 1
        self.filter = nn.Parameter(torch.randn(SIDE, width, dtype=torch.complex64))
        self.register_buffer("seen", torch.zeros(SIDE, width, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x.float())
        if self.training:
            self.seen += 0.1 * spectrum.detach().mean((0, 1))
        filtered: Tensor = torch.fft.irfft2(spectrum * self.filter + 0.1 * self.seen, s=(SIDE, SIDE))
        return filtered.to(x.dtype)


class Statistics(nn.Module):
    """Buffers of several dtypes that training writes or assigns."""

    mean: Tensor
    positive: Tensor
    wide: Tensor

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.assigns = bool(variant & 1)
        self.register_buffer("mean", torch.zeros(CHANNELS, 1, 1), persistent=bool(variant & 2))
        self.register_buffer("grown", torch.zeros(0))
        self.register_buffer("positive", torch.zeros(CHANNELS, dtype=torch.int64))
        self.register_buffer("wide", torch.full((1, 1, 1), 0.5).expand(CHANNELS, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean, positive = x.detach().mean((0, 2, 3)), (x.detach() > 0).sum((0, 2, 3))
            if self.assigns:
                self.mean = 0.9 * self.mean + 0.1 * mean.view(-1, 1, 1)
                self.positive = self.positive + positive
            else:
                self.mean.mul_(0.9).add_(mean.view(-1, 1, 1), alpha=0.1)
                self.positive += positive
            self.grown = mean
        share = self.positive / self.positive.sum().clamp(min=1)
        return (x - self.mean) * self.wide + share.to(x.dtype).view(-1, 1, 1)


class Lookup(nn.Module):
    """An embedding of rounded pixels, most of which one rank has alone. It gets the images: a rounding error of ``x`` might
    choose another row."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        max_norm = 0.5 if variant % 8 == 5 else None
        self.rows = nn.Embedding(ROWS, 1, padding_idx=0, max_norm=max_norm, sparse=variant % 4 == 3)

    def forward(self, images: Tensor) -> Tensor:
        values: Tensor = self.rows((8 * images).round().long() + ROWS // 2)
        return values.squeeze(-1)


class Thawing(nn.Module):
    """A layer that is frozen or unfrozen after its first evaluation."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.layer, self.passes, self.turned = conv(), 0, False
        self.layer.requires_grad_(bool(variant & 1))

    def train(self, mode: bool = True) -> Thawing:
        if mode and self.passes and not self.turned:
            self.turned = True
            self.layer.requires_grad_(not self.layer.weight.requires_grad)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        result: Tensor = self.layer(x)
        return result


class Absent(nn.Module):
    """A child, a parameter and a buffer that are None, and a parameter without dimensions."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.register_module("child", None)
        self.register_parameter("bias", None)
        self.register_buffer("offset", None)
        self.weight = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        assert self.child is None
        assert self.bias is None
        assert self.offset is None
        return x * self.weight


class Listed(nn.Module):
    """A layer that has its weight a second time."""

    def __init__(self, variant: int) -> None:
        super().__init__()
        self.layer = conv()
        self.weights = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weights[0], padding=1)


class Expanded(nn.Module):
    def __init__(self, variant: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 1, 1).expand(CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


PARTS: dict[str, Callable[[int], nn.Module]] = {
    "conv": conv,
    "tied": conv,  # with the first "conv"; see Network
    "aliased": conv,
    "linear": lambda v: nn.Linear(SIDE, SIDE, bias=bool(v & 1)),
    "inplace": lambda v: nn.Sequential(nn.Linear(SIDE, SIDE), nn.LeakyReLU(inplace=True)),
    "layernorm": lambda v: nn.LayerNorm([CHANNELS, SIDE, SIDE]),
    "absent": Absent,
    "computed": computed,
    "listed": Listed,
    "batchnorm": batchnorm,
    "instancenorm": lambda v: nn.InstanceNorm2d(CHANNELS, affine=bool(v & 1), track_running_stats=bool(v & 2)),
    "groupnorm": lambda v: nn.GroupNorm(1 + v % 2, CHANNELS),
    "scale": Scale,
    "fourier": Fourier,
    "statistics": Statistics,
    "lookup": Lookup,
    "thawing": Thawing,
    "expanded": Expanded,
}
KEEPS_DTYPE = (Scale, Fourier)
PER_SAMPLE = ("absent", "computed", "conv", "groupnorm", "inplace", "layernorm", "linear")  # they mix no samples
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda p: p,
    "gaps": lambda p: p.repeat_interleave(2, -1)[..., ::2],
    "transposed": lambda p: p.transpose(0, -1).contiguous().transpose(0, -1),
    "channels last": lambda p: p.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p,
    "view of more": lambda p: torch.cat([p, p])[: len(p)],
}


def build(part: Part, dtype: torch.dtype) -> nn.Module:
    """A layer of its own: it is neither tied nor frozen yet."""
    module = PARTS[part.kind](part.variant)
    if not isinstance(module, KEEPS_DTYPE):
        module.to(dtype)
    for parameter in module.parameters():
        parameter.data = LAYOUTS[part.layout](parameter.data) if parameter.dim() else parameter.data
    return module


class Network(nn.Module):
    """Logits ``[n, CLASSES]`` of images ``[n, 1, SIDE, SIDE]``."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        torch.manual_seed(model.seed)
        self.stem = nn.Conv2d(1, CHANNELS, 3, padding=1)
        self.parts = nn.ModuleList(build(part, model.dtype) for part in model.parts)
        self.head = nn.Linear(CHANNELS * SIDE * SIDE, CLASSES)
        self.dtype = model.dtype
        for child in (self.stem, self.head):
            child.to(model.dtype)
        first: Any = next(
            (m for m, p in zip(self.parts, model.parts, strict=True) if p.kind == "conv"), conv().to(model.dtype)
        )
        self.order = []
        for index, (module, part) in enumerate(zip(self.parts, model.parts, strict=True)):
            if part.kind in ("tied", "aliased") and module.weight.shape == first.weight.shape:
                module.weight = first.weight if part.kind == "tied" else nn.Parameter(first.weight.data)
            if part.frozen:
                module.requires_grad_(False)
            self.order += [index] * part.runs

    def forward(self, images: Tensor, **_: Any) -> Tensor:
        x = images.to(self.head.weight.dtype)
        x = x + torch.where(images[:, :, :1, :1] > POISON, torch.nan, 0.0).to(x.dtype)
        x = self.stem(x).tanh()
        for index in self.order:
            part = self.parts[index]
            x = x + 0.5 * part(images if isinstance(part, Lookup) else x).tanh()
        logits: Tensor = self.head(x.flatten(1))
        return logits


@st.composite
def models(draw: st.DrawFn) -> Model:
    part = st.builds(
        Part,
        st.sampled_from(sorted(PARTS)),
        st.integers(0, 7),
        st.sampled_from(sorted(LAYOUTS)),
        st.integers(0, 5).map(lambda n: n == 0),
        st.sampled_from([1, 1, 1, 2]),
    )
    parts = draw(st.lists(part, min_size=1, max_size=4))
    return Model(tuple(parts), draw(st.sampled_from([torch.float32, torch.float64])), draw(st.integers(0, 99)))


def tolerance(model: Model) -> float:
    """Rounding errors of a few steps, relative to the largest value; the logits are float32 in all cases."""
    kinds = {(part.kind, part.variant % 3) for part in model.parts}
    return 0.03 if ("scale", 0) in kinds else 3e-5
