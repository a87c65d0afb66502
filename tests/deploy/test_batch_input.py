"""Input files through a real Ray Data: every row in order, while all CPUs are taken, in flat memory."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deploy.errors import OptionError
from tests.processes import resident_memory

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def busy_cluster() -> Iterator[None]:
    """One CPU, and an actor that has it."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)

    @ray.remote(num_cpus=1)
    class Hog:
        def there(self) -> None:
            pass

    hog = Hog.remote()
    ray.get(hog.there.remote())
    yield
    ray.shutdown()


def read(*paths: Path) -> tuple[list[Any], float]:
    from deploy.batch_input import BatchInput

    source = BatchInput([str(path) for path in paths])

    async def run() -> list[Any]:
        return [row async for row in source.rows()]

    return asyncio.run(run()), source.fraction


def test_lines_come_in_order_over_blocks_and_files_and_blank_ones_are_none(tmp_path: Path):
    lines = [json.dumps({"id": str(i), "prompt": "x\u2028\x0b" * (i % 700)}, ensure_ascii=False) for i in range(6000)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines[:4000]) + "\r\n")
    (tmp_path / "b.ndjson").write_text("\n".join(lines[4000:]))
    (tmp_path / "notes.txt").write_text("no input")
    rows, fraction = read(tmp_path)
    assert [row.decode().rstrip("\r") for row in rows] == lines
    assert fraction == 1.0


def test_a_line_longer_than_a_block_is_one_row(tmp_path: Path):
    line = json.dumps({"prompt": "x" * 5_000_000})
    (tmp_path / "a.jsonl").write_text(f"{line}\n{line}")
    assert [len(row) for row in read(tmp_path / "a.jsonl")[0]] == [len(line)] * 2


def test_parquet_rows_are_mappings(tmp_path: Path):
    rows = [{"id": i, "prompt_token_ids": [i, 1], "stop": None, "temperature": i / 8} for i in range(5000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=700)
    got, fraction = read(tmp_path / "a.parquet")
    assert got == rows and fraction == 1.0


def test_memory_is_flat_and_reading_stays_a_little_ahead(tmp_path: Path):
    from deploy.batch_input import BatchInput

    size = 200 << 20
    with (tmp_path / "large.jsonl").open("w") as file:
        file.writelines(f'{{"id": {i}, "prompt": "{"x" * 2000}"}}\n' for i in range(size // 2024))
    source = BatchInput([str(tmp_path / "large.jsonl")])

    async def run() -> tuple[int, int, float]:
        rows: AsyncIterator[Any] = source.rows()
        await anext(rows)
        await asyncio.sleep(4)
        ahead = ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]
        before, count = anonymous_memory(), 1
        async for _ in rows:
            count += 1
        return count, anonymous_memory() - before, ahead

    count, grown, ahead = asyncio.run(run())
    assert count == size // 2024
    assert grown < size // 8
    assert 0 < ahead < size * 5 // 8


def anonymous_memory() -> int:
    return resident_memory(os.getpid())["RssAnon"]


def test_leaving_early_ends_the_reading(tmp_path: Path):
    from deploy.batch_input import BatchInput

    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n' * 400_000)

    async def run() -> None:
        rows: Any = BatchInput([str(tmp_path)]).rows()
        assert await anext(rows) == b'{"prompt": "x"}'
        await rows.aclose()

    asyncio.run(run())


def test_the_digest_is_that_of_the_content(tmp_path: Path):
    from deploy.batch_input import BatchInput

    for name, text in (("a", "one\n"), ("b", "one\n"), ("c", "two\n")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    a, b, c = (BatchInput([str(tmp_path / f"{name}.jsonl")]).digest() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("names", "words"),
    [(["none.jsonl"], "none.jsonl"), (["a.csv"], "neither"), (["a.jsonl", "b.parquet"], "mixed"), (["."], "no file")],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, names: list[str], words: str):
    from deploy.batch_input import BatchInput

    for name in ("a.csv", *(["a.jsonl", "b.parquet"] if len(names) > 1 else [])):
        (tmp_path / name).write_text("x")
    with pytest.raises(OptionError, match=words):
        BatchInput([str(tmp_path / name) for name in names])
