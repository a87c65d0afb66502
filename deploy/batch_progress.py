"""How a batch job tells how far it is: a bar in a terminal, a line every ten seconds in a log, gauges for Prometheus.

All show the same numbers, those of the runner. Called by `deploy.batch`; writes to stderr only.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, fields

from ray.util.metrics import Gauge
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from router.batch.runner import Progress as Numbers

LOG_S = 10.0
SHOW_S = 0.5


@dataclass(frozen=True, slots=True)
class Status:
    """The numbers of a moment, and what follows from them."""

    now: Numbers
    fraction_read: float

    @property
    def tokens_per_s(self) -> float:
        return self.now.tokens / max(self.now.seconds, 1e-9)

    @property
    def fraction(self) -> float:
        """How much of the work is done: rows done of rows taken, on the scale of the input."""
        return self.fraction_read * self.now.done_rows / max(self.now.read_rows, 1)

    @property
    def left_s(self) -> float | None:
        """At the speed so far; None before the first row is done."""
        return self.now.seconds * (1 - self.fraction) / self.fraction if self.fraction else None

    def line(self) -> str:
        now = self.now
        left = "?" if self.left_s is None else _clock(self.left_s)
        return (
            f"{self.fraction:4.0%}  {now.done_rows} rows, {now.samples} samples, {self.tokens_per_s:.0f} tok/s, "
            f"{left} left, {now.children_alive} children alive, {now.failed_rows} rows failed, {now.retries} retries"
        )


@contextlib.asynccontextmanager
async def reporting(status: Callable[[], Status]) -> AsyncIterator[None]:
    """Show `status()` as long as the block runs, and once more at its end."""
    gauges = {field.name: Gauge(f"choral_batch_{field.name}", _help(field.name)) for field in fields(Numbers)}
    with _shown() as show:

        async def report() -> None:
            while True:
                show(status())
                for name, gauge in gauges.items():
                    gauge.set(getattr(status().now, name))
                await asyncio.sleep(SHOW_S)

        task = asyncio.create_task(report())
        try:
            yield
        finally:
            task.cancel()
            show(status())


def _help(name: str) -> str:
    return f"Batch job: {name.replace('_', ' ')}"


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[Status], None]]:
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield _Lines().show
        return
    with Progress(BarColumn(), TextColumn("{task.description}"), console=console, transient=False) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda status: bar.update(task, completed=status.fraction, description=status.line())


class _Lines:
    """A plain line every LOG_S seconds of the run."""

    def __init__(self) -> None:
        self._last = 0.0

    def show(self, status: Status) -> None:
        if status.now.seconds - self._last >= LOG_S:
            self._last = status.now.seconds
            print(status.line(), file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
