"""What a model folder's config.json says, as one frozen value: sizes, traits, RoPE, ends of text.

Reads JSON only: no tensors, no transformers. Whatever would change the mathematics and is not computed
here is refused by name, never ignored. Read by the loader, and by the engine for limits and eos ids.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from workers.architectures import ARCHITECTURES, NEUTRAL, ROPE_KEYS, ROPE_REQUIRED


class _Fields:
    """Typed access to a JSON object; every error names the key and the file."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.where}: {key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{self.where}: {key} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} must be true or false, not {value!r}")
        return value

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"{self.where}: {key} is missing")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. `kind` is one of default, linear, dynamic, llama3, yarn.

    "dynamic" equals "default" up to `max_position_embeddings`, and longer sequences are never accepted.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_len: int = 0
    """Context length of the pretraining; only read by llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    """Multiplies cos and sin (yarn); None: derived from `factor` and the two mscales."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @classmethod
    def from_config(cls, config: _Fields) -> Self:
        """From `rope_parameters`, or the older `rope_theta` and `rope_scaling`. ValueError names the key."""
        key = "rope_parameters" if config.values.get("rope_parameters") else "rope_scaling"
        rope = _Fields(config.values.get(key) or {}, f"{config.where}: {key}")
        kind = _rope_kind(rope)
        max_len = config.integer("max_position_embeddings")
        original = config.integer(
            "original_max_position_embeddings", rope.values.get("original_max_position_embeddings") or max_len
        )
        return cls(
            kind=kind,
            theta=rope.number("rope_theta", config.number("rope_theta", 10000.0)),
            factor=rope.number("factor", 1.0),
            original_max_len=original,
            low_freq_factor=rope.number("low_freq_factor", 1.0),
            high_freq_factor=rope.number("high_freq_factor", 4.0),
            attention_factor=rope.optional_number("attention_factor"),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            mscale=rope.optional_number("mscale"),
            mscale_all_dim=rope.optional_number("mscale_all_dim"),
            truncate=rope.flag("truncate", True),
        )


def _rope_kind(rope: _Fields) -> str:
    """The type of RoPE, after every key beside it has been recognised."""
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind not in ROPE_KEYS:
        raise ValueError(f"{rope.where}: type {kind!r} is not supported; supported: {', '.join(ROPE_KEYS)}")
    known = ROPE_KEYS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown := sorted(set(rope.values) - known):
        raise ValueError(f"{rope.where}: {', '.join(unknown)} is not supported with type {kind!r}")
    if rope.values.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"{rope.where}: partial_rotary_factor other than 1 is not supported")
    for key in ROPE_REQUIRED.get(kind, ()):
        rope.number(key)
    return str(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and traits of a decoder of the Llama family. ValueError names what is missing or unsupported."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied: bool
    """The output projection is the embedding."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Each query and key head is normalised before RoPE."""
    rope: RopeConfig
    max_position_embeddings: int
    sliding_window: int | None
    """Window of the layers that have one, when it is shorter than `max_position_embeddings`; else None."""
    eos_token_ids: tuple[int, ...]
    """Sorted; of config.json and generation_config.json together."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) is not a multiple of num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, not {self.head_dim}")

    @property
    def max_len(self) -> int:
        """Longest sequence computed exactly: within a sliding window, full attention is the same."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    def checked_len(self, wanted: int | None) -> int:
        """`wanted`, by default all that is possible. Raises ValueError naming max_model_len if it is more."""
        if wanted is not None and wanted > self.max_len:
            window = "" if self.sliding_window is None else ", the sliding window"
            raise ValueError(f"max_model_len {wanted} is more than the model's {self.max_len}{window}")
        return wanted or self.max_len

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Read config.json (and generation_config.json beside it). Raises ValueError, FileNotFoundError."""
        path = Path(folder) / "config.json"
        config = _read_json(path)
        generation = Path(folder) / "generation_config.json"
        extra = _read_json(generation) if generation.exists() else {}
        return cls.from_values(config, where=str(path), generation=extra)

    @classmethod
    def from_values(
        cls,
        values: Mapping[str, Any],
        *,
        where: str = "config.json",
        generation: Mapping[str, Any] | None = None,
    ) -> Self:
        """From the parsed config; `where` names it in errors."""
        name = _architecture(values, where)
        _refuse_unsupported(values, where)
        config, traits = _Fields(values, where), ARCHITECTURES[name]
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        attention_bias = config.flag("attention_bias", False)
        return cls(
            architecture=name,
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=config.integer("intermediate_size"),
            num_layers=config.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=config.integer("num_key_value_heads", traits.kv_heads or heads),
            head_dim=config.integer("head_dim", traits.head_dim or hidden // heads),
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            tied=config.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
            o_bias=attention_bias if traits.o_bias is None else traits.o_bias,
            mlp_bias=config.flag("mlp_bias", False) if traits.mlp_bias is None else traits.mlp_bias,
            qk_norm=traits.qk_norm,
            rope=RopeConfig.from_config(config),
            max_position_embeddings=config.integer("max_position_embeddings"),
            sliding_window=_active_window(config, traits.window),
            eos_token_ids=tuple(sorted(_eos_ids(values, where) | _eos_ids(generation or {}, where))),
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: a model is a folder with config.json and safetensors")
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object")
    return values


def _architecture(values: Mapping[str, Any], where: str) -> str:
    names = values.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        found = ", ".join(map(str, names)) or "none named"
        raise ValueError(f"{where}: architecture {found} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _refuse_unsupported(values: Mapping[str, Any], where: str) -> None:
    wrong = [f"{key} = {values[key]!r}" for key, ok in NEUTRAL.items() if key in values and values[key] not in ok]
    if wrong:
        raise ValueError(f"{where}: not supported: {'; '.join(wrong)}")
    kinds = set(values.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ValueError(f"{where}: layer_types {', '.join(sorted(kinds))} is not supported")


def _active_window(config: _Fields, rule: str) -> int | None:
    """The sliding window, if any layer has one and it is shorter than the longest sequence."""
    default = 4096 if "sliding_window" not in config.values else None
    if rule == "none" or (config.values.get("sliding_window") is None and default is None):
        return None
    if rule == "opt-in" and not _qwen_layers_slide(config):
        return None
    window = config.integer("sliding_window", default)
    return window if window < config.integer("max_position_embeddings") else None


def _qwen_layers_slide(config: _Fields) -> bool:
    if not config.flag("use_sliding_window", False):
        return False
    if (kinds := config.values.get("layer_types")) is not None:
        return "sliding_attention" in kinds
    return int(config.values.get("max_window_layers", 28)) < config.integer("num_hidden_layers")


def _eos_ids(values: Mapping[str, Any], where: str) -> frozenset[int]:
    raw = values.get("eos_token_id")
    ids = [] if raw is None else raw if isinstance(raw, list) else [raw]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"{where}: eos_token_id must be an integer or a list of integers, not {raw!r}")
    return frozenset(ids)
