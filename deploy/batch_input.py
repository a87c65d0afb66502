"""The rows of a batch job: files of JSON lines or Parquet, streamed through Ray Data in order and in bounded memory.

Knows files and bytes, not what rows mean. Called by `deploy.batch` and `deploy.score`.
"""

import asyncio
import hashlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.data import DataContext, Dataset
from ray.data.datasource import FileBasedDatasource

from deploy.errors import OptionError
from router.batch.rows import Raw

BLOCK_BYTES = 1 << 20
"""Of input read at once; a few such blocks wait between the reader and the job."""
HASHED_BYTES = 2 << 30
"""Local input up to this size is hashed whole, about a second per GB. Beyond, size, time and both ends stand for it."""
TABLE_ROWS = 1024
CLOSE_S = 5.0
"""Longest wait for the thread that reads; Ray Data lets go after a block."""
POLL_S = 0.2
"""How often a thread that waits looks whether it may go on waiting."""
_END_BYTES = 8 << 20
_HELPERS = (("AutoscalingCoordinator", "AutoscalingCoordinator"), ("datasets_stats_actor", "_dataset_stats_actor"))
"""Names and namespaces of the actors that Ray Data leaves in the cluster, for inputs to come."""
_READ_AHEAD = 64 << 20
_LINES, _TABLES = (".jsonl", ".ndjson", ".json"), (".parquet", ".pq")


