"""A decoder of the Llama family over a ragged batch and a paged KV cache: one class for every architecture.

Composes the layers one rank holds; traits (biases, query and key norms) come from the configuration, cuts
and collectives from the layers. Knows no requests, no sampling, no files. Called once per step by the model
runner.
"""

import torch

from kernels import ops
from kernels.decoder import DecoderStack, LayerWeights
from workers.layers import LayerBuilder
from workers.rope import attention_factor, inverse_frequencies


class Attention:
    """Grouped-query attention of this rank's heads."""

    def __init__(self, build: LayerBuilder, prefix: str, layer: int) -> None:
        config = build.config
        self.layer, self.head_dim, self.eps = layer, config.head_dim, config.rms_norm_eps
        self.kv_heads = build.plan.kv_heads.sizes[build.comm.rank]
        self.heads = self.kv_heads * config.group_size
        self.qkv = build.qkv(prefix)
        self.out = build.attention_out(prefix)
        self.qk_norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if config.qk_norm:
            names = (f"{prefix}.q_norm", f"{prefix}.k_norm")
            self.qk_norms = build.norm(names[0], config.head_dim), build.norm(names[1], config.head_dim)

    def __call__(
        self, x: torch.Tensor, cos_sin: torch.Tensor, batch: ops.AttentionBatch, kv: ops.KVCache
    ) -> torch.Tensor:
        """[T, H] to [T, H]; writes the keys and values of the T tokens into `kv`."""
        q, k, v = self._heads(self.qkv(x))
        q = ops.rope_and_cache(q, k, v, cos_sin, batch, kv, self.layer)
        return self.out(ops.attention(q, batch, kv, self.layer, self.head_dim**-0.5))

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = qkv.view(len(qkv), -1, self.head_dim)
        q, k, v = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.qk_norms is not None:
            q, k = self._normed(q, self.qk_norms[0]), self._normed(k, self.qk_norms[1])
        return q, k, v

    def _normed(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(heads.reshape(-1, self.head_dim), weight, self.eps).view(heads.shape)


class FeedForward:
    """The gated feed-forward network, this rank's columns of it."""

    def __init__(self, build: LayerBuilder, prefix: str) -> None:
        self.gate_up = build.gate_up(prefix)
        self.out = build.ffn_out(prefix)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H]."""
        return self.out(ops.silu_mul(self.gate_up(x)))


class DecoderLayer:
    """Attention and feed-forward. Its input comes normed: each norm is fused with the addition before it."""

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        config, prefix = build.config, f"model.layers.{layer}"
        last = layer + 1 == config.num_layers
        following = "model.norm" if last else f"model.layers.{layer + 1}.input_layernorm"
        self.eps = config.rms_norm_eps
        self.attention = Attention(build, f"{prefix}.self_attn", layer)
        self.attention_norm = build.norm(f"{prefix}.post_attention_layernorm", config.hidden_size)
        self.feed_forward = FeedForward(build, f"{prefix}.mlp")
        self.following_norm = build.norm(following, config.hidden_size)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        cos_sin: torch.Tensor,
        batch: ops.AttentionBatch,
        kv: ops.KVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed input and residual stream, both [T, H], to those of what follows."""
        x = self.attention(x, cos_sin, batch, kv)
        x, residual = ops.add_rms_norm(x, residual, self.attention_norm, self.eps)
        return ops.add_rms_norm(self.feed_forward(x), residual, self.following_norm, self.eps)

    def weights(self) -> LayerWeights:
        """Everything this layer holds, for the operator that runs all layers."""
        attention = self.attention
        q_norm, k_norm = attention.qk_norms or (None, None)
        return LayerWeights(
            attention.qkv, q_norm, k_norm, attention.out.local, self.attention_norm,
            self.feed_forward.gate_up, self.feed_forward.out.local, self.following_norm,
        )  # fmt: skip


class CausalLM:
    """A whole model, as one rank of a group holds it. Every rank makes the same calls.

    Positions reach up to `max_len` - 1.
    """

    def __init__(self, build: LayerBuilder, *, dtype: torch.dtype, device: torch.device, max_len: int) -> None:
        config = build.config
        self.config, self.plan, self.comm = config, build.plan, build.comm
        self.dtype, self.device, self.max_len = dtype, device, max_len
        self.embedding = build.embedding("model.embed_tokens")
        self.first_norm = build.norm("model.layers.0.input_layernorm", config.hidden_size)
        self.layers = [DecoderLayer(build, layer) for layer in range(config.num_layers)]
        self.head = build.output_head("model.embed_tokens" if config.tied else "lm_head")
        frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self.cos_sin = ops.rope_tables(frequencies, max_len, attention_factor(config.rope))
        self.stack = self._stack(build)

    def _stack(self, build: LayerBuilder) -> DecoderStack | None:
        """All layers as one operator, where the kernels offer it and no sum is split over ranks."""
        if self.comm.size > 1 and not self.plan.exact:
            return None
        cuts = (build.query_columns.sizes, self.plan.hidden.sizes, self.plan.ffn.sizes)
        weights = [layer.weights() for layer in self.layers]
        return DecoderStack.build(
            self.first_norm, weights, self.cos_sin, self.config.rms_norm_eps, cuts, self.comm.shared
        )

    @property
    def local_kv_heads(self) -> int:
        """KV heads this rank computes, and so how wide its KV cache is."""
        return self.plan.kv_heads.sizes[self.comm.rank]

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, batch: ops.AttentionBatch, kv: ops.KVCache, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """int64 [T] tokens of all sequences of the batch to hidden states [R, H] after the final norm.

        `rows`, int64 [R] ascending, are those wanted; by default all.
        """
        residual = self.embedding(token_ids)
        if self.stack is not None and self.stack.takes(len(token_ids), self.dtype):
            return self.stack(residual, batch, kv, torch.arange(len(token_ids)) if rows is None else rows)
        x = ops.rms_norm(residual, self.first_norm, self.config.rms_norm_eps)
        for layer in self.layers:
            x, residual = layer(x, residual, self.cos_sin, batch, kv)
        return x if rows is None else x[rows]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] to float32 logits of this rank's part of the vocabulary, [R, its part of `plan.vocab`]."""
        return self.head(hidden)
