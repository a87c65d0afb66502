"""From clocks to numbers, and from numbers to a table for people and an object for programs.

A repetition becomes one number per measure; a row the median over its repetitions; two servers the ratios of the
repetitions that stood side by side. Knows nothing of HTTP or options. Called by the bench's command.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

from deploy.bench_client import ChoiceClock, ParentTiming
from deploy.bench_load import Row, Workload
from deploy.bench_run import Repetition, RowResult

if TYPE_CHECKING:
    from deploy.bench_floor import StepTime  # brings torch

Numbers = dict[str, float | None]
"""By measure; None where there is nothing to say."""

DASH = "-"
LABELS = "AB"
"""How the servers are called."""
SPREAD = "min..max"
"""How the line below the ratios is called."""


@dataclass(frozen=True, slots=True)
class Column:
    """How a measure is shown."""

    measure: str
    title: str
    scale: float
    digits: int

    def show(self, value: float | None) -> str:
        return DASH if value is None else f"{value * self.scale:.{self.digits}f}"


COLUMNS = (
    Column("tokens_per_s", "tok/s", 1, 1),
    Column("first_token_s", "first s", 1, 3),
    Column("all_first_tokens_s", "all first s", 1, 3),
    Column("makespan_s", "makespan s", 1, 3),
    Column("gap_s", "gap ms", 1000, 1),
    Column("gap_p95_s", "gap p95 ms", 1000, 1),
)
"""The measures that two servers are compared by."""
_VARYING = ("max_tokens", "top_p", "logprobs", "temperature", "prefix")
"""Axes with a column of their own only if the rows differ in them."""


def numbers(repetition: Repetition) -> Numbers:
    """Medians over the parents that succeeded; gaps over all chunks of all their children; tokens of all per second."""
    good, counted = repetition.good, repetition.prompt_tokens
    gaps = sorted(gap for parent in good for choice in parent.choices for gap in choice.gaps)
    return {
        "tokens_per_s": _rate(good),
        "first_token_s": _median(parent.first_s - parent.start_s for parent in good),
        "all_first_tokens_s": _median(parent.all_first_s - parent.start_s for parent in good),
        "makespan_s": _median(parent.end_s - parent.start_s for parent in good),
        "gap_s": _median(gaps),
        "gap_p95_s": gaps[math.ceil(0.95 * len(gaps)) - 1] if gaps else None,
        "prompt_tokens_asked": None if counted is None else counted.asked,
        "prompt_tokens_computed": None if counted is None else counted.computed,
    }


def medians(repetitions: Iterable[Repetition]) -> Numbers:
    """Measure by measure, over the repetitions that have it."""
    each = [numbers(repetition) for repetition in repetitions]
    return {name: _median(value for one in each if (value := one[name]) is not None) for name in each[0]}


def ratios(first: Sequence[Repetition], second: Sequence[Repetition]) -> dict[str, list[float]]:
    """For each compared measure the first server's number over the second's, repetition by repetition."""
    pairs = [(numbers(a), numbers(b)) for a, b in zip(first, second, strict=True)]
    return {
        column.measure: [x / y for a, b in pairs if (x := a[column.measure]) is not None and (y := b[column.measure])]
        for column in COLUMNS
    }


def _rate(good: Sequence[ParentTiming]) -> float | None:
    if not good:
        return None
    span = max(parent.end_s for parent in good) - min(parent.start_s for parent in good)
    return sum(parent.tokens or 0 for parent in good) / span if span else None


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None


def client_share(results: Iterable[RowResult]) -> float:
    """The largest part of one core that the client itself took in a repetition, 0..1; 0 if none succeeded."""
    shares = [0.0]
    for repetition in (r for result in results for server in result.repetitions for r in server if r.good):
        span = max(p.end_s for p in repetition.good) - min(p.start_s for p in repetition.good)
        shares += [repetition.client_cpu_s / span] if span else []
    return max(shares)


class Table:
    """Rows of text under titles. `notes` say what all rows have in common, and which server is which."""

    def __init__(self, workload: Workload, servers: Sequence[dict[str, str]], results: Sequence[RowResult]) -> None:
        rows = [result.row for result in results]
        varying = [name for name in _VARYING if len({getattr(row, name) for row in rows}) > 1]
        self._axes = ["prompt_len", "n", "parents" if rows[0].rate is None else "rate", *varying]
        self._compared = len(servers) > 1
        self.titles = [*map(_words, self._axes), *(["server"] if self._compared else [])]
        self.titles += [*(column.title for column in COLUMNS), "computed/asked", "failed"]
        self.lines = [line for result in results for line in self._lines(result)]
        common = [f"{_words(name)} {_axis(rows[0], name)}" for name in _VARYING if name not in varying]
        share = f"the client took up to {client_share(results):.0%} of a core"
        named = zip(LABELS, servers, strict=False)
        self.notes = [f"{label}: {server['url']}, {server['model']}" for label, server in named]
        self.notes.append(", ".join([*common, f"seed {workload.seed}, medians of {workload.repeat}", share]))

    def _lines(self, result: RowResult) -> Iterator[list[str]]:
        axes = [_axis(result.row, name) for name in self._axes]
        for label, repetitions in zip(LABELS, result.repetitions, strict=False):
            yield axes + ([label] if self._compared else []) + _cells(repetitions)
        if self._compared:
            compared = [ratios(*result.repetitions)[column.measure] for column in COLUMNS]
            yield [*axes, "A/B", *map(_middle, compared), DASH, DASH]
            yield [*axes, SPREAD, *map(_spread, compared), DASH, DASH]

    def print(self, out: TextIO) -> None:
        """As a rich table on a terminal that is wide enough, else as aligned plain text."""
        if not (out.isatty() and self._print_rich(out)):
            self._print_plain(out)
        out.write("".join(f"{note}\n" for note in self.notes))

    def _print_plain(self, out: TextIO) -> None:
        widths = [max(map(len, cells)) for cells in zip(self.titles, *self.lines, strict=True)]
        for line in [self.titles, *self.lines]:
            out.write("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + "\n")

    def _print_rich(self, out: TextIO) -> bool:
        """Whether it fitted and was printed."""
        from rich.console import Console
        from rich.table import Table as RichTable

        table, console = RichTable(), Console(file=out)
        for title in self.titles:
            table.add_column(title, justify="right", no_wrap=True)
        for line in self.lines:
            table.add_row(*line, end_section=not self._compared or SPREAD in line)
        if fits := console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width:
            console.print(table)
        return fits


def progress_line(row: Row, place: int | None, measured: Repetition) -> str:
    """One repetition in one line; `place` is the server's, None where there is only one."""
    shown = numbers(measured)
    load = f"parents {row.parents}" if row.rate is None else f"rate {row.rate:g}"
    parts = [
        f"prompt {row.prompt_len}, n {row.n}, {load}, {row.prefix}"
        + (f", {LABELS[place]}" if place is not None else "")
    ]
    parts += [f"{column.title} {column.show(shown[column.measure])}" for column in COLUMNS]
    failed = len(measured.parents) - len(measured.good)
    return "  ".join(parts) + (f"  FAILED {failed}" if failed else "")


