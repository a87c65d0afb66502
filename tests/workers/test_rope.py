import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from workers.model_config import ModelConfig
from workers.rope import attention_factor, inverse_frequencies

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        YARN,
        {**YARN, "attention_factor": 1.25, "beta_fast": 20.0, "beta_slow": 2.0},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False},
    ],
    ids=lambda rope: f"{rope['rope_type']}-{len(rope)}",
)
def test_frequencies_have_the_bits_of_transformers(rope):
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=dict(rope)
    )
    expected = LlamaRotaryEmbedding(config)
    ours = ModelConfig.from_values({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    assert torch.equal(inverse_frequencies(ours.rope, ours.head_dim), expected.inv_freq)
    assert attention_factor(ours.rope) == expected.attention_scaling
    assert (attention_factor(ours.rope) != 1.0) == (rope["rope_type"] == "yarn")
