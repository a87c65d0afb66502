"""Speed of a batch job over that of the engine alone, on the same rows, and the ratio of the two.

    python -m tests.system.batch_bench --rows 64 --samples 8 --tokens 64

The engine alone runs in this process with all families queued at once; the job is the whole `choral batch` command with
a group of its own, measured from its first row to its last.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.engines import Lab, family
from tests.system.batch_kills import Plan, write_input
from workers import checkpoint


def engine_alone(plan: Plan, source: Path) -> float:
    """Tokens per second."""
    from router.protocol import ChatFields
    from router.tokenizer import Tokenizer

    folder = checkpoint.resolve(None)
    lab, tokenizer = Lab(folder, kv_blocks=1365, block_size=32), Tokenizer(folder)
    chats = [ChatFields.model_validate({"messages": json.loads(line)["messages"]}) for line in source.open()]
    prompts = [tokenizer._encode([tokenizer.chat_text(chat)], False)[0] for chat in chats]
    values = {"max_tokens": plan.tokens, "logprobs": 0}
    families = [family(str(i), prompt, range(plan.samples), **values) for i, prompt in enumerate(prompts)]
    lab.run(families[:1])
    started = time.monotonic()
    made = lab.run(families)
    return sum(len(bits[0]) for bits in made.values()) / (time.monotonic() - started)


def job(plan: Plan, source: Path, output: Path) -> tuple[float, float]:
    """Tokens per second, and the share of the time after the queue ran dry."""
    rows = [json.loads(line) | {"ignore_eos": True} for line in source.open()]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["-n", str(plan.samples), "--max-tokens", str(plan.tokens), "--output", str(output)]
    command = [sys.executable, "-m", "deploy.cli", "batch", str(source), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    return summary["tokens"] / summary["seconds"], summary["tail_s"] / summary["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of a batch job over that of the engine alone.")
    for name, default in (("rows", 64), ("samples", 8), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    plan = Plan(kills=0, **vars(parser.parse_args()))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        write_input(plan, source)
        alone = engine_alone(plan, source)
        print(f"engine alone {alone:8.0f} tok/s", flush=True)
        batch, tail = job(plan, source, Path(folder) / "out")
    print(f"choral batch {batch:8.0f} tok/s, {tail:.0%} of the time after the queue ran dry")
    print(f"ratio        {batch / alone:8.2f}")


if __name__ == "__main__":
    main()