class LineDatasource(FileBasedDatasource):
    """Lines as bytes. Ray Data's own reader of text holds a whole file in memory."""

    def _read_stream(self, f: Any, path: str) -> Iterator[pa.Table]:
        rest = b""
        while piece := f.read(BLOCK_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            if lines:
                yield pa.table({"line": pa.array(lines, pa.large_binary())})
        if rest:
            yield pa.table({"line": pa.array([rest], pa.large_binary())})


class TableDatasource(FileBasedDatasource):
    """Parquet, some rows at a time. Ray Data's own reader looks at the files with tasks that wait for a CPU."""

    def _open_input_source(self, filesystem: Any, path: str, **options: Any) -> Any:
        return filesystem.open_input_file(path)

    def _read_stream(self, f: Any, path: str) -> Iterator[pa.Table]:
        for batch in pq.ParquetFile(f).iter_batches(batch_size=TABLE_ROWS):
            yield pa.Table.from_batches([batch])


class BatchInput:
    """The files of a job. Raises OptionError naming a path that is not there or of no known kind.

    With `last`, when the Ray they are read with reads nothing after them, what Ray Data would leave there is ended:
    every actor that waits takes half a percent of a core from the model.
    """

    def __init__(self, urls: Sequence[str], *, last: bool = False) -> None:
        self._last = last
        self._fs, _ = _filesystem(urls[0])
        self._paths = [path for url in urls for path in self._expand(url)]
        kinds = {_kind(path) for path in self._paths}
        if len(kinds) > 1:
            raise OptionError("INPUT: JSON lines and Parquet cannot be mixed")
        self._parquet = kinds == {"parquet"}
        self._infos = [self._fs.info(path) for path in self._paths]
        self._bytes = sum(info["size"] for info in self._infos)
        self._size = (self._rows_by_footers() if self._parquet else self._bytes) or 1
        self._read = 0
        """Of the size: rows of Parquet, bytes of lines."""
        self._blocks: queue.Queue[Any] | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def fraction(self) -> float:
        """How much of the input has been taken, 0..1."""
        return min(self._read / self._size, 1.0)

    def digest(self) -> str:
        """Identifies the content, wherever the files lie; see HASHED_BYTES."""
        digest = hashlib.sha256()
        for path, info in zip(self._paths, self._infos, strict=True):
            digest.update(self._content(path, info))
        return digest.hexdigest()

    def _content(self, path: str, info: dict[str, Any]) -> bytes:
        if not self._local:
            return str(self._fs.ukey(path)).encode()
        with open(path, "rb") as stream:
            if self._bytes <= HASHED_BYTES:
                return hashlib.file_digest(stream, "sha256").digest()
            head = stream.read(_END_BYTES)
            stream.seek(-min(_END_BYTES, info["size"]), 2)
            return hashlib.sha256(head + stream.read() + f"{info['size']} {info['mtime']}".encode()).digest()

    def open(self) -> None:
        """Begin to read ahead, by a few blocks. Ray Data takes seconds for the first: best called before it is due."""
        if self._blocks is None:
            self._blocks = queue.Queue(2)
            self._thread = threading.Thread(target=self._read_into, args=(self._blocks,), name="input", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop reading for good, and wait until Ray is not used any more: a call after its end ends the process."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    async def rows(self) -> AsyncIterator[Raw]:
        """All rows in order; blank lines are none. To be called once."""
        self.open()
        try:
            while (item := await asyncio.to_thread(self._next)) is not None:
                if isinstance(item, Exception):
                    raise item
                for row in self._rows_of(item):
                    yield row
        finally:
            await asyncio.to_thread(self.close)

    def _read_into(self, blocks: "queue.Queue[Any]") -> None:
        def put(item: Any) -> None:
            while not self._closed.is_set():
                with suppress(queue.Full):
                    blocks.put(item, timeout=POLL_S)
                    return

        try:
            with closing(iter(self._dataset().iter_batches(batch_size=None, batch_format="pyarrow"))) as read:
                for block in read:
                    for piece in block.to_batches(max_chunksize=TABLE_ROWS):
                        put(piece)
                    if self._closed.is_set():
                        return
            if self._last:
                _end_helpers()
            put(None)
        except Exception as error:
            put(error)

    def _next(self) -> Any:
        """The next block, an error, or None at the end or after `close`."""
        assert self._blocks is not None
        while not self._closed.is_set():
            with suppress(queue.Empty):
                return self._blocks.get(timeout=POLL_S)
        return None

    def _rows_of(self, batch: pa.RecordBatch) -> Iterator[Raw]:
        if self._parquet:
            self._read += len(batch)
            yield from batch.to_pylist()
            return
        for line in batch.column("line").to_pylist():
            self._read += len(line) + 1
            if line.strip():
                yield line

    def _dataset(self) -> Dataset:
        """Read tasks take no CPU: the groups have them all."""
        context = DataContext.get_current()
        context.target_max_block_size = 4 * BLOCK_BYTES
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.execution_options.preserve_order = True
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        context.execution_options.resource_limits = context.execution_options.resource_limits.copy(
            object_store_memory=_READ_AHEAD
        )
        kind = TableDatasource if self._parquet else LineDatasource
        source = kind(self._paths, filesystem=None if self._local else self._fs)
        return ray.data.read_datasource(source, num_cpus=0)

    def _rows_by_footers(self) -> int:
        try:
            return sum(pq.read_metadata(path, filesystem=self._fs).num_rows for path in self._paths)
        except pa.ArrowInvalid as error:
            raise OptionError(f"INPUT: {error}") from error

    @property
    def _local(self) -> bool:
        return isinstance(self._fs, fsspec.implementations.local.LocalFileSystem)

    def _expand(self, url: str) -> list[str]:
        """A file, or the files of a folder in order."""
        fs, path = _filesystem(url)
        if type(fs) is not type(self._fs):
            raise OptionError(f"INPUT: {url} lies elsewhere than the files before it")
        if fs.isfile(path):
            return [path]
        names = map(str, fs.glob(f"{path}/*")) if fs.isdir(path) else ()
        if not (found := sorted(name for name in names if name.endswith((*_LINES, *_TABLES)))):
            raise OptionError(f"INPUT: {url} is no file, and no folder of .jsonl or .parquet files")
        return found


def _end_helpers() -> None:
    for name, namespace in _HELPERS:
        with suppress(ValueError):  # another Ray may have none of that name
            ray.kill(ray.get_actor(name, namespace))


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise OptionError(f"INPUT: {url}: {error}") from error
    return fs, path


def _kind(path: str) -> str:
    if path.endswith(_TABLES):
        return "parquet"
    if path.endswith(_LINES):
        return "jsonl"
    raise OptionError(f"INPUT: {path} is neither .jsonl nor .parquet")
