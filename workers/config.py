"""What one group's engine needs to know to run: limits, sizes, data type. Plain frozen data, checked once at start."""

from dataclasses import dataclass

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one group's engine. Raises ValueError naming the field."""

    model_folder: str
    """A Hugging Face folder (config.json and safetensors) on every node."""
    dtype: str = "auto"
    """"auto": bfloat16 where the device computes in it, else float16 on a GPU and float32 on a CPU."""
    device: str = "auto"
    """"auto": "cuda" where there is a GPU, else "cpu"."""
    tp: int = 1
    """Ranks of the group."""
    max_model_len: int | None = None
    """Most tokens of prompt and completion together; None: what the model and the KV memory allow."""
    max_running: int = 128
    """Most child sequences computed in one step."""
    max_step_tokens: int = 512
    """Token budget of one step; prompts longer than what is left of it are prefilled in chunks."""
    block_size: int = 32
    """Tokens per KV block. On a CPU also the chunk of the attention sum, and so part of what fixes the bits."""
    kv_memory_gib: float = 1.0
    """Memory for KV blocks per rank in GiB; see `kv_blocks` to fix their number."""
    kv_blocks: int | None = None
    """Number of KV blocks; None: as many as `kv_memory_gib` holds."""
    prefix_cache: bool = True
    """Reuse the blocks of earlier prompts and completions."""
    exact_tp: bool | None = None
    """Shard so that every TP size gives the same bits; None: on CPU yes, on CUDA no."""
    collective_timeout_s: float = 60.0
    """A rank that does not answer for so long is taken for lost."""

    def shards_exactly(self, device_type: str) -> bool:
        """`exact_tp`, with its default for a kind of device."""
        return device_type == "cpu" if self.exact_tp is None else self.exact_tp

    def __post_init__(self) -> None:
        for name, ok in (
            ("dtype", self.dtype in DTYPES),
            ("device", self.device in ("auto", "cpu", "cuda")),
            ("tp", self.tp >= 1),
            ("max_model_len", self.max_model_len is None or self.max_model_len >= 2),
            ("max_running", self.max_running >= 1),
            ("max_step_tokens", self.max_step_tokens >= 1),
            ("block_size", self.block_size in (16, 32, 64, 128)),
            ("kv_memory_gib", self.kv_memory_gib > 0),
            ("kv_blocks", self.kv_blocks is None or self.kv_blocks >= 2),
            ("collective_timeout_s", self.collective_timeout_s > 0),
        ):
            if not ok:
                raise ValueError(f"{name} is out of range: {getattr(self, name)!r}")