def _cells(repetitions: Sequence[Repetition]) -> list[str]:
    shown = medians(repetitions)
    asked, computed = shown["prompt_tokens_asked"], shown["prompt_tokens_computed"]
    parents = [parent for repetition in repetitions for parent in repetition.parents]
    failed = sum(parent.error is not None for parent in parents)
    return [
        *(column.show(shown[column.measure]) for column in COLUMNS),
        DASH if asked is None or computed is None else f"{computed:.0f}/{asked:.0f}",
        f"{failed}/{len(parents)}" if failed else "0",
    ]


def _middle(values: Sequence[float]) -> str:
    return f"{median(values):.2f}" if values else DASH


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.2f}..{max(values):.2f}" if values else DASH


def _axis(row: Row, name: str) -> str:
    value = getattr(row, name)
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _words(name: str) -> str:
    return {"prompt_len": "prompt"}.get(name, name.replace("_", " "))


def floor_lines(floor: "Sequence[StepTime]") -> list[str]:
    """The engine's step over its floor, and what exactness costs, for each size of the family."""
    return [
        line
        for at in floor
        for line in (
            f"engine step, n {at.n}: {at.step_s * 1000:.1f} ms, its matrix products alone {at.products_s * 1000:.1f} "
            f"ms, ratio {at.ratio:.2f}",
            f"cost of exactness, n {at.n}: products {at.products_cost:.2f} of the library's, "
            f"step {at.chunks_cost:.2f} of that with longer chunks",
        )
    ]


def floor_json(floor: "Sequence[StepTime]") -> list[dict[str, float]]:
    costs = ("ratio", "products_cost", "chunks_cost")
    return [asdict(at) | {name: getattr(at, name) for name in costs} for at in floor]


def as_json(workload: Workload, servers: Sequence[dict[str, str]], results: Sequence[RowResult]) -> dict[str, Any]:
    """Everything measured. Times are in seconds; those of choices count from the start of their parent."""
    fixed = {name: getattr(workload, name) for name in ("seed", "repeat", "vocab_size", "ignore_eos", "extra")}
    rows = [_row_json(result) for result in results]
    return {**fixed, "servers": list(servers), "client_cpu_share": client_share(results), "rows": rows}


def _row_json(result: RowResult) -> dict[str, Any]:
    servers = [
        {"median": medians(repetitions), "repetitions": [_repetition_json(one) for one in repetitions]}
        for repetitions in result.repetitions
    ]
    row = {**asdict(result.row), "servers": servers, "warm_up_errors": [w.error for w in result.warm_ups if w.error]}
    if len(servers) == 2:
        compared = ratios(*result.repetitions)
        row["ratio"] = {name: _ratio_json(values) for name, values in compared.items()}
    return row


def _ratio_json(values: list[float]) -> dict[str, Any] | None:
    return {"median": median(values), "min": min(values), "max": max(values), "each": values} if values else None


def _repetition_json(repetition: Repetition) -> dict[str, Any]:
    failed = len(repetition.parents) - len(repetition.good)
    start = min(parent.start_s for parent in repetition.parents)
    parents = [_parent_json(parent, start) for parent in repetition.parents]
    return {**numbers(repetition), "failed": failed, "client_cpu_s": repetition.client_cpu_s, "parents": parents}


def _parent_json(parent: ParentTiming, start: float) -> dict[str, Any]:
    choices = [_choice_json(choice, parent.start_s) for choice in parent.choices]
    return {"start_s": parent.start_s - start, "tokens": parent.tokens, "error": parent.error, "choices": choices}


def _choice_json(choice: ChoiceClock, start: float) -> dict[str, Any]:
    return {
        "first_token_s": None if choice.first_s is None else choice.first_s - start,
        "end_s": None if choice.end_s is None else choice.end_s - start,
        "gap_s": _median(choice.gaps),
        "chunks": len(choice.gaps) + (choice.last_s is not None),
    }
