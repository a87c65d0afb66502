"""Random checkpoints of every supported architecture, small enough to run in milliseconds.

Six query heads over three KV heads, so that groups of one, two and three ranks are possible; positions reach past
the context the RoPE scalings start from; every weight, norm and bias differs from its neutral value.
"""

from pathlib import Path
from typing import Any

LENGTH = 256
_SIZES = {
    "vocab_size": 323,
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": LENGTH,
    "eos_token_id": [2, 7],
}
_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": {"rope_type": "llama3", **_LLAMA3}, "num_hidden_layers": 3}),
    "llama-yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", **_YARN}}),
    "llama-sharded": ("Llama", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def write(name: str, folder: Path) -> None:
    """Save the checkpoint called `name` into `folder`."""
    import torch
    import transformers

    family, changes = MODELS[name]
    rope = {"rope_theta": 1000.0, "rope_type": "default", **changes.get("rope_parameters", {})}
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **changes, "rope_parameters": rope})
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            weight.copy_(1 + 0.2 * noise if "norm" in key else 0.15 * noise)
    model.save_pretrained(folder, max_shard_size="100KB" if "sharded" in name else "1GB")
