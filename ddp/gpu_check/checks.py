"""The checks, as data: what each shows, its command, how long it may take, and what the machine must have.

In a command, ``{out}`` is the folder of the check's results, ``{ranks}`` the number of ranks, ``{device}`` cpu or cuda. Other
words in braces are sizes, which differ between a GPU and the CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.machine import usable_cores
from common.training.precision import PRECISIONS
from ddp.gpu_check import results

MOST_RANKS = 8
MOST_STEPS, GLYPHS = 40, 12_000  # of a training on large images; there are so many to train on


@dataclass(frozen=True)
class Machine:
    """What decides which checks there are, and how large.

    :param gpus: those that are used; 0 checks the CPU
    :param memory_gb: of a GPU
    """

    gpus: int
    memory_gb: float = 80.0

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def ranks(self) -> int:
        """One per GPU, over NCCL; two on the CPU, over gloo."""
        return min(self.gpus, MOST_RANKS) or 2

    @property
    def large_images(self) -> int:
        """On each GPU at once, of 224x224 and through ResNet-50, whose activations take about 0.1 GB each in fp32. A large GPU
        gets so many that their kernels take longer than the host takes to queue them, if there are glyphs for that."""
        if self.memory_gb < 24:
            return 48
        return 288 if self.memory_gb >= 64 and self.ranks <= 4 else 144


@dataclass(frozen=True)
class Check:
    """A command that passes with exit status 0.

    :param shows: in a few words
    :param limit_s: seconds after which it counts as hung
    :param reads: the numbers of its results, from its folder
    :param expects: a regular expression that its output must match, too
    :param obstacle: why it cannot run on this machine; empty if it can
    """

    name: str
    shows: str
    command: str
    limit_s: float
    reads: Callable[[Path], dict[str, Any]] | None = None
    expects: str = ""
    obstacle: str = ""


def sizes_of(machine: Machine) -> dict[str, str]:
    """The words in braces: work that fills a GPU for seconds, or that two cores do in seconds."""
    ranks = machine.ranks
    words = {"ranks": str(ranks), "device": machine.device, "workers": str(max(1, min(4, usable_cores() // 4)))}
    words["small"] = f"--batch-size {48 * ranks} --train-samples {480 * ranks} --test-samples 100 --log-every 2"
    words["profiled"] = f"--batch-size {48 * ranks} --train-samples {960 * ranks} --test-samples 100"
    if not machine.gpus:
        return words | {
            "large": "--model resnet50 --image-size 28 --batch-size 4 --train-samples 8 --test-samples 4 --lr 0.01 "
            "--log-every 1",
            "faces": "--train-samples 96 --test-samples 24 --image-size 32 --model fashion-cnn",
            "overhead": "--batch-size 144 --builds 1 --rounds 2 --steps 2",
            "overhead_large": "--model resnet50 --image-size 28 --batch-size 4 --builds 1 --rounds 2 --steps 1",
            "safety": "--batch-size 144 --builds 1 --rounds 2 --steps 4",
            "strategies": "--processes 1,2 --builds 1 --rounds 2 --steps 2",
            "engines": "--models deep-mlp --rounds 2 --turn 0.05",
            "allreduce": "--sizes 4096,1048576 --rounds 2",
            "timeline": "--model fashion-cnn --batch-size 24 --steps 4",
            "devices": "cpu,cpu",
        }
    batch = machine.large_images * ranks
    steps = min(MOST_STEPS, GLYPHS // batch)
    return words | {
        "large": f"--model resnet50 --batch-size {batch} --train-samples {steps * batch} --test-samples 256 "
        "--lr 0.01 --log-every 5",
        "faces": f"--batch-size {48 * ranks} --log-every 5",
        "overhead": f"--batch-size {48 * ranks} --builds 2 --rounds 4 --steps 20",
        "overhead_large": f"--model resnet50 --precision bf16 --batch-size {batch} --builds 1 --rounds 4 --steps 10",
        "safety": f"--batch-size {48 * ranks} --builds 2 --rounds 2 --steps 20",
        "strategies": f"--processes {','.join(map(str, range(1, min(ranks, 4) + 1)))} --model resnet50 --precision bf16 "
        # Its jobs keep their memory while others run. Half of such a batch divides over 1 to 4 ranks.
        f"--batch-size {machine.large_images // 2} --builds 1 --rounds 3 --steps 5",
        "engines": "--models resnet50,mlp,deep-mlp --rounds 5",
        "allreduce": "--sizes 4096,65536,1048576,26214400,104857600 --rounds 10",
        "timeline": f"--model resnet50 --batch-size {32 * ranks}",
        "devices": ",".join(f"cuda:{number}" for number in range(ranks)),
    }


TORCHRUN = "torchrun --nproc_per_node={ranks} -m "
TRAIN = TORCHRUN + "ddp.train --device {device} --timeout 60 --run-dir {out}/run "
ONE_EPOCH = TRAIN + "--overwrite --epochs 1 "
BENCH, BENCH_ON_RANKS = "python -m ddp.bench ", TORCHRUN + "ddp.bench "  # the first start their ranks themselves
EQUIVALENCE = "ddp.gpu_check.equivalence --output {out} "
ENGINES = BENCH + "engines --device {device} --no-variations --builds 1 {engines} --output {out} "

# All ranks are killed when there is a checkpoint.
LONGER = TRAIN + "{small} --epochs 12 --checkpoint-every 5 "
RESUME = (
    f"{LONGER} --overwrite & job=$!; "
    "while kill -0 $job 2>/dev/null && ! ls {out}/run/checkpoints/epoch-* >/dev/null 2>&1; do sleep 0.1; done; "
    f"pkill -KILL --parent $job; wait $job; {LONGER} --resume"
)


def checks(machine: Machine) -> list[Check]:
    """All checks, the most important ones first: a total limit leaves out the last. Those that cannot run say why."""
    gpu = "" if machine.gpus else "it needs a GPU"
    return [
        Check(
            "versions",
            "the ranks, their hosts and software, and the links between them",
            TORCHRUN + "ddp.launch.doctor --device {device}",
            60,
        ),
        Check(
            "gpu-tests",
            "the tests that are marked gpu",
            'python -m pytest -q -n {workers} -p no:cacheprovider -m "gpu and not slow" tests',
            200,
            obstacle=gpu or _no_tests(),
        ),
        Check(
            "equivalence",
            "torch's DDP and the one by hand give the same weights, in double precision",
            TORCHRUN + EQUIVALENCE + "--device {device}",
            60,
            results.of_equivalence,
        ),
        Check(
            "equivalence-shared",
            "the same with two gloo ranks that share the GPU",
            "torchrun --nproc_per_node=2 -m " + EQUIVALENCE + "--device cuda --backend gloo",
            60,
            results.of_equivalence,
            obstacle=gpu or ("" if machine.gpus == 1 else "each rank has a GPU of its own"),
        ),
        *(
            Check(
                f"precision-{precision}",
                f"training in {precision}: images/s, MFU, peak memory",
                ONE_EPOCH + f"--precision {precision} " + "{large}",
                120,
                results.of_training,
            )
            for precision in PRECISIONS
        ),
        Check("engines", "the DDP by hand against torch's", ENGINES + "--ranks {ranks}", 150, results.of_engines),
        Check(
            "engines-alone",
            "the same at world size 1: what a wrapper costs without communication",
            ENGINES + "--ranks 1",
            150,
            results.of_engines,
            obstacle="the check engines has one rank" if machine.ranks == 1 else "",
        ),
        Check(
            "profile",
            "where the GPU idles behind a synchronization of the host",
            # Steps 11 to 14 are recorded. Within an epoch, since saving a checkpoint makes the host wait; and so does logging.
            ONE_EPOCH + "--profile {profiled} --log-every 100 && "
            "python -m ddp.gpu_check.gaps --trace {out}/run/profile/rank0.json.gz --output {out}",
            90,
            results.of_gaps,
        ),
        Check(
            "overhead",
            "the trainer against a bare loop",
            BENCH_ON_RANKS + "overhead --device {device} {overhead} --output {out}",
            90,
            results.of_overhead,
        ),
        Check(
            "overhead-large",
            "the same on ResNet-50",
            BENCH_ON_RANKS + "overhead --device {device} {overhead_large} --output {out}",
            90,
            results.of_overhead,
        ),
        Check(
            "safety",
            "the guards and checkpoints against a step without",
            BENCH_ON_RANKS + "safety --device {device} {safety} --output {out}",
            120,
            results.of_safety,
        ),
        Check(
            "resume",
            "all ranks are killed after the first checkpoint; the run continues",
            RESUME,
            120,
            expects="resuming after step",
        ),
        Check(
            "pinned",
            "copies of a batch to the GPU, from page-locked memory and from other",
            "python -m ddp.gpu_check.pinned --output {out}",
            60,
            results.of_pinned,
            obstacle=gpu,
        ),
        Check(
            "lfw",
            "training from JPEG files, which loader workers decode",
            ONE_EPOCH + "--dataset lfw {faces}",
            120,
            results.of_training,
        ),
        Check(
            "strategies",
            "one process, data parallelism in one process, DDP: why two is not twice",
            BENCH + "strategies --device {device} {strategies} --output {out}",
            120,
            results.of_strategies,
        ),
        Check(
            "dataparallel",
            "one process with all devices, by hand",
            "python -m dataparallel.train --devices {devices} --epochs 1 {small} --run-dir {out}/run --overwrite",
            90,
            results.of_training,
        ),
        Check(
            "allreduce",
            "the backend's all-reduce by size",
            BENCH + "allreduce --device {device} --ranks {ranks} {allreduce} --output {out}",
            90,
            results.of_allreduce,
            obstacle="one GPU has nothing to sum" if machine.gpus == 1 else "",
        ),
        Check(
            "timeline",
            "one step: what is summed while gradients are computed",
            "python -m ddp.timeline --device {device} --ranks {ranks} {timeline} --output {out}",
            90,
            results.of_timeline,
        ),
        Check(
            "compile",
            "torch.compile with CUDA graphs",
            ONE_EPOCH + "--compile reduce-overhead {small}",
            120,
            results.of_training,
            obstacle=gpu,
        ),
    ]


def _no_tests() -> str:
    if not Path("tests", "conftest.py").is_file():
        return "the tests are not here: start it in the root of the repository"
    return "" if importlib.util.find_spec("xdist") else "pytest and its xdist are not installed: pip install '.[test]'"
