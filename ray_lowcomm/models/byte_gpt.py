"""A small GPT for bytes (or any tokens): the default model of the jobs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError


class ByteGPT(nn.Module):
    """Decoder-only transformer: pre-norm blocks, learned positions, GELU, causal attention.

    Weights are drawn from torch's global random generator: seed it for the same model again. The same weights and batch
    give the same bits on a CPU with the same number of threads. Source: Radford et al., 2019 (GPT-2).
    """

    def __init__(
        self,
        layers: int = 2,
        width: int = 64,
        heads: int = 4,
        sequence_length: int = 64,
        vocab_size: int = 256,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.sequence_length = sequence_length
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Parameter(torch.empty(sequence_length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self._initialise(layers)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.logits(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    def logits(self, input_ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(input_ids) + self.positions[: input_ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = 0.02
                if name.endswith(("attention_out.weight", "down.weight")):
                    std /= (2 * layers) ** 0.5
                nn.init.normal_(parameter, std=std)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.rate if self.training else 0.0)
        x = x + self.dropout(self.attention_out(y.transpose(1, 2).reshape(B, T, C)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")))
