"""A batch over the toy engine: its rows, its folder, one call that runs it, and the content as comparable lines."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from router.batch.rows import RowReader, RowRules
from router.batch.runner import BatchRunner, RunOptions
from router.batch.store import SampleStore
from router.limits import RouterLimits
from router.serving import Serving
from tests.router.toy_engine import ToyEngine

FAST = RunOptions(backoff_s=0.001, flush_s=0.01, patience_s=0.2)
JOB = {"input": "i", "model": "toy"}


async def each(rows: Iterable[Any]) -> AsyncIterator[Any]:
    for row in rows:
        yield row if isinstance(row, str) else json.dumps(row)


def content(folder: Path, form: str = "jsonl") -> list[str]:
    """All samples, sorted: equal for equal output, however it came about."""
    store = SampleStore(str(folder), form)
    return sorted(json.dumps(record, sort_keys=True) for record in store.records())


class Lab:
    """Runs batches into one folder."""

    def __init__(self, engine: ToyEngine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.rules = RowRules(key="k", defaults={"n": 3, "max_tokens": 6})
        self.options = FAST
        self.capacity = 12
        self.pieces = 1

    def start(self, *, force: bool = False) -> BatchRunner:
        serving = Serving.load(self.engine, RouterLimits(max_n=1000, max_children=1000))
        store = SampleStore.open(str(self.folder), JOB, "jsonl", force=force)
        reader = RowReader(serving, self.rules)
        return BatchRunner(
            self.engine,
            store,
            reader,
            capacity=lambda: self.capacity,
            pieces=lambda: self.pieces,
            options=self.options,
        )

    def run(self, rows: Iterable[Any], **options: Any) -> dict[str, Any]:
        runner = self.start(**options)
        try:
            return dict(asyncio.run(runner.run(each(rows))))
        finally:
            runner._store.close()

    def content(self) -> list[str]:
        return content(self.folder)

    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.content()]


@pytest.fixture
def lab(model_folder: Path, tmp_path: Path) -> Lab:
    return Lab(ToyEngine(model_folder), tmp_path / "out")


@pytest.fixture
def new_lab(model_folder: Path, tmp_path: Path) -> Callable[[str], Lab]:
    """Another lab, with a folder of its own."""
    return lambda name: Lab(ToyEngine(model_folder), tmp_path / name)
