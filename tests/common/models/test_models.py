"""``common.models.build``: shapes, sizes in closed form, and what dropout does to them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from common.errors import UsageError
from common.models.build import MODELS, RESNETS, FashionCNN, build_model

GREY, RGB = (1, 28, 28), (3, 32, 32)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [GREY, RGB])
def test_every_model_maps_images_to_finite_logits_and_every_parameter_learns(
    name: str, shape: tuple[int, int, int]
) -> None:
    model = build_model(name, shape, classes=7)
    logits = model(torch.rand(3, *shape))
    assert (logits.shape, logits.dtype) == ((3, 7), torch.float32)
    assert logits.isfinite().all()
    logits.sum().backward()
    assert all(p.grad is not None and p.dtype == torch.float32 for p in model.parameters())


@given(height=st.integers(8, 40), width=st.integers(8, 40), channels=st.integers(1, 3), classes=st.integers(2, 12))
def test_fashion_cnn_fits_images_of_any_size_from_8x8(height: int, width: int, channels: int, classes: int) -> None:
    with torch.device("meta"):  # shapes alone
        model = FashionCNN(channels, height, width, classes, dropout=0.0)
        assert model(torch.empty(2, channels, height, width)).shape == (2, classes)


def test_mlp_has_57_megabytes_of_gradients() -> None:
    layers = (784 * 2048 + 2048) + 3 * (2048 * 2048 + 2048) + (2048 * 10 + 10)
    assert parameters(build_model("mlp", GREY, 10)) == layers == 14_217_226
    assert round(4 * layers / 1e6) == 57


@pytest.mark.parametrize("name", RESNETS)
def test_a_resnet_is_torchvisions_with_the_images_channels(name: str) -> None:
    from torchvision import models

    ours, theirs = build_model(name, GREY, 10), getattr(models, name)(num_classes=10)
    shapes = {name: tuple(value.shape) for name, value in theirs.state_dict().items()} | {"conv1.weight": (64, 1, 7, 7)}
    assert {name: tuple(value.shape) for name, value in ours.state_dict().items()} == shapes
    # He et al.'s initialization by fan-out, as torchvision's own first layer has it
    assert ours.state_dict()["conv1.weight"].std().item() == pytest.approx((2 / (64 * 49)) ** 0.5, rel=0.1)


def twice(model: nn.Module) -> tuple[Tensor, Tensor]:
    images = torch.rand(8, *GREY)
    return model(images), model(images)


@pytest.mark.parametrize("name", ["fashion-cnn", "mlp"])
def test_dropout_is_the_only_randomness_and_only_in_training(name: str) -> None:
    assert torch.equal(*twice(build_model(name, GREY, 10, dropout=0.0)))
    model = build_model(name, GREY, 10, dropout=0.5)
    assert not torch.equal(*twice(model))
    assert torch.equal(*twice(model.eval()))


def test_a_model_of_ones_own_is_built_with_the_shape_and_the_classes(own: Callable[[str], str]) -> None:
    name = own(
        "def build(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes), nn.Dropout())"
    )
    before = torch.get_rng_state()
    model = build_model(name, (2, 3, 5), 7)
    assert model.training
    assert model[1].weight.shape == (7, 30)  # type: ignore[index]
    assert all(parameter.requires_grad and not parameter.is_inference() for parameter in model.parameters())
    torch.set_rng_state(before)
    again = build_model(name, (2, 3, 5), 7)
    assert torch.equal(again[1].weight, model[1].weight)  # type: ignore[index]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", "returned a int instead of an nn.Module: .* float images .n, 2, 3, 5. and returns logits .n, 7."),
        ("return nn.Flatten()", "its module returned .2, 30. for images .2, 2, 3, 5.: it must return logits .2, 7."),
        ("return nn.LSTM(5, 7) if 0 else Pair()", "its module returned a tuple for images"),
    ],
)
def test_what_is_no_such_model_is_one_line(own: Callable[[str], str], body: str, message: str) -> None:
    name = own(f"class Pair(nn.Module):\n    def forward(self, x): return x, x\ndef build(shape, classes): {body}")
    with pytest.raises(UsageError, match=f"^--model {name}:? {message}") as error:
        build_model(name, (2, 3, 5), 7)
    assert "\n" not in str(error.value)


def test_what_the_function_itself_raises_passes_as_it_is(own: Callable[[str], str]) -> None:
    with pytest.raises(ZeroDivisionError):
        build_model(own("def build(shape, classes): return 1 / 0"), (2, 3, 5), 7)


def test_images_that_are_too_small_for_the_cnn_are_refused() -> None:
    with pytest.raises(UsageError, match="--model fashion-cnn needs images of 8x8 pixels or more, not 7x9"):
        build_model("fashion-cnn", (1, 7, 9), 3)
    assert build_model("fashion-cnn", (1, 8, 9), 3)(torch.zeros(2, 1, 8, 9)).shape == (2, 3)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """``own(text)``: the name of ``build`` in a new module with this text."""

    def write(text: str) -> str:
        monkeypatch.delitem(sys.modules, "own_model", raising=False)
        (tmp_path / "own_model.py").write_text(f"from torch import nn\n{text}\n")
        monkeypatch.syspath_prepend(tmp_path)
        return "own_model:build"

    return write
