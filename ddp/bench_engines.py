"""The hand-written DDP against torch's: what is a training step's time? (``python -m ddp.bench engines``)

Every engine trains its own copy of the same model on the same batch, which lies ready: forward, backward with the gradients
averaged, optimizer step. All live in the same processes and take turns; a turn begins with a barrier, and its time is the
slowest rank's, per step. One candidate does not synchronize at all, which bounds what any engine can reach.

The engines are compared on a convolutional net, a ResNet-18, a wide MLP whose gradients are heavy and a deep one whose
gradients are many and small; against that one of torch's two variants (gradients copied out of the buckets, or views into
them) that is faster there. Then, on one model, what the engines can be told:

- bucket size: MiB of a bucket, where the default is 1 for the first and 25 for all others.
- overlap: all-reduces that start as soon as a bucket is complete, or only when all are. Both engines do either by the same
  communication hook, in buckets of the default size, so that nothing else differs.
- hooks: gradients that travel in bf16, or by PowerSGD of rank 4. PowerSGD gets all gradients in one bucket: it starts a second
  all-reduce when the first is done, from whichever of gloo's threads has noticed; with several buckets under way, the ranks
  would start theirs in different orders, and wait for each other forever.
- all-reduce: how the hand-written engine sums a bucket over the ranks, by each algorithm of ddp/algorithms.py.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from common.cli import option, parse
from common.machine import describe_machine, usable_cores
from common.models import build_model
from common.optimization import build_optimizer
from common.plotting import plot_ratio_panels
from common.process_group import Place, require_alone
from common.rank_logging import Progress, rank_logging
from common.run_directory import prepare_output, results_in, write_json
from common.standing_ranks import StandingRanks
from common.timing import Spread, interleave, paired_ratio
from ddp.algorithms import ALL_REDUCES, build_all_reduce
from ddp.handwritten import HandwrittenDistributedDataParallel

WARMUP = 1  # rounds
SETTLING_STEPS = 3  # of each engine before: the first regroups the buckets, PowerSGD begins with the third
CLASSES, IMAGE = 10, (1, 28, 28)
DEEP, DEEP_LAYERS, DEEP_WIDTH = "deep-mlp", 100, 20
SAMPLES = {"fashion-cnn": 72, "resnet18": 16, "mlp": 72, DEEP: 72}  # of each rank in a step
ONE_BUCKET_MIB = 10**6

NONE, TORCH, HANDWRITTEN = "none", "torch", "handwritten"


@dataclass(frozen=True)
class EnginesConfig:
    """Settings of ``ddp.bench engines``."""

    models: tuple[str, ...] = option(tuple(SAMPLES), "on which the engines are compared", choices=tuple(SAMPLES))
    variations: bool = option(True, "compare also what the engines can be told")
    model: str = option("mlp", "on which that is done", choices=tuple(SAMPLES))
    ranks: int = option(2, "processes, each with one thread", minimum=2, maximum=64)
    builds: int = option(
        2, "times that all engines are built anew: where their tensors lie can cost one a good part", minimum=1
    )
    rounds: int = option(10, "rounds per build that count; in each, all engines take their turn", minimum=2)
    turn: float = option(0.3, "seconds that an engine's turn takes at least", above=0)
    output: Path = option(Path("runs/bench-engines"), "folder of the JSON and the figures")


@dataclass(frozen=True)
class Engine:
    """A way to train.

    :param wrapper: torch's DDP, the hand-written one, or none, which leaves each rank its own gradients
    :param views: whether gradients are views into the buckets; :param bucket_mib: the engine's default when None
    :param hook: of :data:`HOOKS`; :param all_reduce: of :data:`ddp.algorithms.ALL_REDUCES`, for the hand-written one
    """

    wrapper: str
    views: bool = True
    bucket_mib: int | None = None
    hook: str | None = None
    all_reduce: str = "backend"

    def wrap(self, network: nn.Module) -> tuple[nn.Module, Callable[[], None]]:
        """The network with the engine around it, a collective; and what ends it."""
        if self.wrapper == NONE:
            return network, _nothing
        model: Any
        if self.wrapper == TORCH:
            model = DistributedDataParallel(network, gradient_as_bucket_view=self.views, bucket_cap_mb=self.bucket_mib)
            model.broadcast_buffers = False  # the constructor's argument has another name since torch 2.15
            close = _nothing
        else:
            all_reduce = build_all_reduce(self.all_reduce)
            model = HandwrittenDistributedDataParallel(
                network,
                gradient_as_bucket_view=self.views,
                bucket_cap_mb=self.bucket_mib,
                broadcast_buffers=False,
                all_reduce=all_reduce,
            )
            close = all_reduce.close
        if self.hook:
            state, hook = HOOKS[self.hook]()
            # By way of a lambda: torch checks annotations, which are strings here, and refuses bf16_compress_hook by its
            # name without NCCL, though gloo has bf16 too.
            model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
        return model, close


def _nothing() -> None:
    pass


PLAIN, VIEWS, FLOOR = "torch DDP", "torch DDP, views", "no synchronization"
BY_HAND, SHARED = "handwritten", "handwritten, shared memory"
ENGINES = {
    PLAIN: Engine(TORCH, views=False),
    VIEWS: Engine(TORCH),
    BY_HAND: Engine(HANDWRITTEN),
    "handwritten, copies": Engine(HANDWRITTEN, views=False),
    SHARED: Engine(HANDWRITTEN, all_reduce="shared-memory"),
    FLOOR: Engine(NONE),
}


def _variations() -> dict[str, dict[str, Engine]]:
    both = {"torch DDP": TORCH, "handwritten": HANDWRITTEN}
    sizes = {f"{mib} MiB": {"bucket_mib": mib} for mib in (1, 5, 25, 100)}
    overlap = {"overlap": {"hook": "all-reduce"}, "no overlap": {"hook": "all-reduce at the end"}}
    hooks = {"bf16": {"hook": "bf16"}, "PowerSGD": {"hook": "PowerSGD", "bucket_mib": ONE_BUCKET_MIB}}
    found = {
        title: {
            f"{name}, {words}": Engine(wrapper, **told)  # type: ignore[arg-type]
            for words, told in settings.items()
            for name, wrapper in both.items()
        }
        for title, settings in (("bucket size", sizes), ("overlap", overlap), ("hooks", hooks))
    }
    # On one host, hierarchical is shared memory.
    algorithms = [name for name in ALL_REDUCES if name != "hierarchical"]
    found["all-reduce"] = {f"handwritten, {name}": Engine(HANDWRITTEN, all_reduce=name) for name in algorithms}
    return {title: {VIEWS: ENGINES[VIEWS]} | engines for title, engines in found.items()}


class _AtTheEnd:
    """A communication hook that keeps every bucket until the last is complete, and then sums them all."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []

    def __call__(self, _: object, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(dist.get_world_size())
        self._kept.append((buffer, torch.futures.Future()))
        future = self._kept[-1][1]
        if bucket.is_last():  # backward is over, so that here is as good a place to wait as any
            works = [dist.all_reduce(kept, async_op=True) for kept, _ in self._kept]
            for work, (kept, done) in zip(works, self._kept, strict=True):
                assert work is not None
                work.wait()
                done.set_result(kept)
            self._kept.clear()
        return future


HOOKS: dict[str, Callable[[], tuple[Any, Callable[..., Any]]]] = {
    "all-reduce": lambda: (None, allreduce_hook),
    "all-reduce at the end": lambda: (None, _AtTheEnd()),
    "bf16": lambda: (None, bf16_compress_hook),
    "PowerSGD": lambda: (PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powerSGD_hook),
}


def build_network(name: str) -> nn.Module:
    """The model ``name`` of :data:`SAMPLES` for images of 28x28, the same on every rank."""
    torch.manual_seed(0)
    if name != DEEP:
        return build_model(name, IMAGE, CLASSES)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(IMAGE[1] * IMAGE[2], DEEP_WIDTH)]
    for _ in range(DEEP_LAYERS):
        layers += [nn.Linear(DEEP_WIDTH, DEEP_WIDTH), nn.LayerNorm(DEEP_WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(DEEP_WIDTH, CLASSES))


class Worker:
    """What a rank does: it has a copy of the model for every engine, with its optimizer, and one batch for all.

    The learning rate is 0: the weights stay, and with them what a step has to compute.
    """

    def __init__(self, place: Place, model: str, engines: Mapping[str, Engine]) -> None:
        generator = torch.Generator().manual_seed(place.rank)
        self._images = torch.randn(SAMPLES[model], *IMAGE, generator=generator)
        self._labels = torch.randint(CLASSES, (SAMPLES[model],), generator=generator)
        self._closing: list[Callable[[], None]] = []
        self._models: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        for name, engine in engines.items():
            wrapped, close = engine.wrap(build_network(model))
            optimizer = build_optimizer("sgd", wrapped.parameters(), momentum=0.9, weight_decay=5e-4)
            self._models[name] = wrapped, optimizer
            self._closing.append(close)

    def run(self, name: str, steps: int) -> float:
        """Seconds of a step, the mean of as many as are given, from a common start."""
        model, optimizer = self._models[name]
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(self._images), self._labels).backward()
            optimizer.step()
        return (time.perf_counter() - began) / steps

    def gradients(self, name: str) -> list[Tensor]:
        """Those of the last step."""
        return [
            parameter.grad.clone() for parameter in self._models[name][0].parameters() if parameter.grad is not None
        ]

    def close(self) -> None:
        self._models.clear()
        for close in self._closing:
            close()


