"""ddp/train.py: the same result however the work is divided, interrupted or loaded."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from common.errors import UsageError
from ddp.checkpoint import storage
from ddp.config import TrainConfig
from ddp.data import load_data
from ddp.rendezvous.process_group import process_group
from ddp.train import build_job, train_step
from tests.ddp.jobs import (
    Outcome,
    assert_close,
    assert_identical,
    final_state,
    group_of,
    newest,
    run_job,
    small,
    start,
    train_epochs,
)
from tests.support.launch import run_ranks

# The same mathematics, however it is divided


@pytest.fixture(scope="module")
def alone() -> Outcome:
    """Twenty steps on one rank. At a high learning rate, float32's rounding grows a hundredfold every few steps."""
    return run_ranks(train_epochs, 1, small(lr=0.002, sync_batchnorm=True))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_world_sizes_agree(alone: Outcome, world_size: int) -> None:
    """Two, three and four ranks end with the parameters and the confusion matrix of one rank.

    Claim (README.md): 1, 2, 3 and 4 ranks end with the same parameters and confusion matrix.
    """
    ranks = run_ranks(train_epochs, world_size, small(lr=0.002, sync_batchnorm=True))
    for outcome in ranks:
        assert_identical(outcome.parameters, ranks[0].parameters)  # running statistics too
        assert_close(outcome.parameters, alone.parameters, 1e-5)
        assert outcome.losses == pytest.approx(alone.losses, rel=1e-6)  # the mean over ranks, not a rank's own
        assert np.array_equal(outcome.confusion, alone.confusion)


def test_micro_steps_equal_one_big_batch() -> None:
    """Four micro-steps end with the parameters of one batch of the same samples.

    Claim (README.md): four micro-steps equal one big batch.
    """
    whole, *others = (
        run_ranks(train_epochs, 2, small(model="mlp", grad_accumulation_steps=k, train_samples=576))[0]
        for k in (1, 2, 4)
    )
    for divided in others:
        assert_close(divided.parameters, whole.parameters, 1e-5)
        assert divided.losses == pytest.approx(whole.losses, rel=1e-6)


def dropped(config: TrainConfig) -> list[bytes]:
    """The units that dropout keeps on this rank, in each micro-step of two steps."""
    masks: list[bytes] = []
    with process_group(threads=1) as env:
        job = build_job(config, env, load_data(config, env))
        (dropout,) = [part for part in job.network.modules() if isinstance(part, torch.nn.Dropout)]
        dropout.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 0 + 1,))
        dropout.register_forward_hook(lambda *call: masks.append(call[-1].detach().bool().numpy().tobytes()))
        batches = job.guard.batches(job.loader)
        for _ in range(2):
            train_step(job, batches)
    return masks


def test_each_rank_drops_other_units_in_each_micro_step() -> None:
    """Dropout is a function of (seed, step, micro-step, rank), and alike in no two of them."""
    config = small(train_samples=96, batch_size=24, grad_accumulation_steps=2, dropout=0.5)
    masks = run_ranks(dropped, 2, config)
    assert len({mask for of_rank in masks for mask in of_rank}) == 8
    assert run_ranks(dropped, 2, config) == masks


