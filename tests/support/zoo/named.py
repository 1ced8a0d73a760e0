"""Models that each have something that a wrapper may get wrong. Each takes a float32 [BATCH, 4, 6, 6] and the micro-step's number."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH = 3


class Images(nn.Module):
    """Convolutions with BatchNorm, in whatever memory format they are given."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(),
            nn.Conv2d(5, 3, 3, bias=False), nn.BatchNorm2d(3, momentum=None), nn.ReLU(inplace=True),
            nn.Flatten(), nn.Linear(12, 2),
        )  # fmt: skip
        self.to(memory_format=memory_format)
        self.memory_format = memory_format

    def forward(self, x: Tensor, number: int) -> Any:
        return self.layers(x.contiguous(memory_format=self.memory_format))


class Odd(nn.Module):
    """Layers of odd sizes, Dropout, and nothing that is a power of two."""

    def __init__(self) -> None:
        super().__init__()
        widths = (144, 13, 7, 31, 1)
        self.layers = nn.ModuleList([nn.Linear(n, m) for n, m in itertools.pairwise(widths)])

    def forward(self, x: Tensor, number: int) -> Any:
        x = x.flatten(1).to(self.layers[0].weight.dtype)  # type: ignore[arg-type]
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.1)
        return x


class Tied(nn.Module):
    """A matrix that is two layers' parameter, a layer that is called twice, and one inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.unembed = nn.Linear(6, 5, bias=False), nn.Linear(6, 5)
        self.unembed.weight = self.embed.weight
        self.twice = nn.Linear(5, 5)
        self.alias = self.twice
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, number: int) -> Any:
        return self.head(torch.tanh(self.alias(torch.tanh(self.twice(self.embed(x) + self.unembed(x))))))


class Frozen(nn.Module):
    """A part that is not trained, below, between and above what is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(3, 2))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in ("layers.1.weight", "layers.1.bias", "layers.3.weight"))

    def forward(self, x: Tensor, number: int) -> Any:
        return self.layers(x)


class Mixed(nn.Module):
    """Layers of four dtypes, in turns."""

    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float64, torch.float32, torch.float16, torch.bfloat16)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6).to(dtype) for dtype in self.dtypes])

    def forward(self, x: Tensor, number: int) -> Any:
        for layer, dtype in zip(self.layers, self.dtypes, strict=True):
            x = torch.tanh(layer(x.to(dtype)))
        return x


class Sequences(nn.Module):
    """An LSTM, attention and LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, number: int) -> Any:
        x, (hidden, _) = self.lstm(x.flatten(1, 2))
        x, weights = self.attention(x, x, x, need_weights=True)
        return self.norm(x), hidden, weights


class Named(NamedTuple):
    logits: Tensor
    name: str


@dataclass
class Scores:
    logits: Tensor
    step: int


class Nested(nn.Module):
    """Outputs in containers within containers, with some that have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, size) for size in (1, 2, 3, 4)])

    def forward(self, x: Tensor, number: int) -> Any:
        one, two, three, four = (layer(x) for layer in self.layers)
        return {"pair": (one, Named(two, "two")), "list": [three, None, x, Scores(four, number)], 7: torch.tensor(1)}


class Inside(nn.Module):
    """Its only output is inside an object that is no container."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))

    def forward(self, x: Tensor, number: int) -> Any:
        return Scores(self.layers(x), number)


class Scalars(nn.Module):
    """Parameters without dimensions, without elements, of odd strides; buffers that count."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.nothing, self.alone = nn.Parameter(torch.zeros(3, 0)), nn.Parameter(torch.zeros(0, dtype=torch.bfloat16))
        self.transposed = nn.Parameter(torch.randn(5, 6).t())
        self.sliced = nn.Parameter(torch.randn(5, 8)[:, ::2])
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor, number: int) -> Any:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().double().mean((0, 1, 2))
        x = torch.tanh((x - self.mean) * self.scale + self.shift).to(self.sliced.dtype)
        return torch.tanh(x @ self.transposed) @ self.sliced + self.nothing.sum() + self.alone.sum()


class Large(nn.Module):
    """Gradients that are worth a call each, beside some that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(144, 130), nn.Tanh(), nn.Linear(130, 140, bias=False), nn.Linear(140, 1))

    def forward(self, x: Tensor, number: int) -> Any:
        return self.layers(x.flatten(1))


class Branches(nn.Module):
    """Ranks take different branches in different micro-steps: some parameters are used by few ranks, one by none."""

    def __init__(self, width: int = 6, inner: int = 5) -> None:
        super().__init__()
        self.stem = nn.Linear(width, inner)
        self.branches = nn.ModuleList([nn.Linear(inner, 4) for _ in range(3)])
        self.unused = nn.Linear(inner, 4)
        self.seldom = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, number: int) -> Any:
        x = torch.tanh(self.stem(x.reshape(-1, self.stem.in_features))) / self.stem.out_features**0.5
        x = self.branches[(number + dist.get_rank()) % 3](x)
        return x * self.seldom if number % 4 == 3 else x


class SameBranch(nn.Module):
    """Each rank takes a branch of its own, always the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Branches()

    def forward(self, x: Tensor, number: int) -> Any:
        return self.inner(x, 0)


class Checkpointed(nn.Module):
    """Activations are computed again in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)])
        self.stem = nn.Linear(6, 6)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, number: int) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class HalfUsed(nn.Module):
    """A layer that is used, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.used(x))


class Segment(nn.Sequential):
    """Layers that are computed again together: the first is needed before its own backward pass begins."""

    def __init__(self) -> None:
        super().__init__(HalfUsed(), HalfUsed(), HalfUsed(), nn.Linear(6, 5))

    def forward(self, x: Tensor, number: int) -> Any:  # type: ignore[override]
        return checkpoint(super().forward, x, use_reentrant=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "images": Images,
    "channels last": lambda: Images(torch.channels_last),
    "odd": Odd,
    "large": Large,
    "tied": Tied,
    "frozen": Frozen,
    "mixed": Mixed,
    "half": lambda: Odd().to(torch.bfloat16),
    "sequences": Sequences,
    "nested": Nested,
    "inside": Inside,
    "scalars": Scalars,
    "branches": Branches,
    "large branches": lambda: Branches(144, 5000),
    "same branch": SameBranch,
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "segment": Segment,
    "reentrant": lambda: Checkpointed(use_reentrant=True),
}
CHANGING = {"branches", "large branches"}  # need find_unused_parameters
UNUSED = {*CHANGING, "same branch", "segment"}  # that, or static_graph
LOW_PRECISION = {"mixed", "half"}
FLOAT32 = {"images", "channels last", "odd", "large", "tied", "frozen", "sequences", "checkpoint", "reentrant"}


class Failing(torch.autograd.Function):
    """The identity, but for its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ArithmeticError("in the middle of backward")


def batch(number: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's inputs to a micro-step: [BATCH, 4, 6, 6]."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(BATCH, 4, 6, 6, generator=generator).to(dtype)


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from tensors(list(vars(value).values()))
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors(inner)


def loss_of(outputs: Any) -> Tensor:
    """A loss in which each element has a weight of its own."""
    terms = []
    for output in tensors(outputs):
        if output.requires_grad:
            weights = torch.linspace(0.5, 2, output.numel(), dtype=torch.float64, device=output.device)
            terms.append((weights.view(output.shape) * (output.double() - 0.1).square()).mean())
    return torch.stack(terms).sum() if terms else torch.zeros((), requires_grad=True)
