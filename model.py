"""One GPT with choices: norm, positions, MLP, grouped-query attention, qk-norm, windows by layer. Attention comes in.

Layout is (B, T, H, D) from the projection to the kernel: no transposes. GPT-2 (Radford et al. 2019) is one setting
of it, a Llama-like model (RMSNorm, RoPE, SwiGLU, GQA; Touvron et al. 2023) another.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from loss import compute_dtype, linear_cross_entropy

EPS = 1e-5      # said aloud: torch's default for RMSNorm is the input dtype's, 0.008 in bfloat16


class GPT(nn.Module):
    """A causal language model.

    c is config.Model; vocab_size counts the tokenizer's ids, seq_len bounds learned positions, attention is a
    flash_attn2.backends.Attention, run_block(block, *args) runs a block (runtime.memory has others). Public facts:
    windows (one per layer, 0 for the whole row), n_head, head_dim."""

    def __init__(self, c, vocab_size: int, seq_len: int, attention, run_block=lambda block, *args: block(*args)):
        super().__init__()
        self.attention, self.run_block = attention, run_block
        self.n_head, self.head_dim = c.n_head, c.d_model // c.n_head
        self.windows = [c.window if c.window_pattern[i % len(c.window_pattern)] == "S" else 0 for i in range(c.n_layer)]
        self.rope_theta = c.rope_theta if c.position == "rope" else None
        self.vocab_size = vocab_size
        rows = math.ceil(vocab_size / c.vocab_multiple) * c.vocab_multiple
        self.embed = nn.Embedding(rows, c.d_model)
        self.positions = nn.Embedding(seq_len, c.d_model) if c.position == "learned" else None
        self.blocks = nn.ModuleList(Block(c, attention) for _ in range(c.n_layer))
        self.norm = norm(c)
        self.lm_head = nn.Linear(c.d_model, rows, bias=False)
        if c.tied_embeddings:
            self.lm_head.weight = self.embed.weight
        self.init_weights(c.n_layer)

    def init_weights(self, n_layer: int) -> None:
        """GPT-2's: normal(0, 0.02), biases 0, and the layers that add to the residual stream shrunk by sqrt(2 L)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith((".attention_out", ".mlp_out"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * n_layer) if residual else 0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, doc_start: Tensor | None = None) -> Tensor:
        """The loss in nats summed over the targets that are not -1, or, without targets, the logits (B, T, vocab_size).

        tokens, targets (B, T) int64; doc_start (B, T), where in the row each token's document begins (None: one
        document a row). Positions restart at each document."""
        T, device = tokens.shape[1], tokens.device
        position = torch.arange(T, device=device)[None, :]
        if doc_start is not None:
            position = position - doc_start
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(position)
        x = x.to(compute_dtype(x))              # the residual stream; its sums are bfloat16's under autocast
        rotation = None if self.rope_theta is None else rope(position, self.head_dim, self.rope_theta)
        masks = {w: self.attention.mask(T, w, doc_start, device) for w in sorted(set(self.windows))}
        for block, window in zip(self.blocks, self.windows, strict=True):
            x = self.run_block(block, x, rotation, masks[window])
        x = self.norm(x)
        if targets is None:
            return self.lm_head(x)[..., :self.vocab_size].float()
        return linear_cross_entropy(x, self.lm_head.weight, targets)


class Block(nn.Module):
    """Pre-norm: attention, then MLP, each added to the residual stream."""

    def __init__(self, c, attention):
        super().__init__()
        self.attention = attention
        self.n_head, self.n_kv_head, self.head_dim = c.n_head, c.n_kv_head or c.n_head, c.d_model // c.n_head
        self.attention_norm = norm(c)
        self.qkv = nn.Linear(c.d_model, (self.n_head + 2 * self.n_kv_head) * self.head_dim, bias=c.bias)
        self.q_norm = nn.RMSNorm(self.head_dim, EPS) if c.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, EPS) if c.qk_norm else None
        self.attention_out = nn.Linear(c.d_model, c.d_model, bias=c.bias)
        self.mlp_norm = norm(c)
        self.gated = c.mlp == "swiglu"
        width = c.d_ff or (4 * c.d_model if not self.gated else math.ceil(8 * c.d_model / 3 / 64) * 64)
        self.mlp_in = nn.Linear(c.d_model, 2 * width if self.gated else width, bias=c.bias)
        self.mlp_out = nn.Linear(width, c.d_model, bias=c.bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask) -> Tensor:
        return self.feed(self.attend(x, rotation, mask))

    def attend(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask) -> Tensor:
        B, T, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(B, T, self.n_head + 2 * self.n_kv_head, self.head_dim)
        q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=2)        # (B, T, H or H_kv, D)
        if self.q_norm is not None:
            q, k = self.q_norm(q.float()), self.k_norm(k.float())
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        o = self.attention(q.to(v.dtype), k.to(v.dtype), v, mask)
        return x + self.attention_out(o.flatten(2))

    def feed(self, x: Tensor) -> Tensor:
        """Token by token."""
        return x + self.mlp_out(self.activation(self.mlp_in(self.mlp_norm(x))))

    def activation(self, h: Tensor) -> Tensor:
        if not self.gated:
            return F.gelu(h, approximate="tanh")
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up


class LikeInput:
    """A norm that autocast computes in float32 gives its input's dtype back."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


class LayerNorm(LikeInput, nn.LayerNorm):
    pass


class RMSNorm(LikeInput, nn.RMSNorm):
    pass


def norm(c) -> nn.Module:
    return RMSNorm(c.d_model, EPS) if c.norm == "rmsnorm" else LayerNorm(c.d_model, EPS, bias=c.bias)


def rope(position: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin (B, T, 1, D/2) of position * theta^(-2i/D) (Su et al. 2021), in float32 under any autocast: bfloat16
    could not tell position 4097 from 4098."""
    inverse = theta ** (torch.arange(0, head_dim, 2, device=position.device, dtype=torch.float32) / -head_dim)
    angle = position[:, :, None, None].float() * inverse
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, H, D) with its two halves taken as the two coordinates of D/2 planes."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