def bytes_per_step(config: TrainConfig) -> tuple[list[int], int]:
    """The bytes that DDP sends in each of three steps, and the bytes of one set of gradients."""
    with process_group() as env:
        job, batches = start(config, env)
        sent: list[int] = []

        def count(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            sent.append(bucket.buffer().nbytes)
            reduced = dist.all_reduce(bucket.buffer().div_(env.world_size), async_op=True)
            return reduced.get_future().then(lambda future: future.value()[0])

        assert isinstance(job.model, DistributedDataParallel)
        job.model.register_comm_hook(None, count)
        steps = []
        for _ in range(3):
            sent.clear()
            train_step(job, batches)
            steps.append(sum(sent))
        return steps, sum(p.numel() * p.element_size() for p in job.model.parameters())


@pytest.mark.parametrize("grad_accumulation_steps", [1, 4])
def test_gradients_cross_the_network_once_per_optimizer_step(grad_accumulation_steps: int) -> None:
    """With micro-steps, each bucket is all-reduced once per optimizer step.

    Claim (README.md): gradients cross the network once per optimizer step.
    """
    for steps, weight in run_ranks(bytes_per_step, 2, small(grad_accumulation_steps=grad_accumulation_steps)):
        assert steps == [weight] * 3


def test_the_hand_written_ddp_trains_to_the_same_bits() -> None:
    """The hand-written DDP trains to the same bits.

    Claim (ddp/by_hand/README.md): DDP by hand trains to torch's bits over random settings and eighteen models.
    """
    settings = {
        "train_samples": 720,
        "dropout": 0.25,
        "grad_accumulation_steps": 2,
        "precision": "bf16",
        "clip_norm": 1.0,
    }
    expected, _ = run_ranks(train_epochs, 2, small(**settings))
    for all_reduce in ("backend", "ring", "shared-memory"):
        config = small(**settings, strategy="handwritten", all_reduce=all_reduce)
        outcome, _ = run_ranks(train_epochs, 2, config)
        assert_identical(outcome.parameters, expected.parameters)
        assert outcome.losses == expected.losses


@pytest.mark.parametrize("gradient_precision", ["fp32", "bf16"])
def test_torch_s_ddp_trains_to_the_same_bits_by_another_all_reduce(gradient_precision: str) -> None:
    """Two ranks of torch's DDP end with the same bits by each all-reduce.

    Claim (ddp/README.md, 4): with `--all-reduce`, torch's DDP trains to the same bits on two ranks.
    """
    settings = {"train_samples": 432, "model": "mlp", "bucket_mib": 0.5, "gradient_precision": gradient_precision}
    expected, _ = run_ranks(train_epochs, 2, small(**settings))
    for strategy, all_reduce in (("torch", "shared-memory"), ("torch", "ring"), ("handwritten", "shared-memory")):
        outcome, _ = run_ranks(train_epochs, 2, small(**settings, strategy=strategy, all_reduce=all_reduce))
        assert_identical(outcome.parameters, expected.parameters)


@pytest.mark.parametrize(
    ("strategy", "wrapper"),
    [
        ("torch", "DistributedDataParallel"),
        ("naive", "NaiveDistributedDataParallel"),
        ("handwritten", "HandwrittenDistributedDataParallel"),
    ],
)
def test_a_job_of_one_has_the_ddp_that_was_asked_for(strategy: str, wrapper: str) -> None:
    with process_group() as env:
        config = small(model="mlp", strategy=strategy)
        assert type(build_job(config, env, load_data(config, env)).model).__name__ == wrapper


def test_gradients_in_bf16_train_to_the_same_bits_by_torch_and_by_hand() -> None:
    """Gradients in bf16 train to the same bits by torch and by hand.

    Claim (ddp/README.md, 4): bucket size, and gradients in bf16, are the same with torch's DDP and the one by hand.
    """
    settings = {"train_samples": 720, "bucket_mib": 0.5}
    whole, by_torch, by_hand = (
        run_ranks(train_epochs, 2, small(**settings, **more))[0].parameters
        for more in ({}, {"gradient_precision": "bf16"}, {"gradient_precision": "bf16", "strategy": "handwritten"})
    )
    assert_identical(by_hand, by_torch)
    assert_close(by_torch, whole, 0.05)
    rounded = [name for name in whole if not np.array_equal(whole[name], by_torch[name])]
    assert "features.0.weight" in rounded


def buckets(configs: list[TrainConfig]) -> list[list[int]]:
    """For each job, the bytes of the buckets of its second backward pass, in their order."""
    with process_group() as env:
        group, bytes_of_jobs = dist.group.WORLD, []
        assert group is not None
        for config in configs:
            job, batches = start(config, env)
            sent: list[int] = []

            def record(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
                sent.append(bucket.buffer().nbytes)  # noqa: B023 (of this job)
                return allreduce_hook(group, bucket)

            job.model.register_comm_hook(None, record)
            train_step(job, batches)
            bytes_of_jobs.append(sent)
        return bytes_of_jobs


def test_a_bucket_has_as_many_mib_as_was_asked_for() -> None:
    """A bucket has as many MiB as was asked for.

    Claim (ddp/README.md, 4): bucket size, and gradients in bf16, are the same with torch's DDP and the one by hand.
    """
    sizes: list[float | None] = [None, 0.25, 100]
    configs = [small(bucket_mib=mib, strategy=name) for mib in sizes for name in ("torch", "handwritten")]
    default, default_by_hand, small_ones, small_by_hand, large, large_by_hand = run_ranks(buckets, 1, configs)[0]
    assert len(large) == 1 < len(default) < len(small_ones)
    assert (default_by_hand, small_by_hand, large_by_hand) == (default, small_ones, large)


def different_models(models: tuple[str, str]) -> str:
    with process_group() as env:
        config = small(model=models[env.rank], strategy="handwritten")
        with pytest.raises(UsageError) as user_error:
            build_job(config, env, load_data(config, env))
        assert user_error.value.seen_by_all
        return str(user_error.value)


def test_ranks_with_different_models_are_told_so() -> None:
    """Ranks with different models are refused in one line that names the first difference.

    Claim (ddp/README.md, 4): ranks with different models are told so.
    """
    for message in run_ranks(different_models, 2, ("fashion-cnn", "mlp")):
        assert "features.0.weight" in message
        assert "rank 1" in message


WITH_WORKERS = {"epochs": 2, "train_samples": 720, "dropout": 0.25}


@pytest.fixture(scope="module")
def without_workers() -> Outcome:
    return run_ranks(train_epochs, 2, small(**WITH_WORKERS))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("workers", "persistent"), [(2, True), (4, False)])
def test_loader_workers_do_not_change_a_bit(without_workers: Outcome, workers: int, persistent: bool) -> None:
    """Runs with 0, 2 and 4 loader workers end with the same bits.

    Claim (README.md): 0, 2 or 4 loader workers change no bit.
    """
    expected = without_workers
    outcome, _ = run_ranks(train_epochs, 2, small(**WITH_WORKERS, workers=workers, persistent_workers=persistent))
    assert_identical(outcome.parameters, expected.parameters)
    assert outcome.losses == expected.losses


# Interrupted and continued


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {"optimizer": "adamw", "schedule": "one-cycle", "async_checkpoint": True}),
        (2, {"precision": "bf16", "clip_norm": 1.0, "workers": 1}),
        pytest.param(2, {"precision": "fp16", "clip_norm": 1.0, "workers": 1}, marks=pytest.mark.slow),
        pytest.param(
            *(2, {"grad_accumulation_steps": 2, "sync_batchnorm": True, "async_checkpoint": True}),
            marks=pytest.mark.slow,
        ),
        (3, {}),  # the sum of three floats depends on their order, and so on DDP's buckets
        pytest.param(3, {"strategy": "handwritten", "all_reduce": "ring"}, marks=pytest.mark.slow),
    ],
)
def test_resuming_anywhere_changes_no_bit(tmp_path: Path, world_size: int, settings: dict[str, Any]) -> None:
    """A run that is resumed from any of its checkpoints ends with the same bits.

    Two epochs of four steps, a checkpoint after each: in the middle of a window of the metrics, at its end, after the last
    step of an epoch's training, and after its evaluation.

    Claim (README.md): `--resume` after any step changes no bit.
    """
    config = {"epochs": 2, "train_samples": 576, "test_samples": 50, "dropout": 0.25, "log_every": 3, **settings}
    config |= {"checkpoint_every": "1", "keep_last": 100}
    whole = tmp_path / "whole"
    run_ranks(run_job, world_size, small(**config, run_dir=whole))
    tensors, metrics = final_state(whole)
    names = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert names == [f"epoch-{step // 4:04d}-step-{step:08d}" for step in range(1, 9)]
    for last in (2, 4, 8) if world_size == 1 else (2, 7):
        part = tmp_path / f"after-{last}"
        shutil.copytree(whole, part)
        for later in names[last:]:
            shutil.rmtree(part / "checkpoints" / later)
        run_ranks(run_job, world_size, small(**config, run_dir=part, resume=True))
        resumed_tensors, resumed_metrics = final_state(part)
        assert_identical(resumed_tensors, tensors)
        assert resumed_metrics == metrics  # none missing, none twice


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"sync_batchnorm": True, "train_samples": 1440}, [(5, 1, {"workers": 1}), (15, 3, {"workers": 0})]),
        # BatchNorm's batches are those of a micro-step, so other micro-steps need a model without it.
        pytest.param(
            {"model": "mlp", "train_samples": 720},
            [(3, 1, {"grad_accumulation_steps": 2}), (6, 3, {"grad_accumulation_steps": 4, "workers": 1})],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["workers", "micro-steps"],
)
def test_two_then_one_then_three_ranks_take_the_same_steps(
    tmp_path: Path, settings: dict[str, Any], parts: list[tuple[int, int, dict[str, Any]]]
) -> None:
    """A run that is continued in the middle of epochs by other numbers of ranks, workers and micro-steps takes the same steps.

    Continued in the middle of epochs by other numbers of ranks, loader workers and micro-steps.

    Claim (README.md): continued by another number of ranks, a run takes the same global batches.
    """
    # As few steps, and as small ones, as above.
    config: dict[str, Any] = {"epochs": 2, "lr": 0.001, "log_every": 4, "keep_last": 100, **settings}
    config["checkpoint_every"] = str(parts[0][0])
    run_ranks(run_job, 2, small(**config, run_dir=tmp_path / "whole"))
    expected, metrics = final_state(tmp_path / "whole")
    part = tmp_path / "part"
    shutil.copytree(tmp_path / "whole", part)
    for step, world_size, change in parts:
        for later in (part / "checkpoints").iterdir():
            if int(later.name[-8:]) > step:
                shutil.rmtree(later)
        run_ranks(run_job, world_size, small(**config, **change, run_dir=part, resume=True))
    tensors, resumed = final_state(part)
    for name, value in expected.items():
        if name.startswith(("model.", "optimizer.")):
            difference = (tensors[name] - value).abs().max() / value.abs().max().clamp(min=1.0)
            assert difference <= 1e-4, f"{name} differs by {difference:.2e}"
    assert [record["step"] for record in resumed] == [record["step"] for record in metrics]
    assert [r["loss"] for r in resumed] == pytest.approx([r["loss"] for r in metrics], rel=1e-4)


