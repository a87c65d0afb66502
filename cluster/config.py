"""Everything a cluster can be told, as one validated tree: the YAML file, the command line and the code all make this.

Unknown keys are refused and each default is written once, here or in the engine's own config it is built from.
"""

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from workers.config import EngineConfig


class ClusterConfig(BaseModel):
    """Options of a Choral cluster. Field names are the YAML keys; the CLI writes them with dashes."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str | None = Field(None, description="Hugging Face folder or GGUF file; default: the embedded model")
    served_name: str | None = Field(None, description="Model name clients use; default: the folder's name")
    groups: int = Field(1, ge=1, description="Tensor-parallel groups: copies of the model")
    tp: int = Field(1, ge=1, description="Ranks per group; need not divide the heads")
    placement: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "PACK", description="How the ranks of a group lie on the nodes; STRICT: or not at all"
    )
    host: str = Field("127.0.0.1", description="Address the HTTP server binds")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 picks a free one")
    address: str | None = Field(None, description="Ray cluster to join; default: start one here")
    dashboard: bool = Field(True, description="Run Ray's dashboard with a Ray started here; `ray list` needs it")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="Weights and KV data type")
    max_model_len: int | None = Field(None, ge=2, description="Most tokens of prompt and completion together")
    max_running: int = Field(128, ge=1, description="Most child sequences computed at once in a group")
    max_step_tokens: int = Field(512, ge=1, description="Token budget of one step; longer prompts go in chunks")
    kv_memory_gib: float = Field(1.0, gt=0, description="KV memory per rank in GiB")
    kv_blocks: int | None = Field(None, ge=2, description="KV blocks per group, instead of kv_memory_gib")
    block_size: Literal[16, 32, 64, 128] = Field(32, description="Tokens per KV block")
    prefix_cache: bool = Field(True, description="Reuse KV blocks across parents")
    exact_tp: bool | None = Field(None, description="Same bits at every TP size; default: on CPU yes, on CUDA no")
    max_n: int = Field(128, ge=1, description="Largest n of one request")
    max_children: int = Field(4096, ge=1, description="Children admitted at once over the app; more get a 429")
    batch_children: int | None = Field(
        None, ge=1, description="Children of batches at once; default: half of all that run"
    )
    files_dir: str | None = Field(None, description="Folder of files and batches; choral serve: $CHORAL_HOME/files")
    push_interval_s: float = Field(
        0.02,
        ge=0,
        description="Tokens of running children travel at most so often; first and last ones never wait",
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads per rank, and cores reserved for it; default: the cores shared out"
    )
    start_timeout_s: float = Field(30.0, gt=0, description="Longest wait for the cluster to place a group")
    drain_timeout_s: float = Field(600.0, gt=0, description="Longest wait for running requests when a part ends")
    collective_timeout_s: float = Field(60.0, gt=0, description="A rank silent for so long is taken for lost")

    @model_validator(mode="after")
    def _largest_family_fits(self) -> Self:
        if self.max_n > self.max_children:
            raise ValueError(f"max_n ({self.max_n}) is larger than max_children ({self.max_children})")
        return self

    @classmethod
    def load(
        cls, path: Path | None, overrides: dict[str, Any], defaults: dict[str, Any] | None = None
    ) -> "ClusterConfig":
        """The YAML file at `path` over `defaults`, with `overrides` on top. Raises ValueError naming a wrong key."""
        values: Any = yaml.safe_load(path.read_text()) if path else {}
        if values is not None and not isinstance(values, dict):
            raise ValueError(f"{path} is not a mapping of options")
        return cls.model_validate({**(defaults or {}), **(values or {}), **overrides})

    def engine(self, model_folder: str) -> EngineConfig:
        """The part one group's engine needs."""
        shared = set(EngineConfig.__dataclass_fields__) & set(type(self).model_fields)
        return EngineConfig(model_folder=model_folder, **{name: getattr(self, name) for name in shared})
