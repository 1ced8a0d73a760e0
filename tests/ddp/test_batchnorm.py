"""ddp/batchnorm.py: synchronized over ranks, it equals one BatchNorm over the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from common.errors import UsageError
from ddp.batchnorm import convert_sync_batchnorm, make_buffers_equal
from ddp.rendezvous.process_group import process_group
from ddp.sync_batchnorm import SyncBatchNorm
from tests.support.launch import run_ranks

CHANNELS = 5
Result = dict[str, Any]


def inputs(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A batch far from mean 0 and variance 1, and the gradient that comes back to it."""
    generator = torch.Generator().manual_seed(1)
    return 100 + 3 * torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def run(layer: nn.Module, x: Tensor, grad_y: Tensor) -> Result:
    """Two training passes, so that the running statistics move twice, and one in evaluation mode."""
    x = x.clone().requires_grad_()
    for _ in range(2):
        y = layer(x)
    y.backward(grad_y)
    layer.eval()
    tensors = {
        "y": y, "grad_x": x.grad, "evaluated": layer(x.detach()),
        **{f"grad_{name}": parameter.grad for name, parameter in layer.named_parameters()},
        **dict(layer.named_buffers()),
    }  # fmt: skip
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()}


def layer_with(affine: bool, momentum: float | None) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(CHANNELS, affine=affine, momentum=momentum)
    if affine:
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 2, CHANNELS))
            layer.bias.copy_(torch.linspace(-1, 1, CHANNELS))
    return layer


def synchronized(shares: list[int], affine: bool, momentum: float | None, device: str) -> Result:
    """This rank's part of the batch through the synchronized layer."""
    with process_group(device, "gloo") as env:
        x, grad_y = inputs((sum(shares), CHANNELS, 4, 3))
        layer = convert_sync_batchnorm(layer_with(affine, momentum), env.device).to(env.device)
        assert isinstance(layer, SyncBatchNorm if device == "cpu" else nn.SyncBatchNorm)
        mine = slice(sum(shares[: env.rank]), sum(shares[: env.rank + 1]))
        return run(layer, x[mine].to(env.device), grad_y[mine].to(env.device))


@pytest.mark.parametrize(
    ("shares", "affine", "momentum", "device"),
    [
        ([6], True, 0.1, "cpu"),
        ([3, 3], True, 0.1, "cpu"),
        ([1, 4], False, 0.3, "cpu"),
        ([2, 1, 4], True, None, "cpu"),
        pytest.param([3, 3], True, 0.1, "cuda", marks=pytest.mark.gpu),  # torch's own, on one GPU
        pytest.param([1, 4], False, 0.3, "cuda", marks=pytest.mark.gpu),
    ],
)
def test_it_equals_batchnorm_over_the_whole_batch(
    shares: list[int], affine: bool, momentum: float | None, device: str
) -> None:
    """SyncBatchNorm on several ranks equals BatchNorm over the whole batch on one.

    Claim (ddp/README.md, 7): SyncBN equals BatchNorm over the whole batch; running statistics are averaged.
    """
    expected = run(layer_with(affine, momentum), *inputs((sum(shares), CHANNELS, 4, 3)))
    ranks = run_ranks(synchronized, len(shares), shares, affine, momentum, device, fresh=device == "cuda")
    for name in ("y", "grad_x", "evaluated"):
        whole = np.concatenate([rank[name] for rank in ranks])
        np.testing.assert_allclose(whole, expected[name], rtol=1e-4, atol=1e-4)
    for name in ("grad_weight", "grad_bias") if affine else ():
        np.testing.assert_allclose(sum(rank[name] for rank in ranks), expected[name], rtol=1e-4, atol=1e-3)
    for rank in ranks:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            np.testing.assert_allclose(rank[name], expected[name], rtol=1e-5)


def test_conversion_keeps_keys_values_and_mode() -> None:
    layer = nn.BatchNorm2d(4)
    layer.load_state_dict({**layer.state_dict(), "running_mean": torch.full((4,), 7.0)})
    network = nn.Sequential(nn.Conv2d(1, 4, 3), layer, nn.Sequential(nn.BatchNorm1d(3))).eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    hooks = layer.register_forward_hook(lambda *_: None).hooks_dict_ref()
    converted = convert_sync_batchnorm(network, torch.device("cpu"))
    assert converted[1]._forward_hooks is hooks  # type: ignore[index]
    assert sum(isinstance(module, SyncBatchNorm) for module in converted.modules()) == 2
    assert not converted[1].training  # type: ignore[index]
    torch.testing.assert_close(dict(converted.state_dict()), before)


def test_conversion_keeps_objects_freezing_dtypes_and_sharing() -> None:
    """SyncBatchNorm takes over BatchNorm's parameters as they are; a shared module stays one, also within one parent."""
    layer = nn.BatchNorm2d(3).double().requires_grad_(False)
    network = nn.Sequential(layer, nn.Sequential(layer))
    network[1].tied = layer.weight
    converted: Any = convert_sync_batchnorm(network, torch.device("cpu"))
    assert converted[0] is converted[1][0]
    assert converted[0].weight is layer.weight is converted[1].tied
    assert not any(parameter.requires_grad for parameter in converted.parameters())
    assert converted[0].running_mean is layer.running_mean


def test_a_layer_that_does_more_is_refused() -> None:
    class AndReLU(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    with pytest.raises(UsageError, match=r"^1 does more than BatchNorm"):
        convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), AndReLU(2)), torch.device("cpu"))


def test_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        SyncBatchNorm(3)(torch.zeros(3))


def averaged() -> tuple[Any, Any, int]:
    with process_group() as env:
        network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3), nn.BatchNorm1d(3))
        values = {"running_mean": float(env.rank), "running_var": 10.0 + 2 * env.rank, "num_batches_tracked": 4}
        for name, buffer in network.named_buffers():
            buffer.fill_(values[name.split(".")[1]])
        make_buffers_equal(network)
        buffers = dict(network.named_buffers())
        return (
            buffers["0.running_mean"].numpy(),
            buffers["2.running_var"].numpy(),
            int(buffers["2.num_batches_tracked"]),
        )


def test_running_statistics_become_the_ranks_average() -> None:
    """After an epoch, each rank's running statistics are the average of all ranks'.

    Claim (ddp/README.md, 7): SyncBN equals BatchNorm over the whole batch; running statistics are averaged.
    """
    for mean, variance, batches in run_ranks(averaged, 3):
        assert mean.tolist() == [1, 1]
        assert variance.tolist() == [12, 12, 12]
        assert batches == 4
