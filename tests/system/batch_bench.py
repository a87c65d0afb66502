"""Speed of a batch job over that of the engine alone, on the same rows, and the ratio of the two.

    python -m tests.system.batch_bench --rows 192 --samples 8 --tokens 64 --rounds 3
    python -m tests.system.batch_bench --rows 192 --spread

The engine alone runs in this process with all families queued at once, before and after each job, for the machine
changes its pace; the job is the whole `choral batch` command with a group of its own, measured from the moment its
groups are ready to its last row. With `--spread` rows have 1/4 to 7/4 of the tokens, and each job is followed by one
without the longest rows first. The last lines are the medians of the rounds.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.engines import family
from tests.system.alone import EngineAlone, run_like_a_rank
from tests.system.batch_kills import Plan, write_input
from workers import checkpoint
from workers.outputs import FamilyRequest

WAYS = {"choral batch": (), "first come, first served": ("--look-ahead", "1")}


def write_rows(plan: Plan, spread: bool, source: Path) -> list[dict[str, Any]]:
    """The input, every row with its own number of tokens."""
    write_input(plan, source)
    rng = random.Random(plan.seed)
    least, most = (plan.tokens // 4, plan.tokens * 7 // 4) if spread else (plan.tokens, plan.tokens)
    extra = [{"ignore_eos": True, "max_tokens": rng.randint(least, most)} for _ in range(plan.rows)]
    rows = [json.loads(line) | more for line, more in zip(source.open(), extra, strict=True)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def families(plan: Plan, rows: list[dict[str, Any]]) -> list[FamilyRequest]:
    """The rows as the engine gets them."""
    from router.protocol import ChatFields
    from router.tokenizer import Tokenizer

    tokenizer = Tokenizer(checkpoint.resolve(None))
    chats = [ChatFields.model_validate({"messages": row["messages"]}) for row in rows]
    prompts = [tokenizer._encode([tokenizer.chat_text(chat)], False)[0] for chat in chats]
    return [
        family(str(i), prompt, range(plan.samples), max_tokens=row["max_tokens"], logprobs=0)
        for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    ]


def job(plan: Plan, source: Path, output: Path, *options: str) -> tuple[float, float]:
    """Tokens per second, and the share of the time after the queue ran dry."""
    command = [sys.executable, "-m", "deploy.cli", "batch", str(source), "-n", str(plan.samples), *options]
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    return summary["tokens"] / summary["seconds"], summary["tail_s"] / summary["seconds"]


def a_round(
    alone: EngineAlone, queue: list[FamilyRequest], plan: Plan, source: Path, ways: Sequence[str]
) -> dict[str, float]:
    """Speed of the job each way over the engine's on the same rows, printed as it comes."""
    before, made = alone.speed(queue), {}
    for way in ways:
        with tempfile.TemporaryDirectory() as output:
            made[way] = job(plan, source, Path(output) / "out", *WAYS[way])
    after = alone.speed(queue)
    print(f"engine alone {before:.0f} and {after:.0f} tok/s", flush=True)
    ratios = {way: 2 * speed / (before + after) for way, (speed, _) in made.items()}
    for way, (speed, tail) in made.items():
        print(
            f"{way} {speed:.0f} tok/s, {tail:.0%} of the time after the queue ran dry; {ratios[way]:.2f} of the engine"
        )
    return ratios


def main() -> None:
    run_like_a_rank("tests.system.batch_bench")
    parser = argparse.ArgumentParser(description="Speed of a batch job over that of the engine alone.")
    for name, default in (("rows", 64), ("samples", 8), ("tokens", 64), ("rounds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--spread", action="store_true", help="rows of different lengths")
    values = vars(parser.parse_args())
    spread, rounds = values.pop("spread"), values.pop("rounds")
    ways = list(WAYS) if spread else list(WAYS)[:1]
    plan = Plan(kills=0, **values)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        queue = families(plan, write_rows(plan, spread, source))
        alone = EngineAlone()
        alone.speed(queue[:1])
        made = [a_round(alone, queue, plan, source, ways) for _ in range(rounds)]
    for way in ways:
        ratios = [ratio[way] for ratio in made]
        print(f"{way}: {median(ratios):.3f} of the engine ({min(ratios):.2f}..{max(ratios):.2f})")


if __name__ == "__main__":
    main()
