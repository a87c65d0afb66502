"""docs/deploy.md stays true: every option is explained with its default, and the sizes are those the engine computes.

Run as a script it prints both tables.
"""

import dataclasses
import re
import shlex
from pathlib import Path

import torch

from cluster.config import ClusterConfig
from deploy.cli import make_parser
from kernels import ops
from workers.config import EngineConfig

DOC = Path(__file__).parents[2] / "docs/deploy.md"
MODELS = [
    # name, layers, KV heads, head dim, tp, KV memory per rank in GiB
    ("SmolLM2-135M", 30, 3, 64, 1, 1),
    ("SmolLM2-135M", 30, 3, 64, 2, 1),
    ("Qwen3-0.6B", 28, 8, 128, 1, 4),
    ("Llama-3.1-8B", 32, 8, 128, 1, 40),
    ("Llama-3.1-8B", 32, 8, 128, 2, 40),
    ("Llama-3.3-70B", 80, 8, 128, 4, 30),
    ("Llama-3.3-70B", 80, 8, 128, 8, 40),
]
PROMPT = COMPLETION = 1024


def sizing() -> list[str]:
    """The rows of the sizing table, from the engine's own arithmetic."""
    block_size = ClusterConfig().block_size
    rows = ["| model | `tp` | KV per token | KV per child | KV memory per rank | children per group | per rank |"]
    rows += ["| --- " * 7 + "|"]
    for name, layers, heads, dim, tp, gib in MODELS:
        token = 2 * layers * heads * dim * torch.bfloat16.itemsize
        block = ops.KVCache.bytes_per_block(layers, -(-heads // tp), dim, block_size, torch.bfloat16)
        blocks = gib * 2**30 // block
        children = (blocks - PROMPT // block_size) // (COMPLETION // block_size)
        rows.append(
            f"| {name} | {tp} | {token / 2**10:g} KiB | {token * COMPLETION / 2**20:g} MiB | {gib} GiB "
            f"| {children:,} | {children // tp:,} |"
        )
    return rows


def options() -> list[str]:
    """The first two cells of every row of the table of options."""
    return [f"| `{name}` | {_shown(field.default)} |" for name, field in ClusterConfig.model_fields.items()]


def _shown(default: object) -> str:
    if default is None:
        return "none"
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else str(default)


def test_every_option_is_explained_once_with_its_default():
    rows = re.findall(r"^(\| `\w+` \| [^|]+ \|) (.*) \|$", DOC.read_text().partition("## Options")[2], re.M)
    assert [cells for cells, _ in rows] == options()
    assert all(len(text) > 15 for _, text in rows)
    engine = {field.name for field in dataclasses.fields(EngineConfig)} - {"model_folder"}
    assert engine <= ClusterConfig.model_fields.keys()


def test_the_sizes_are_those_of_the_engine():
    assert "\n".join(sizing()) in DOC.read_text()


def test_a_block_takes_what_the_formula_says():
    assert ops.KVCache.bytes_per_block(80, 8, 128, 32, torch.bfloat16) == 32 * 2 * 80 * 8 * 128 * 2
    cache = ops.KVCache.allocate(3, 5, 2, 64, 16, torch.bfloat16, torch.device("cpu"))
    held = cache.k.numel() * cache.k.element_size() + cache.v.numel() * cache.v.element_size()
    assert held == 5 * ops.KVCache.bytes_per_block(3, 2, 64, 16, torch.bfloat16)


def test_the_commands_shown_are_ones_choral_understands():
    lines = re.findall(r"^    (?:\w+=\S+ )?(choral [^>#\n]+)", DOC.read_text(), re.M)
    assert len(lines) >= 4
    for line in lines:
        make_parser().parse_args(shlex.split(line)[1:])


if __name__ == "__main__":
    print("\n".join([*options(), "", *sizing()]))
