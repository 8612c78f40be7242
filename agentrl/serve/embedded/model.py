"""The forward pass of the GLM-4-MoE layout over flat tokens, and the KV memory it reads and writes.

Tokens of all sequences lie flat in one axis; only attention knows about sequences. Every running request owns one row
of the working KV, so a decode step is one padded attention over rows 0..n-1 with no gathering. Finished prefixes live
in a block pool apart; a request copies what it reuses into its row once.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.serve.embedded.weights import Layer, ModelConfig, Weights

Attend = Callable[[int, Tensor], Tensor]
"""(layer, queries of shape (tokens, heads, head)) -> (tokens, heads * head)"""


class Kv:
    """rows: (layers, 2, rows, kv heads, context, head). pool: (layers, 2, kv heads, blocks, block tokens, head).

    Zeroed at the start: what lies beyond a row's length is multiplied by an attention weight of zero, and must not be
    NaN. Pages are touched only when used.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, rows: int, context: int) -> None:
        self.shape = (config.num_hidden_layers, 2, config.num_key_value_heads)
        self.head = config.head
        self.dtype = dtype
        layers, two, heads = self.shape
        self.rows = _zeros((layers, two, rows, heads, context, self.head), dtype)

    def pool(self, blocks: int, block_tokens: int) -> Tensor:
        return _zeros((*self.shape, blocks, block_tokens, self.head), self.dtype)

    def move(self, source: int, target: int, length: int) -> None:
        self.rows[:, :, target, :, :length] = self.rows[:, :, source, :, :length]

    def restore(self, row: int, pool: Tensor, blocks: Sequence[int]) -> None:
        """Copy whole blocks of the pool to the beginning of a row."""
        held = pool.index_select(3, torch.tensor(blocks))
        length = held.shape[3] * held.shape[4]
        self.rows[:, :, row, :, :length] = held.view(*self.shape, length, self.head)

    def save(self, row: int, pool: Tensor, fresh: Sequence[tuple[int, int]], size: int) -> None:
        """Copy blocks (pool index, index in the row) of a row to the pool; they are neighbours in the row."""
        first, last = fresh[0][1], fresh[-1][1] + 1
        part = self.rows[:, :, row, :, first * size : last * size]
        pool.index_copy_(3, torch.tensor([b for b, _ in fresh]), part.reshape(*self.shape, len(fresh), size, self.head))

    def wipe(self, row: int) -> None:
        self.rows[:, :, row].zero_()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeroed by the kernel page by page as it is used; torch.zeros would write, and so occupy, all of it at once.

    Small pages on purpose: numpy's allocator asks for huge ones, which made a decode step 1.6 times slower here (rows
    lie a power of two apart, and physically contiguous memory maps them to the same cache sets).
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Model:
    """`weights` may be replaced between two calls; nothing else holds them."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, context: int) -> None:
        self.config = config
        self.weights = weights
        self.dtype = dtype
        positions = torch.arange(context, dtype=torch.float32)
        inverse = 1.0 / (config.theta ** (torch.arange(0, config.rotary, 2, dtype=torch.float32) / config.rotary))
        angles = torch.outer(positions, inverse)
        self._cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None].to(dtype)
        # the sign of rotate_half folded in: (-second half, first half) * sin = (second, first) * (-sin, sin)
        self._sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None].to(dtype)
        self._steps = torch.arange(context)

    def prefill(self, kv: Kv, parts: Sequence[tuple[int, Sequence[int], int]]) -> Tensor:
        """Compute the tokens of `parts` = (row, tokens, position of the first); logits after the last of each part."""
        rows = torch.cat([torch.full((len(tokens),), row) for row, tokens, _ in parts])
        positions = torch.cat([self._steps[start : start + len(tokens)] for _, tokens, start in parts])
        flat = torch.tensor([token for _, tokens, _ in parts for token in tokens])
        masks = [
            (self._steps[start : start + len(tokens), None] >= self._steps[None, : start + len(tokens)])
            for _, tokens, start in parts
        ]

        def attend(layer: int, queries: Tensor) -> Tensor:
            outs, begin = [], 0
            for (row, tokens, start), mask in zip(parts, masks, strict=True):
                count = len(tokens)
                keys, values = kv.rows[layer, :, row : row + 1, :, : start + count]
                query = queries[begin : begin + count].transpose(0, 1)[None]
                out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
                outs.append(out[0].transpose(0, 1).flatten(1))
                begin += count
            return torch.cat(outs)

        hidden = self._trunk(kv, flat, rows, positions, attend)
        ends = torch.tensor([len(tokens) for _, tokens, _ in parts]).cumsum(0) - 1
        return self._logits(hidden[ends])

    def decode(self, kv: Kv, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """One more token on each of `rows` (ascending); logits (rows, vocabulary), float32."""
        count = int(rows[-1]) + 1
        longest = int(positions.max()) + 1
        dense = count == len(rows)
        lengths = positions if dense else torch.zeros(count, dtype=torch.long).index_copy_(0, rows, positions)
        mask = torch.zeros(count, 1, 1, longest, dtype=self.dtype)
        mask.masked_fill_(self._steps[:longest] > lengths[:, None, None, None], float("-inf"))
        heads, groups, head = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head

        def attend(layer: int, queries: Tensor) -> Tensor:
            if not dense:
                queries = queries.new_zeros(count, heads, head).index_copy_(0, rows, queries)
            keys, values = kv.rows[layer, :, :count, :, :longest]
            # the query heads that share a KV head stand in as so many positions: no copy of K and V
            grouped = queries.reshape(count, groups, heads // groups, head)
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(count, -1)
            return out if dense else out[rows]

        return self._logits(self._trunk(kv, tokens, rows, positions, attend))

    def _logits(self, hidden: Tensor) -> Tensor:
        norm = F.rms_norm(hidden, (self.config.hidden_size,), self.weights.norm, self.config.rms_norm_eps)
        return F.linear(norm, self.weights.head).float()

    def _trunk(self, kv: Kv, tokens: Tensor, rows: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        c, count = self.config, len(tokens)
        heads, groups, half = c.num_attention_heads, c.num_key_value_heads, c.rotary // 2
        cos, sin = self._cos[positions], self._sin[positions]
        x = F.embedding(tokens, self.weights.embed)
        for index, layer in enumerate(self.weights.layers):
            h = F.rms_norm(x, (c.hidden_size,), layer.norm1, c.rms_norm_eps)
            qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(count, heads + 2 * groups, c.head)
            qk = qkv[:, : heads + groups]
            if layer.qk_norm is not None:
                torch.mul(F.rms_norm(qk, (c.head,), None, c.rms_norm_eps), layer.qk_norm, out=qk)
            turned = qk[..., : c.rotary]
            swapped = torch.cat((turned[..., half:], turned[..., :half]), -1)
            turned.mul_(cos).addcmul_(swapped, sin)
            kv.rows[index, :, rows, :, positions] = qkv[:, heads:].view(count, 2, groups, c.head)
            x = x + F.linear(attend(index, qkv[:, :heads]), layer.out)
            h = F.rms_norm(x, (c.hidden_size,), layer.norm2, c.rms_norm_eps)
            x = x + self._mlp(h, layer)
        return x

    def _mlp(self, h: Tensor, layer: Layer) -> Tensor:
        gate, up = F.linear(h, layer.mlp.up).chunk(2, -1)
        inner = F.silu(gate).mul_(up)
        if layer.router is not None:
            # every expert for every token, the unchosen ones times zero: with a handful of experts two large products
            # cost less than sorting tokens by expert
            experts, width = self.config.n_routed_experts, self.config.moe_intermediate_size
            inner[:, : experts * width].view(len(h), experts, width).mul_(self._shares(h, layer)[:, :, None])
        return F.linear(inner, layer.mlp.down)

    def _shares(self, h: Tensor, layer: Layer) -> Tensor:
        """What each expert contributes to each token, (tokens, experts); zero for the unchosen."""
        c, router = self.config, layer.router
        assert router is not None
        scores = F.linear(h.float(), router.weight).sigmoid()
        choice = scores + router.bias
        if c.n_group > 1:
            best = choice.view(len(h), c.n_group, -1).topk(2, -1)[0].sum(-1)
            kept = torch.zeros_like(best).scatter_(1, best.topk(c.topk_group, -1)[1], 1.0)
            choice = choice.masked_fill(kept.repeat_interleave(c.n_routed_experts // c.n_group, 1) == 0, float("-inf"))
        picked = choice.topk(c.num_experts_per_tok, -1, sorted=False)[1]
        share = scores.gather(1, picked)
        if c.norm_topk_prob:
            share = share / (share.sum(-1, keepdim=True) + 1e-20)
        return torch.zeros_like(scores).scatter_(1, picked, share * c.routed_scaling_factor).to(self.dtype)
