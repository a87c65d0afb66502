"""From a folder of safetensors to a model: each rank reads only its own part of each tensor.

A tensor that is missing, has another shape than the configuration says, or is not used by the model is an
error by name: a checkpoint is loaded whole or not at all. Knows files; what is read of them is decided by
the layers.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kernels import ops
from workers.layers import ALL, LayerBuilder
from workers.model import CausalLM
from workers.model_config import ModelConfig
from workers.tensor_parallel import Communicator, ShardPlan

_log = logging.getLogger(__name__)

_FLOATS = ("F64", "F32", "F16", "BF16")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def resolve_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """The data type called `name`; "auto" is bfloat16 where the device computes in it, else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if ops.multiplies_bfloat16(torch.device(device)) else torch.float32


class Checkpoint:
    """The tensors of a folder: model.safetensors, or the files its index names."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        files: list[Any] = [safe_open(folder / name, framework="pt") for name in _file_names(folder)]
        self._owners = {key: file for file in files for key in list(file.keys())}
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._owners

    def read(self, name: str, shape: tuple[int, ...], rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """Part of a tensor in the model's data type and on its device. ValueError names the tensor."""
        if name not in self._owners:
            raise ValueError(f"{self.folder}: tensor {name} is missing")
        stored = self._owners[name].get_slice(name)
        if (found := tuple(stored.get_shape())) != shape:
            raise ValueError(f"{self.folder}: tensor {name} has shape {list(found)}, not {list(shape)}")
        if (kind := stored.get_dtype()) not in _FLOATS:
            raise ValueError(f"{self.folder}: tensor {name} has type {kind}, not one of {', '.join(_FLOATS)}")
        self._used.add(name)
        part: torch.Tensor = stored[rows] if len(shape) == 1 else stored[rows, columns]
        return part.to(device=self.device, dtype=self.dtype)

    def unused(self) -> list[str]:
        """Tensors nobody read, but for precomputed rotary frequencies, which say nothing new."""
        return sorted(name for name in set(self._owners) - self._used if not name.endswith("rotary_emb.inv_freq"))


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    comm: Communicator,
    exact: bool,
    max_len: int | None = None,
) -> CausalLM:
    """The model in `folder` as rank `comm.rank` of `comm.size` holds it.

    `exact` asks for the same bits at every group size (see `ShardPlan`). `max_len` bounds the positions;
    None: what the model allows. Raises ValueError or FileNotFoundError naming the key, tensor or file that
    is wrong.
    """
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    if config.sliding_window is not None:
        _log.warning("sequences end at the sliding window of %d tokens", config.sliding_window)
    plan = ShardPlan.build(config, comm.size, exact=exact)
    checkpoint = Checkpoint(folder, dtype, device)
    build = LayerBuilder(checkpoint, config, plan, comm)
    model = CausalLM(build, dtype=dtype, device=device, max_len=config.checked_len(max_len))
    if config.tied and _HEAD in checkpoint:
        _check_tie(checkpoint, config, plan.vocab.of(comm.rank))
    if unused := checkpoint.unused():
        raise ValueError(f"{folder}: unexpected tensors: {', '.join(unused)}")
    return model


def _check_tie(checkpoint: Checkpoint, config: ModelConfig, rows: slice) -> None:
    """A checkpoint that says its output projection is the embedding, and stores both, must mean it."""
    shape = (config.vocab_size, config.hidden_size)
    if not torch.equal(checkpoint.read(_HEAD, shape, rows), checkpoint.read(_EMBEDDING, shape, rows)):
        raise ValueError(f"{checkpoint.folder}: tie_word_embeddings is true, but {_HEAD} is not it")


def _file_names(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"]
    raise FileNotFoundError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
