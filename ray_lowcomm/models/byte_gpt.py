"""A small GPT for bytes, or any other tokens: the default model of the jobs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError


class ByteGPT(nn.Module):
    """A decoder-only transformer with pre-norm blocks, causal attention, GELU and no biases in its matrices.

    Positions are relative: head i lowers the score of a token n places back by n / 2**i (ALiBi, Press et al., 2022).
    It costs nothing to learn, needs no buffer and holds for any length. The rest is GPT-2 (Radford et al., 2019), but
    that each branch starts at zero. `tied`: the output layer uses the weights of the embedding.

    The initial weights come from torch's global random generator. On a CPU the same weights and batch give the same
    bits with the same number of threads. Raises ModelError for sizes that make no model.
    """

    def __init__(
        self,
        layers: int = 2,
        width: int = 64,
        heads: int = 2,
        vocab_size: int = 256,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("layers", layers), ("width", width), ("heads", heads), ("vocab_size", vocab_size)):
            if value < 1:
                raise ModelError(f"model.args.{name} = {value}: must be at least 1")
        if width % heads:
            raise ModelError(f"model.args.width = {width}: must be a multiple of model.args.heads = {heads}")
        self.slopes = tuple(2.0**-head for head in range(heads))
        self.embedding = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the mean cross-entropy, 0-d, in nats, of `labels` given `input_ids`, both [B, T] int64."""
        logits = self.logits(batch["input_ids"]).float()
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def logits(self, input_ids: Tensor) -> Tensor:
        """Returns the scores of the next token, [B, T, vocab_size], for `input_ids`, [B, T] int64."""
        x = self.dropout(self.embedding(input_ids))
        bias = self._attention_bias(input_ids.shape[1], x.device)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x))

    def _attention_bias(self, length: int, device: torch.device) -> Tensor:
        """[1, heads, T, T] float32: minus slope times distance, and minus infinity for what is still to come."""
        places = torch.arange(length, device=device)
        distance = places[:, None] - places
        bias = distance * -torch.tensor(self.slopes, device=device)[:, None, None]
        return bias.masked_fill(distance < 0, float("-inf"))[None]


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream [B, T, width]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        nn.init.zeros_(self.attention_out.weight)
        nn.init.zeros_(self.mlp_out.weight)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Returns the new stream, [B, T, width]; `bias` [1, heads, T, T] is added to the scores of the attention."""
        x = x + self.dropout(self.attention_out(self._attend(self.attention_norm(x), bias)))
        return x + self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))

    def _attend(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.attention_in(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        # Only a mask with the batch dimension spelt out takes the fused kernel on a CPU.
        mask = bias.to(query.dtype).expand(batch, -1, -1, -1)
        rate = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=rate)
        return mixed.transpose(1, 2).reshape(batch, length, width)