TWO_STEPS: dict[str, Any] = {"train_samples": 288, "test_samples": 10}


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    run_ranks(run_job, 1, small(**TWO_STEPS, run_dir=run_dir))
    return run_dir


@pytest.mark.parametrize("change", [{"weight_decay": 0.25}, {"momentum": 0.5}, {"precision": "fp16"}])
def test_resuming_with_other_settings_takes_them(tmp_path: Path, one_epoch: Path, change: dict[str, Any]) -> None:
    config = TWO_STEPS | {"run_dir": shutil.copytree(one_epoch, tmp_path / "run")}
    run_ranks(run_job, 1, small(**config | {"epochs": 2, "resume": True} | change))
    path, manifest = newest(tmp_path / "run")
    group = storage.read(path, "optimizer")["param_groups"][0]
    after = {**group, "precision": "fp16" if manifest.progress["scaler"] else "fp32"}
    assert after | change == after
    assert manifest.epoch == 2


# Mixed precision


def with_an_inf(poisoned_step: int) -> tuple[list[float], list[bool], Any]:
    """Four fp16 steps; in one of them, one gradient of the last rank is infinite. Scales, and which steps moved weights."""
    with process_group() as env:
        job, batches = start(small(precision="fp16", train_samples=576), env)
        weight = next(job.network.parameters())
        if env.rank == env.world_size - 1:
            weight.register_hook(lambda grad: grad * (math.inf if job.step == poisoned_step else 1))
        scales, moved = [], []
        for _ in range(4):
            before = weight.detach().clone()
            train_step(job, batches)
            scales.append(job.scaler.get_scale())
            moved.append(not torch.equal(weight, before))
        return scales, moved, {name: p.detach().numpy().copy() for name, p in job.network.named_parameters()}


