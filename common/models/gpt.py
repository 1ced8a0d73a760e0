"""A small decoder-only transformer, as GPT-2. The sharded strategies train large ones."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.randomness import derive_seed

HEAD_WIDTH = 64  # of its attention, as in GPT-2


class Block(nn.Module):
    """Causal self-attention and a feed-forward network of four times the width, each added to its own input.

    12 ``width``² parameters, and a few vectors.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, length, width]`` to the same."""
        n, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(n, length, width))
        result: Tensor = x + self.contract(F.gelu(self.expand(self.norm2(x))))
        return result


class GPT(nn.Module):
    """Logits of the next token at each place. (Radford et al., Language Models are Unsupervised Multitask Learners, 2019.)

    :param vocabulary: number of different tokens
    :param width: a multiple of :data:`HEAD_WIDTH`, or less
    :param layers: number of blocks
    :param context: longest sequence
    """

    def __init__(self, vocabulary: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 ``[n, length]`` to ``[n, length, vocabulary]``."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class TextModel(GPT):
    """A GPT whose logits are ``[n, vocabulary, length]``: the classes come second, as ``cross_entropy`` takes them.

    Each layer draws its initial values from a seed of its own. So on the CPU they are the same whether the model is built whole,
    or on the meta device to get its values one unit at a time. (A GPU's generator draws others.)
    """

    def __init__(self, vocabulary: int, width: int, layers: int, context: int) -> None:
        super().__init__(vocabulary, width, layers, context)
        for name, part in self.named_modules():
            reset = getattr(part, "reset_parameters", None)
            if reset is not None:
                part.reset_parameters = functools.partial(_reset, reset, derive_seed(torch.initial_seed(), name))
                if not next(part.parameters()).is_meta:
                    part.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).transpose(1, 2)


def _reset(reset: Callable[[], None], seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reset()
