import json
import subprocess
import sys

import pytest

from workers.architectures import ARCHITECTURES, NEUTRAL
from workers.model_config import ModelConfig, RopeConfig

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "max_position_embeddings": 8192,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}


def _config(architecture="Llama", **values):
    return ModelConfig.from_values({**BASE, "architectures": [f"{architecture}ForCausalLM"], **values})


def test_sizes_are_read_or_derived():
    config = _config(num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=True)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.group_size) == (30, 8, 2, 4)
    assert (config.head_dim, config.rms_norm_eps, config.tied, config.max_len) == (16, 1e-5, True, 8192)
    assert _config(head_dim=32).head_dim == 32


def test_a_key_that_is_absent_means_what_its_architecture_says():
    assert (_config().num_kv_heads, _config().tied) == (8, False)
    assert _config("Mistral").num_kv_heads == 8
    qwen3 = _config("Qwen3", num_attention_heads=32)
    assert (qwen3.num_kv_heads, qwen3.head_dim) == (32, 128)


def test_biases_and_norms_follow_the_architecture():
    def traits(architecture, **values):
        config = _config(architecture, num_key_value_heads=2, **values)
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    assert traits("Llama") == (False, False, False, False)
    assert traits("Llama", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert traits("Mistral", attention_bias=True) == (False, False, False, False)
    assert traits("Qwen2") == (True, False, False, False)
    assert traits("Qwen3") == (False, False, False, True)
    assert traits("Qwen3", attention_bias=True) == (True, True, False, True)


def test_an_unknown_architecture_is_refused_with_what_is_supported():
    with pytest.raises(ValueError, match="MixtralForCausalLM") as error:
        _config("Mixtral")
    assert all(name in str(error.value) for name in ARCHITECTURES)
    with pytest.raises(ValueError, match="none named"):
        ModelConfig.from_values({**BASE, "architectures": None})


@pytest.mark.parametrize("key", NEUTRAL)
def test_a_key_that_changes_the_mathematics_is_refused_by_name(key):
    with pytest.raises(ValueError, match=key):
        _config(**{key: "something else"})
    assert _config(**{key: NEUTRAL[key][0]}) == _config()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", None),
        ("hidden_size", "128"),
        ("num_hidden_layers", 0),
        ("intermediate_size", 2.5),
        ("max_position_embeddings", -1),
        ("tie_word_embeddings", 1),
        ("rms_norm_eps", "1e-6"),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("eos_token_id", "2"),
        ("layer_types", ["linear_attention"]),
    ],
)
def test_a_wrong_value_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=key):
        _config(**{key: value})


def test_old_and_new_style_of_rope_are_the_same():
    old = {key: value for key, value in LLAMA3.items() if key != "rope_type"} | {"type": "llama3"}
    expected = RopeConfig(
        kind="llama3", theta=5e5, factor=8.0, original_max_len=2048, low_freq_factor=1.0, high_freq_factor=4.0
    )
    assert _config(rope_parameters={**LLAMA3, "rope_theta": 5e5}).rope == expected
    assert _config(rope_theta=5e5, rope_scaling=LLAMA3).rope == expected
    assert _config(rope_theta=5e5, rope_scaling=old).rope == expected
    assert _config().rope == RopeConfig(original_max_len=8192)


def test_yarn_keeps_every_one_of_its_parameters():
    rope = _config(
        rope_scaling={
            "type": "yarn",
            "factor": 4,
            "attention_factor": 1.5,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 0.8,
            "truncate": False,
        }
    ).rope
    assert (rope.kind, rope.factor, rope.original_max_len, rope.attention_factor) == ("yarn", 4, 8192, 1.5)
    assert (rope.beta_fast, rope.beta_slow, rope.mscale, rope.mscale_all_dim) == (16, 2, 0.7, 0.8)
    assert not rope.truncate


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "longrope"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_rope_that_is_not_computed_is_refused_by_name(rope, named):
    with pytest.raises(ValueError, match=named):
        _config(rope_parameters=rope)


@pytest.mark.parametrize(
    ("architecture", "values", "max_len"),
    [
        ("Mistral", {"sliding_window": 4096}, 4096),
        ("Mistral", {}, 4096),
        ("Mistral", {"sliding_window": None}, 8192),
        ("Mistral", {"sliding_window": 8192}, 8192),
        ("Qwen2", {"sliding_window": 4096}, 8192),
        ("Qwen2", {"sliding_window": 4096, "use_sliding_window": True}, 4096),
        ("Qwen2", {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 30}, 8192),
        ("Qwen3", {"use_sliding_window": True, "layer_types": ["full_attention"] * 30}, 8192),
        ("Qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 30}, 4096),
        ("Llama", {"sliding_window": 4096}, 8192),
    ],
)
def test_sequences_end_at_an_active_sliding_window(architecture, values, max_len):
    config = _config(architecture, num_key_value_heads=2, **values)
    assert config.max_len == max_len
    assert config.sliding_window == (max_len if max_len < 8192 else None)


def test_eos_ids_are_those_of_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 9}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (9,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (4, 9)
    assert _config().eos_token_ids == ()


def test_a_folder_without_configuration_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_importing_it_imports_no_tensors():
    code = "import sys, workers.model_config; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
