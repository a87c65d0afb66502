import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from workers.layers import ALL, LayerBuilder
from workers.model_config import ModelConfig
from workers.tensor_parallel import Communicator, ShardPlan

CONFIG = ModelConfig.from_values(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 323,
        "hidden_size": 96,
        "intermediate_size": 176,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 64,
        "attention_bias": True,
        "mlp_bias": True,
    }
)


class RandomWeights:
    """Weights that depend on their name only."""

    def read(self, name, shape, rows=ALL, columns=ALL):
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        weight = torch.randn(shape, generator=generator)
        if "embed" in name:
            weight[::2] = -0.0
        return weight[rows] if len(shape) == 1 else weight[rows, columns]


class ThreadRank(Communicator):
    """A rank that is a thread of this process."""

    def __init__(self, rank, board, barrier):
        super().__init__()
        self.rank, self.size, self.board, self.barrier = rank, len(board), board, barrier

    def _exchange(self, x):
        self.board[self.rank] = x
        self.barrier.wait()
        everything = list(self.board)
        self.barrier.wait()
        return everything

    def all_reduce(self, x):
        return x.copy_(sum(part.clone() for part in self._exchange(x.clone())))

    def all_gather_columns(self, x, widths):
        parts = self._exchange(x)
        assert [part.shape[1] for part in parts] == list(widths)
        return torch.cat(parts, dim=1)


def _on_ranks(size, exact, compute):
    """What `compute(builder)` gives on each of `size` ranks."""
    plan = ShardPlan.build(CONFIG, size, exact=exact)
    board, barrier = [None] * size, threading.Barrier(size)
    builders = [LayerBuilder(RandomWeights(), CONFIG, plan, ThreadRank(rank, board, barrier)) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(compute, builders))


def _bits(x):
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize("size", [2, 3])
def test_an_embedding_cut_over_ranks_has_the_bits_of_the_whole(size):
    ids = torch.arange(CONFIG.vocab_size)
    (whole,) = _on_ranks(1, True, lambda build: build.embedding("model.embed_tokens")(ids))
    for rows in _on_ranks(size, True, lambda build: build.embedding("model.embed_tokens")(ids)):
        assert torch.equal(_bits(rows), _bits(whole))


@pytest.mark.parametrize("size", [2, 3])
def test_queries_keys_and_values_of_all_ranks_are_those_of_one(size):
    x = torch.randn(5, CONFIG.hidden_size)
    kv_heads = ShardPlan.build(CONFIG, size, exact=True).kv_heads.sizes
    (whole,) = _on_ranks(1, True, lambda build: build.qkv("a")(x))
    ranks = _on_ranks(size, True, lambda build: build.qkv("a")(x))
    cut = [rank.split([32 * heads, 16 * heads, 16 * heads], dim=1) for rank, heads in zip(ranks, kv_heads, strict=True)]
    joined = torch.cat([torch.cat(parts, dim=1) for parts in zip(*cut, strict=True)], dim=1)
    assert torch.equal(joined, whole)


def _feed_forward(build, x):
    gate, up = build.gate_up("m")(x).chunk(2, dim=1)
    return build.ffn_out("m")(gate * up)


@pytest.mark.parametrize("size", [2, 3])
def test_output_columns_gathered_have_the_bits_of_one_rank(size):
    x = torch.randn(5, CONFIG.hidden_size)
    (whole,) = _on_ranks(1, True, lambda build: _feed_forward(build, x))
    for result in _on_ranks(size, True, lambda build: _feed_forward(build, x)):
        assert torch.equal(result, whole)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_row_parallel_sums_and_adds_the_bias_once(size):
    x = torch.randn(5, CONFIG.hidden_size)
    (whole,) = _on_ranks(1, True, lambda build: _feed_forward(build, x))
    for result in _on_ranks(size, False, lambda build: _feed_forward(build, x)):
        torch.testing.assert_close(result, whole, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_logits_of_their_part_of_the_vocabulary(size):
    x = torch.randn(5, CONFIG.hidden_size)
    (whole,) = _on_ranks(1, True, lambda build: build.output_head("lm_head")(x))
    assert whole.shape == (5, CONFIG.vocab_size)
    parts = _on_ranks(size, True, lambda build: build.output_head("lm_head")(x))
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_a_plan_for_another_group_is_refused():
    with pytest.raises(ValueError, match="2 ranks, the group has 1"):
        LayerBuilder(RandomWeights(), CONFIG, ShardPlan.build(CONFIG, 2, exact=True), Communicator())