@dataclass(frozen=True)
class Measured:
    """Engines that took turns.

    :param title: what was compared; :param seconds: of a step of each engine, one entry per round
    :param reference: the engine that the others are compared with
    """

    title: str
    model: str
    seconds: Mapping[str, list[float]]
    reference: str

    def ratio(self, name: str) -> Spread:
        """Of the reference's time, round by round."""
        return paired_ratio(self.seconds[name], self.seconds[self.reference])


def main(argv: Sequence[str]) -> None:
    config = parse(EnginesConfig, "ddp.bench engines", __doc__, argv)
    require_alone("ddp.bench engines")
    with rank_logging(Place.alone(torch.device("cpu"))):
        prepare_output(config.output)
        compared, varied = measure(config)
        with results_in(config.output):
            print(report(config, compared, varied))


def measure(config: EnginesConfig) -> tuple[list[Measured], list[Measured]]:
    """The engines on each model, and what they can be told on one."""
    variations = _variations() if config.variations else {}
    total = (len(config.models) + len(variations)) * config.builds * (config.rounds + WARMUP)
    with Progress(Place.alone(torch.device("cpu")), "bench", total) as progress:
        compared = []
        for model in config.models:
            seconds = _take_turns(config, model, ENGINES, functools.partial(progress.advance, 1, model))
            faster = min((PLAIN, VIEWS), key=lambda name: Spread.of(seconds[name]).median)
            compared.append(Measured(model, model, seconds, faster))
        varied = []
        for title, engines in variations.items():
            seconds = _take_turns(config, config.model, engines, functools.partial(progress.advance, 1, title))
            varied.append(Measured(title, config.model, seconds, VIEWS))
    return compared, varied