@pytest.mark.parametrize("poisoned_step", [0, 2])
def test_an_inf_on_one_rank_makes_every_rank_skip_the_step(poisoned_step: int) -> None:
    """An inf on one rank makes every rank skip the step.

    Claim (README.md): an inf on one rank makes every rank skip the step.
    """
    ranks = run_ranks(with_an_inf, 2, poisoned_step)
    for scales, moved, parameters in ranks:
        assert moved == [step != poisoned_step for step in range(4)]
        assert scales == [65536.0 if step < poisoned_step else 32768.0 for step in range(4)]
        assert_identical(parameters, ranks[0][2])
        assert all(np.isfinite(value).all() for value in parameters.values())


def norm_that_clipping_sees(config: TrainConfig) -> tuple[float, float]:
    """The gradients' norm as clipping is given it, and after the step's clipping."""
    with group_of(config) as env:
        job, batches = start(config, env)
        norms = []
        clip = job.clip_grad_norm_

        def spy(parameters: Any, max_norm: float, **options: Any) -> Tensor:
            kept = list(parameters)
            norms.append(clip(kept, max_norm, **options).item())
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in kept if p.grad is not None]).item())
            return torch.tensor(norms[0], device=kept[0].device)

        job.clip_grad_norm_ = spy
        train_step(job, batches)
        before, after = norms
        return before, after


