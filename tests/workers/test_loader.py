import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import ops
from workers.loader import Checkpoint, load_model, resolve_dtype
from workers.tensor_parallel import Communicator

CPU = torch.device("cpu")


@pytest.fixture
def edited(tiny_checkpoint, tmp_path):
    """Copies a checkpoint after `change` (tensors) and with `config` on top of its configuration."""

    def copy(name, change=lambda tensors: None, **config):
        folder = tmp_path / name
        shutil.copytree(tiny_checkpoint(name), folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, **config}))
        return folder

    return copy


def _load(folder, **changes):
    settings = {"dtype": torch.float32, "device": CPU, "comm": Communicator(), "exact": True, **changes}
    return load_model(folder, **settings)


def test_a_missing_tensor_is_named(edited):
    folder = edited("llama", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        _load(folder)


def test_an_unexpected_tensor_is_named(edited):
    folder = edited("llama", lambda tensors: tensors.update({"model.layers.1.extra": torch.ones(1)}))
    with pytest.raises(ValueError, match=r"unexpected tensors: model\.layers\.1\.extra"):
        _load(folder)


def test_a_bias_that_the_configuration_denies_is_unexpected(edited):
    with pytest.raises(ValueError, match=r"unexpected tensors: .*o_proj\.bias"):
        _load(edited("llama-tied-biased", attention_bias=False))


def test_precomputed_rotary_frequencies_are_no_surprise(edited):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert len(_load(edited("llama", lambda tensors: tensors.update(extra))).layers) == 2


def test_a_tensor_of_another_shape_is_named(edited):
    with pytest.raises(ValueError, match=r"gate_proj\.weight has shape \[176, 96\], not \[160, 96\]"):
        _load(edited("llama", intermediate_size=160))


def test_a_tensor_of_integers_is_named(edited):
    def quantise(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    with pytest.raises(ValueError, match=r"model\.norm\.weight has type I8"):
        _load(edited("llama", quantise))


def test_a_stored_copy_of_a_tied_embedding_must_be_one(edited):
    def store(factor):
        return lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] * factor})

    assert _load(edited("qwen2", store(1))).config.tied
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        _load(edited("llama-tied-biased", store(2)))


def test_a_folder_without_safetensors_says_what_it_lacks(edited):
    folder = edited("llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors\.index\.json"):
        _load(folder)


def test_the_sharded_checkpoint_has_several_files(tiny_checkpoint):
    assert len(list(tiny_checkpoint("llama-sharded").glob("*.safetensors"))) > 2


def test_a_part_of_a_tensor_is_that_part_in_the_asked_type(tiny_checkpoint):
    folder, name = tiny_checkpoint("llama"), "model.layers.0.mlp.down_proj.weight"
    whole = load_file(folder / "model.safetensors")[name]
    checkpoint = Checkpoint(folder, torch.bfloat16, CPU)
    part = checkpoint.read(name, (96, 176), rows=slice(3, 7), columns=slice(10, 20))
    assert torch.equal(part, whole[3:7, 10:20].bfloat16())
    assert torch.equal(checkpoint.read(name, (96, 176)), whole.bfloat16())


class _RankOf(Communicator):
    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("exact", [True, False])
def test_the_ranks_of_a_group_hold_the_linears_once_together(tiny_checkpoint, size, exact):
    folder = tiny_checkpoint("llama")
    held = 0
    for rank in range(size):
        model = _load(folder, comm=_RankOf(rank, size), exact=exact)
        linears = [model.head]
        for layer in model.layers:
            linears += [layer.attention.qkv, layer.attention.out.local]
            linears += [layer.feed_forward.gate_up, layer.feed_forward.out.local]
        held += sum(linear.in_features * linear.out_features for linear in linears)
    tensors = load_file(folder / "model.safetensors")
    assert held == sum(tensor.numel() for name, tensor in tensors.items() if "proj" in name or "head" in name)


def test_positions_end_where_the_model_ends(tiny_checkpoint, edited):
    folder = tiny_checkpoint("llama")
    assert _load(folder).max_len == 256
    assert len(_load(folder, max_len=50).cos_sin) == 50
    with pytest.raises(ValueError, match="max_model_len 257 is more than the model's 256"):
        _load(folder, max_len=257)


def test_a_sliding_window_ends_the_positions_and_says_so(edited, caplog):
    folder = edited("mistral", sliding_window=64)
    assert _load(folder).max_len == 64
    assert "sliding window of 64" in caplog.text
    with pytest.raises(ValueError, match="the sliding window"):
        _load(folder, max_len=65)


def test_the_data_type_is_the_one_asked_for_or_what_the_device_computes_in():
    fast = ops.multiplies_bfloat16(torch.device("cpu"))
    assert resolve_dtype("auto", CPU) is (torch.bfloat16 if fast else torch.float32)
    assert resolve_dtype("auto", "cpu") is resolve_dtype("auto", CPU)
    assert resolve_dtype("float32", "cuda") is torch.float32
    assert resolve_dtype("float16", CPU) is torch.float16