def _take_turns(
    config: EnginesConfig, model: str, engines: Mapping[str, Engine], after_round: Callable[[], None]
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for build in range(config.builds):
        # What is built first lies elsewhere in memory than what is built last.
        order = list(engines)[:: -1 if build % 2 else 1]
        with StandingRanks(config.ranks, Worker, model, {name: engines[name] for name in order}, threads=1) as ranks:
            for name in order:
                ranks.call("run", name, SETTLING_STEPS)
            steps = max(1, round(config.turn / _slowest(ranks, order[0], SETTLING_STEPS)))
            turns = {name: functools.partial(_slowest, ranks, name, steps) for name in order}
            taken = interleave(turns, config.rounds, WARMUP, lambda _: after_round())
            ranks.call("close")
        for name in engines:
            seconds[name] += taken[name]
    return seconds


def _slowest(ranks: StandingRanks, name: str, steps: int) -> float:
    seconds: list[float] = ranks.call("run", name, steps)
    return max(seconds)


def report(config: EnginesConfig, compared: list[Measured], varied: list[Measured]) -> str:
    """Write the JSON and the figures, and say what they say."""
    write_json(
        config.output / "engines.json",
        {
            "machine": describe_machine(),
            "config": asdict(config),
            "samples_per_rank": SAMPLES,
            "models": [asdict(one) for one in compared],
            "variations": [asdict(one) for one in varied],
        },
    )
    title = f"{config.ranks} ranks on {usable_cores()} cores, gloo; {config.builds} x {config.rounds} rounds"
    files = ["engines.json", "engines.png"]
    _plot(config.output / "engines.png", compared, f"DDP by hand against torch's: {title}", "the faster of torch's two")
    if varied:
        files.append("variations.png")
        _plot(config.output / "variations.png", varied, f"what the engines can be told, {config.model}: {title}", VIEWS)
    lines = [f"{title}, median [quartiles]"]
    for one in compared:
        lines += [f"{_described(one.model)}, {SAMPLES[one.model]} samples per rank", *_table(one)]
    lines += ["", *(verdict(one, name) for one in compared for name in (BY_HAND, SHARED))]
    if varied:
        lines += ["", f"{config.model}, what the engines can be told:"]
    for one in varied:
        lines += [one.title, *_table(one)]
    return "\n".join([*lines, f"results in {config.output}: {', '.join(files)}"])


def _described(model: str) -> str:
    parameters = list(build_network(model).parameters())
    megabytes = sum(parameter.nbytes for parameter in parameters) / 1e6
    return f"{model}, {len(parameters)} parameters of {megabytes:.1f} MB together"


def _table(measured: Measured) -> list[str]:
    lines = [f"{'':<34}{'ms per step':>30}{f'of the time of {measured.reference}':>36}"]
    for name, seconds in measured.seconds.items():
        milliseconds = Spread.of([1e3 * value for value in seconds])
        lines.append(f"  {name:<32}{f'{milliseconds:.2f}':>30}{f'{measured.ratio(name):.3f}':>36}")
    return lines


def verdict(measured: Measured, name: str) -> str:
    """How an engine does against torch's, in a sentence; faster or slower only where the quartiles agree."""
    ratio, reference = measured.ratio(name), measured.reference
    if ratio.high < 1:
        found = "faster"
    elif ratio.low > 1:
        found = "slower"
    else:
        found = "as fast, within the noise"
    return f"{measured.model}: {name} takes {ratio:.3f} of the time of {reference}: {found}"


def _plot(path: Path, measured: list[Measured], title: str, reference: str) -> None:
    panels = {
        one.title: {
            name: [value / other for value, other in zip(seconds, one.seconds[one.reference], strict=True)]
            for name, seconds in one.seconds.items()
        }
        for one in measured
    }
    plot_ratio_panels(path, panels, title=title, x_title=f"time per step, as a multiple of '{reference}'")