def test_clipping_sees_unscaled_gradients() -> None:
    """Clipping sees unscaled gradients.

    Claim (README.md): clipping sees unscaled gradients.
    """
    norms = {}
    for precision in ("fp32", "fp16"):
        config = small(precision=precision, clip_norm=0.01)
        (norms[precision], other) = run_ranks(norm_that_clipping_sees, 2, config)
        assert other == norms[precision]  # no collective is needed: the ranks hold the same gradients
    assert norms["fp16"][0] == pytest.approx(norms["fp32"][0], rel=0.02)  # 65536 times as large were it scaled
    assert norms["fp16"][1] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.slow
def test_low_precision_follows_fp32() -> None:
    """In bf16 and fp16 the loss follows that of fp32.

    Claim (README.md): bf16 and fp16 learn as fp32 does.
    """
    config = {"epochs": 2, "train_samples": 1440, "test_samples": 10}
    expected, *others = (run_ranks(train_epochs, 2, small(**config, precision=p))[0] for p in ("fp32", "bf16", "fp16"))
    for outcome in others:
        assert outcome.losses == pytest.approx(expected.losses, rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(2400)  # fp16 on a CPU
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_ends_within_half_a_point_of_fp32(precision: str) -> None:
    """Whole trainings in bf16 and fp16 end within half a point of fp32's accuracy.

    Claim (README.md): after whole trainings, their accuracy is that of fp32 to half a point.
    """
    expected, outcome = (
        run_ranks(train_epochs, 2, TrainConfig(precision=p), timeout_s=1800)[0].confusion for p in ("fp32", precision)
    )
    accuracy, reference = (confusion.trace() / confusion.sum() for confusion in (outcome, expected))
    assert reference >= 0.97
    assert abs(accuracy - reference) <= 0.005


# Options


def test_the_learning_rate_of_each_step_reaches_the_optimizer() -> None:
    """The learning rate of each step reaches the optimizer.

    Claim (ddp/README.md, 6): the learning rate of each step reaches the optimizer; schedules are torch's.
    """
    with process_group() as env:
        job, batches = start(small(model="mlp", schedule="constant", warmup_epochs=0.1, lr=0.3), env)
        rates = []
        for _ in range(4):
            train_step(job, batches)
            rates.append(job.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.3])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"model": "resnet18", "lr": 0.02}, marks=pytest.mark.slow),
        {"optimizer": "adam", "label_smoothing": 0.1},
        {"channels_last": False, "augment": False},
        pytest.param({"model": "resnet50", "image_size": 28, "optimizer": "adam", "lr": 1e-4}, marks=pytest.mark.slow),
        pytest.param({"compile": "default", "model": "mlp"}, marks=pytest.mark.slow),
        pytest.param({"compile": "reduce-overhead", "strategy": "handwritten", "model": "mlp"}, marks=pytest.mark.slow),
    ],
)
def test_it_learns_with(settings: dict[str, Any]) -> None:
    """Two epochs on few samples: enough to see the loss fall."""
    config = {"train_samples": 720, "epochs": 2, "test_samples": 10, "lr": None, **settings}
    outcomes = run_ranks(train_epochs, 2, small(**config), timeout_s=280, fresh="compile" in settings)
    assert outcomes[0].losses[1] < outcomes[0].losses[0]
    assert_identical(outcomes[0].parameters, outcomes[1].parameters)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"gradient_precision": "bf16", "bucket_mib": 1},
        {"gradient_precision": "bf16", "strategy": "handwritten"},
        pytest.param({"compile": "reduce-overhead"}, marks=pytest.mark.slow),
        pytest.param({"compile": "reduce-overhead", "strategy": "handwritten"}, marks=pytest.mark.slow),
        pytest.param({"compile": "max-autotune"}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "fp32",
)
def test_a_gpu_learns(settings: dict[str, Any], tmp_path: Path) -> None:
    config = small(epochs=2, lr=None, run_dir=tmp_path / "run", **settings)
    run_ranks(run_job, 1, config, fresh=True, timeout_s=280)
    losses = [record["loss"] for record in final_state(tmp_path / "run")[1] if record["kind"] == "epoch"]
    assert losses[1] < losses[0]
