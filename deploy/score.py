"""The `choral score` command: grades the samples of a batch, also while it grows, and says how good they are.

A grader is an exact match with a field of the input, after an optional regular expression, or a Python function that
runs in Ray tasks. Prints a table of pass@k and maj@k and draws the curve. Reads what `choral batch` wrote.
"""

import argparse
import asyncio
import importlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from deploy.errors import CommandError, OptionError
from deploy.estimates import Estimate, Grade, Grades, counts, majority_at, over_rows, pass_at

Record = Mapping[str, Any]
Grader = Callable[[Record, Record], Any]
"""Of an input row and a sample of it: whether it is right, or a pair of its answer and that."""
COLUMNS = ["id", "row", "index", "sample", "seed", "text", "finish_reason", "error"]
"""Of a sample, for its grader."""
CHUNK = 256
"""Samples graded by one Ray task."""


def add_score_options(parser: argparse.ArgumentParser) -> None:
    """Everything behind `choral score`."""
    add = parser.add_argument
    add("folder", metavar="DIR", help="output of choral batch; it may still grow")
    add("--input", nargs="+", required=True, metavar="INPUT", help="the input of that batch")
    add("--field", metavar="NAME", help="field of the input that holds the right answer")
    add("--extract", metavar="REGEX", help="what of a sample is its answer: the last match, its first group if any")
    add("--grader", metavar="MODULE:FUNCTION", help="f(row, sample) -> right, or (answer, right); instead of --field")
    add("--png", metavar="FILE", help="draw the curves there")


def run_score(args: argparse.Namespace) -> int:
    """Grade, print, draw. Raises OptionError, CommandError."""
    grader = _grader(args)
    from deploy.batch_input import BatchInput

    samples = _samples(args.folder)
    rows = _graded(BatchInput(args.input), samples, grader)
    if not rows:
        raise CommandError(f"{args.folder} holds no finished samples")
    table = estimates(rows)
    for line in report(table, rows):
        print(line)
    if args.png:
        draw(table, Path(args.png))
    return 0


def exact_match(field: str, pattern: str | None) -> Grader:
    """Compares texts without surrounding space. A sample in which `pattern` is not found has no answer."""
    compiled = re.compile(pattern) if pattern else None

    def grade(row: Record, sample: Record) -> tuple[str | None, bool]:
        answer: str | None = sample["text"].strip()
        if compiled is not None:
            found = list(compiled.finditer(sample["text"]))
            answer = (found[-1][1] if compiled.groups else found[-1][0]).strip() if found else None
        return answer, answer == str(row[field]).strip()

    return grade


def _grader(args: argparse.Namespace) -> Grader:
    if (args.field is None) == (args.grader is None):
        raise OptionError("give one of --field and --grader")
    if args.grader is None:
        try:
            return exact_match(args.field, args.extract)
        except re.error as error:
            raise OptionError(f"--extract: {error}") from error
    if args.extract is not None:
        raise OptionError("--extract: only with --field")
    module, _, name = args.grader.partition(":")
    try:
        function: Grader = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(f"--grader {args.grader}: {error}") from error
    return function


def _samples(folder: str) -> dict[int, list[Record]]:
    """The finished samples by row, each row's by their place in it."""
    from router.batch.store import SampleStore, StoreError

    try:
        store = SampleStore.read(folder)
    except StoreError as error:
        raise CommandError(str(error)) from error
    rows: defaultdict[int, list[Record]] = defaultdict(list)
    for record in store.records(COLUMNS):
        if record["error"] is None:
            rows[record["row"]].append(record)
    return {row: sorted(samples, key=lambda sample: int(sample["index"])) for row, samples in rows.items()}


def _graded(source: Any, samples: Mapping[int, list[Record]], grader: Grader) -> list[Grades]:
    """Every row's grades, made by Ray tasks."""
    import ray

    from deploy.ray_environment import init_ray

    # Without an address Ray would look for a cluster it remembers, which may be gone.
    address = os.environ.get("RAY_ADDRESS", "local")
    own = {"include_dashboard": False} if address == "local" else {}
    init_ray(address=address, ignore_reinit_error=True, **own)
    task = ray.remote(num_cpus=0)(_grade)

    async def ask() -> list[Any]:
        calls, pairs = [], []
        number = 0
        async for raw in source.rows():
            row = raw if isinstance(raw, Mapping) else _object(raw)
            pairs += [(row, sample) for sample in samples.get(number, ())]
            number += 1
            if len(pairs) >= CHUNK:
                calls.append(task.remote(grader, pairs))
                pairs = []
        return await asyncio.gather(*calls, task.remote(grader, pairs))

    try:
        by_row: defaultdict[int, list[Grade]] = defaultdict(list)
        for answers in asyncio.run(ask()):
            for row, grade in answers:
                by_row[row].append(grade)
        return list(by_row.values())
    except ray.exceptions.RayTaskError as error:
        raise CommandError(f"the grader failed: {error.cause!r}") from error
    finally:
        ray.shutdown()


def _object(raw: Any) -> Record:
    """The fields of a line; a bad line has none, and no samples either."""
    try:
        value = json.loads(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _grade(grader: Grader, pairs: Iterable[tuple[Record, Record]]) -> list[tuple[int, Grade]]:
    return [(sample["row"], _as_grade(grader(row, sample))) for row, sample in pairs]


def _as_grade(said: Any) -> Grade:
    answer, correct = said if isinstance(said, tuple) else (None, said)
    return Grade(None if answer is None else str(answer), bool(correct))


Table = dict[int, tuple[Estimate, Estimate | None]]
"""By k: pass@k, and maj@k where samples have answers."""


def estimates(rows: list[Grades]) -> Table:
    """For every k up to the most samples of a row; a row that has fewer, as yet, is left out there."""
    answers = any(grade.answer is not None for grades in rows for grade in grades)
    table = {}
    for k in counts(max(map(len, rows))):
        passed = over_rows(rows, k, pass_at)
        assert passed is not None
        table[k] = passed, over_rows(rows, k, majority_at) if answers else None
    return table


def report(table: Table, rows: list[Grades]) -> list[str]:
    """The table as lines."""
    lines = [f"{len(rows)} rows, {sum(map(len, rows))} samples"]
    lines.append("    k   rows   pass@k  95 % interval   maj@k  95 % interval")
    for k, (passed, majority) in table.items():
        cells = "  ".join(_cell(value) for value in (passed, majority))
        lines.append(f"{k:5}  {passed.rows:5}   {cells}")
    return lines


def _cell(value: Estimate | None) -> str:
    return "     -        -       " if value is None else f"{value.mean:6.3f}  {value.low:.3f} .. {value.high:.3f}"


def draw(table: Table, file: Path) -> None:
    """The curves with their intervals, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for position, name in enumerate(("pass@k", "maj@k")):
        points = [(k, both[position]) for k, both in table.items()]
        known = [(k, value) for k, value in points if value is not None]
        if known:
            ks = [k for k, _ in known]
            axes.plot(ks, [value.mean for _, value in known], marker="o", label=name)
            axes.fill_between(ks, [v.low for _, v in known], [v.high for _, v in known], alpha=0.2)
    axes.set(xscale="log", xlabel="k", ylabel="share of rows", ylim=(0, 1))
    axes.set_xticks(list(table), [str(k) for k in table])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
