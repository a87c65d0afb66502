"""How long the attention of a decoding step takes on a GPU, with the prompt shared and not, over what it must at least.

    python tests/gpu/bench_attention.py [--quick] [--step] [--json FILE]

The shapes are those of the embedded model unless told otherwise. All layers of a step are captured and replayed, so no
launch from Python is measured. The floor is the larger of: every key and value that is needed read once, the prompt's
once for all children, at the memory's rate; and the multiplications at the rate of the matrix units. `--step` also
times a whole decoding step of a model of these shapes with random weights, as a CUDA graph and without.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from kernels import ops
from workers.config import EngineConfig
from workers.model_runner import ModelRunner
from workers.step_input import StepInput
from workers.tensor_parallel import Communicator

CUDA = torch.device("cuda", 0)


@dataclass(frozen=True)
class Case:
    children: int
    prompt: int
    own: int
    """Tokens of each child behind the prompt."""


@dataclass(frozen=True)
class Row:
    children: int
    prompt: int
    floor_ms: float
    shared_ms: float
    unshared_ms: float

    def line(self) -> str:
        return (
            f"{self.children:8} {self.prompt:7} {self.floor_ms:9.3f} {self.shared_ms:10.3f} "
            f"{self.shared_ms / self.floor_ms:11.1f} {self.unshared_ms:12.3f} {self.unshared_ms / self.shared_ms:9.2f}"
        )


HEADER = "children  prompt  floor ms  shared ms  over floor  unshared ms   speedup"


def step_of(case: Case, block: int) -> StepInput:
    """All children compute their next token; they share the prompt's full blocks."""
    length, shared = case.prompt + case.own, case.prompt // block
    each = -(-length // block) - shared
    own = shared + torch.arange(case.children * each).view(case.children, each)
    tables = torch.cat([torch.arange(shared).expand(case.children, shared), own], 1)
    positions = torch.full((case.children,), length - 1)
    rows = torch.arange(case.children)
    return StepInput(
        token_ids=rows,
        positions=positions,
        slots=tables[:, (length - 1) // block] * block + (length - 1) % block,
        query_starts=torch.arange(case.children + 1),
        context_lens=positions + 1,
        block_tables=tables,
        copies=torch.zeros(0, 2, dtype=torch.int64),
        logit_rows=rows,
    )


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` runs, after three that do not count."""
    times = []
    for turn in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def replayable(work: Callable[[], object]) -> Callable[[], None]:
    """The same work as a captured graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def attention_ms(args: argparse.Namespace, case: Case, kv: ops.KVCache, share: bool) -> float:
    step = step_of(case, kv.block_size)
    batch = ops.AttentionBatch.build(
        step.query_starts.int(), step.context_lens.int(), step.block_tables.int(), step.positions, step.slots, kv, share
    )
    q = torch.randn(case.children, args.heads, args.dim, device=CUDA).to(kv.k.dtype)
    work = replayable(lambda: [ops.attention(q, batch, kv, layer, args.dim**-0.5) for layer in range(args.layers)])
    return milliseconds(work, args.repeats)


def floor_ms(args: argparse.Namespace, case: Case) -> float:
    tokens = case.prompt + case.children * case.own
    size = args.layers * tokens * args.kv_heads * args.dim * 2 * 2
    flops = args.layers * case.children * (case.prompt + case.own) * args.heads * args.dim * 4
    return 1e3 * max(size / (args.terabytes * 1e12), flops / (args.teraflops * 1e12))


def measure(args: argparse.Namespace, case: Case) -> Row:
    blocks = int(step_of(case, args.block).block_tables.max()) + 1
    kv = ops.KVCache.allocate(args.layers, blocks, args.kv_heads, args.dim, args.block, torch.bfloat16, CUDA)
    kv.k.normal_()
    kv.v.normal_()
    times = [attention_ms(args, case, kv, share) for share in (True, False)]
    return Row(case.children, case.prompt, floor_ms(args, case), *times)


def random_model(args: argparse.Namespace, folder: str) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=args.heads * args.dim, intermediate_size=args.heads * args.dim * 8 // 3,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, num_key_value_heads=args.kv_heads,
        max_position_embeddings=16384, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def execution_ms(runner: ModelRunner, case: Case, args: argparse.Namespace) -> float:
    step = step_of(case, args.block)
    return milliseconds(lambda: runner.execute(step), args.repeats)


def measure_steps(args: argparse.Namespace, cases: list[Case]) -> list[dict[str, float]]:
    """Whole decoding steps; the floor adds every weight, read once."""
    results = []
    most = max(int(step_of(case, args.block).block_tables.max()) for case in cases) + 2
    with tempfile.TemporaryDirectory() as folder:
        random_model(args, folder)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        config = EngineConfig(
            model_folder=folder, device="cuda", dtype="bfloat16", kv_blocks=most, block_size=args.block
        )
        runner = ModelRunner(config, Communicator())
    graphs = runner.graphs
    print(f"{'children':>8} {'prompt':>7} {'floor ms':>9} {'graph ms':>10} {'eager ms':>10}")
    for case in cases:
        runner.graphs = graphs
        captured = execution_ms(runner, case, args)
        runner.graphs = None
        eager = execution_ms(runner, case, args)
        floor = floor_ms(args, case) + 1e3 * size / (args.terabytes * 1e12)
        print(f"{case.children:8} {case.prompt:7} {floor:9.3f} {captured:10.3f} {eager:10.3f}", flush=True)
        results.append({**asdict(case), "floor_ms": floor, "graph_ms": captured, "eager_ms": eager})
    return results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions and four of the nine rows")
    parser.add_argument("--step", action="store_true", help="whole decoding steps as well")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    for name, default in {"heads": 9, "kv-heads": 3, "dim": 64, "layers": 30, "block": 32, "own": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--terabytes", type=float, default=4.8, help="memory rate of the device, TB/s")
    parser.add_argument("--teraflops", type=float, default=989.0, help="bfloat16 rate of the device, TFLOP/s")
    args = parser.parse_args()
    args.repeats = 5 if args.quick else 20
    return args


@torch.inference_mode()
def main() -> None:
    args = arguments()
    sizes = ([16, 256], [512, 8192]) if args.quick else ([16, 64, 256], [512, 2048, 8192])
    cases = [Case(children, prompt, args.own) for children in sizes[0] for prompt in sizes[1]]
    print(f"{ops.implementation(CUDA)}; {args.layers} layers, {args.own} own tokens per child\n{HEADER}")
    rows = []
    for case in cases:
        rows.append(measure(args, case))
        print(rows[-1].line(), flush=True)
    results = {"attention": [asdict(row) for row in rows], "steps": measure_steps(args, cases) if args.step else []}
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
