"""One model and one training loop, wrapped once by torch's DDP and once by the one under test, compared step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel

Results = dict[str, Tensor | None]
Wrapper = DistributedDataParallel | HandwrittenDistributedDataParallel
BATCH = 3


# Models: each takes a float32 [BATCH, 4, 6, 6] and the number of the micro-step


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
    "reentrant": lambda: Checkpointed(use_reentrant=True),
}
CHANGING = {"branches", "large branches"}  # need find_unused_parameters
UNUSED = {*CHANGING, "same branch"}  # that, or static_graph
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


def batch(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """This rank's inputs to a micro-step: [BATCH, 4, 6, 6]."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
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
    return torch.stack(terms).sum()


# Training


@dataclass(frozen=True)
class Case:
    """A way to train a model.

    :param bucket_cap_mb, as_view, find_unused, static_graph, broadcast_buffers: the wrapper's
    :param grad_accumulation_steps: backward passes per optimizer step, all but the last under ``no_sync``
    :param evaluate: whether there is a forward pass without gradients after each step
    :param hook: of :data:`HOOKS`
    :param optimizer: of :data:`OPTIMIZERS`
    :param clip: the norm to which gradients are clipped
    :param dtype: of the whole model, if not its own
    :param device: of the model and its inputs
    """

    model: str
    bucket_cap_mb: float | None = None
    as_view: bool = True
    find_unused: bool = False
    static_graph: bool = False
    broadcast_buffers: bool = True
    grad_accumulation_steps: int = 1
    set_to_none: bool = True
    evaluate: bool = False
    hook: str | None = None
    optimizer: str = "momentum"
    clip: float | None = None
    steps: int = 20
    dtype: torch.dtype | None = None
    device: str = "cpu"

    def network(self, seed: int) -> nn.Module:
        """The model, with weights of their own for each seed."""
        torch.manual_seed(seed)
        return MODELS[self.model]().to(self.device, self.dtype)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-4),
}


def _register_power_sgd(model: Any) -> None:
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook)


HOOKS: dict[str, Callable[[Any], None]] = {
    "allreduce": lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook),
    "fp16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "bf16": lambda model: model.register_comm_hook(dist.group.WORLD, default_hooks.bf16_compress_hook),
    "wrapped": lambda model: model.register_comm_hook(
        None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "powersgd": _register_power_sgd,
}
COMPRESSING = {"fp16", "bf16", "wrapped"}


def wrap(engine: type[Wrapper], model: nn.Module, case: Case, **options: Any) -> Any:
    wrapped: Any = engine(
        model,
        bucket_cap_mb=case.bucket_cap_mb,
        find_unused_parameters=case.find_unused,
        gradient_as_bucket_view=case.as_view,
        static_graph=case.static_graph,
        **options,
    )
    wrapped.broadcast_buffers = case.broadcast_buffers
    if case.hook is not None:
        HOOKS[case.hook](wrapped)
    return wrapped


def run_micro_step(
    model: Any, step: int, micro_step: int, micro_steps: int, dtype: torch.dtype | None, device: str = "cpu"
) -> Tensor:
    """Forward and backward of one micro-step of a step, all but the last under ``no_sync``; returns the loss."""
    number = step * micro_steps + micro_step
    torch.manual_seed(1000 * number + dist.get_rank())
    x = batch(number, dtype or torch.float32).to(device)
    with contextlib.nullcontext() if micro_step == micro_steps - 1 else model.no_sync():
        loss = loss_of(model(x, number=number))
        loss.backward()
    return loss


def train(engine: type[Wrapper], case: Case, **options: Any) -> Iterator[tuple[str, Results]]:
    """Named results, step by step: losses, gradients, parameters and buffers."""
    # The ranks' models start with different weights, so that the wrapper has to make them one.
    network = case.network(dist.get_rank())
    model = wrap(engine, network, case, **options)
    yield "after wrapping", dict(network.state_dict())
    optimizer = OPTIMIZERS[case.optimizer](network.parameters())
    for step in range(case.steps):
        for micro_step in range(case.grad_accumulation_steps):
            loss = run_micro_step(model, step, micro_step, case.grad_accumulation_steps, case.dtype, case.device)
            results = {name: parameter.grad for name, parameter in network.named_parameters()}
            yield f"gradients of step {step}.{micro_step}", {"loss": loss, **results}
        if case.clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=case.set_to_none)
        results = {name: parameter.grad for name, parameter in network.named_parameters()}
        yield f"gradients zeroed in step {step}", results
        if case.evaluate:
            with torch.no_grad() if step % 2 else torch.inference_mode():
                model(batch(-step - 1, case.dtype or torch.float32).to(case.device), number=step)
    yield "after training", {**model.state_dict(), **dict(model.named_buffers())}


def recorded(engine: type[Wrapper], case: Case, **options: Any) -> list[tuple[str, Results]]:
    """All of :func:`train`, kept."""
    return kept(train(engine, case, **options))


def kept(training: Iterable[tuple[str, Results]]) -> list[tuple[str, Results]]:
    """Run a training, and keep copies of its results."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")  # of reentrant checkpoints
        return [
            (when, {name: None if value is None else value.detach().clone() for name, value in results.items()})
            for when, results in training
        ]


def difference(ours: Any, theirs: Any, tolerance: float) -> str | None:
    """The differences of two results."""
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return None if ours is None and theirs is None else f"{ours} instead of {theirs}"
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{ours.dtype} {list(ours.shape)} instead of {theirs.dtype} {list(theirs.shape)}"
    if torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance):
        return None
    return f"{(ours - theirs).abs().max().item()} off, of {theirs.abs().max().item()}"


def as_torch_can(case: Case) -> Case:
    """The same training, for torch's DDP, which cannot do all that the hand-written one can."""
    find_unused, static_graph = case.find_unused, case.static_graph
    if case.grad_accumulation_steps > 1 or case.model == "inside":
        # A static graph must not begin with no_sync; what hides in an object of its own is not averaged in the first step.
        find_unused, static_graph = find_unused or (static_graph and case.model in UNUSED), False
    if case.model == "reentrant" or static_graph:
        find_unused = False  # fails there, and is of no use here
    hook = (
        "bf16" if case.hook == "wrapped" else case.hook
    )  # the same, but it leaves no gradients of its own dtype behind
    return dataclasses.replace(case, find_unused=find_unused, static_graph=static_graph, hook=hook)


def compare(case: Case, tolerance: float = 0, **options: Any) -> str | None:
    """Train with both engines.

    :param tolerance: relative and absolute; 0 for the same bits
    :param options: of the hand-written one
    :returns: where the results first differ
    """
    theirs = recorded(DistributedDataParallel, as_torch_can(case))
    ours = recorded(HandwrittenDistributedDataParallel, case, **options)
    found = first_difference(ours, theirs, tolerance)
    return found and f"{case}: {found}"


def first_difference(
    ours: Sequence[tuple[str, Results]], theirs: Sequence[tuple[str, Results]], tolerance: float
) -> str | None:
    """Where two recorded trainings first differ, or None."""
    for (when, results), (_, expected) in zip(ours, theirs, strict=True):
        if list(results) != list(expected):
            return f"{when}: {list(results)} instead of {list(expected)}"
        for name, value in results.items():
            found = difference(value, expected[name], tolerance)
            if found is not None:
                return f"{when}: {name} is {found}"
    return None
