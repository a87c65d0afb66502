"""What an architecture's name fixes, and which configuration keys would change the mathematics unnoticed.

Tables, without behaviour. Read only by `model_config`; supporting another architecture of the family starts
here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an architecture's name fixes. `*_bias` None: the config's own key decides (absent: no bias)."""

    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    kv_heads: int | None
    """`num_key_value_heads` of a config without that key; None: as many as query heads."""
    head_dim: int | None = None
    """`head_dim` of a config without that key; None: hidden size / heads."""
    window: str
    """Rule of `sliding_window`: "none", "always" (Mistral), or "opt-in" by `use_sliding_window` (Qwen)."""


ARCHITECTURES: Mapping[str, Traits] = MappingProxyType(
    {
        "LlamaForCausalLM": Traits(
            qkv_bias=None, o_bias=None, mlp_bias=None, qk_norm=False, kv_heads=None, window="none"
        ),
        "MistralForCausalLM": Traits(
            qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False, kv_heads=8, window="always"
        ),
        "Qwen2ForCausalLM": Traits(
            qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False, kv_heads=32, window="opt-in"
        ),
        "Qwen3ForCausalLM": Traits(
            qkv_bias=None,
            o_bias=None,
            mlp_bias=False,
            qk_norm=True,
            kv_heads=32,
            head_dim=128,
            window="opt-in",
        ),
    }
)

# Keys that would change the mathematics, each with the values at which it does not. What else a configuration may
# hold is fixed by the architecture's name, or says nothing about the mathematics.
NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "hidden_act": ("silu",),
        "quantization_config": (None,),
        "auto_map": (None,),
        "partial_rotary_factor": (None, 1, 1.0),
        "rope_interleaved": (None, False),
        "attention_multiplier": (None,),
        "embedding_multiplier": (None, 1, 1.0),
        "residual_multiplier": (None, 1, 1.0),
        "logits_scaling": (None, 1, 1.0),
        "logit_scale": (None, 1, 1.0),
        "query_pre_attn_scalar": (None,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "num_experts": (None, 0),
        "num_local_experts": (None, 0),
        "n_routed_experts": (None, 0),
        "no_rope_layers": (None, []),
        "attention_sink": (None, False),
        "attention_chunk_size": (None,),
    }
)

# The types of RoPE, with the keys each may have beside `rope_type` and `rope_theta`.
ROPE_KEYS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "default": frozenset(),
        "linear": frozenset({"factor"}),
        "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
        "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        "yarn": frozenset(
            {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
            | {"mscale", "mscale_all_dim", "truncate"}
        ),
    }
)
ROPE_REQUIRED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
)
