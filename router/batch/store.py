"""The output folder of a batch: append-only shards of samples, and a manifest that says which job wrote them.

A shard is written whole, fsynced and renamed into place, so every file that has its final name is good, and what a kill
can lose is what was not flushed. `done` says which samples are there; opening an existing folder reads that back. Any
folder fsspec can reach will do. Called by `runner`; knows nothing of prompts or engines. One process at a time:
on a local disk a lock sees to that, elsewhere the caller does.
"""

import fcntl
import io
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from router.batch.records import SCHEMA, Sample

Form = Literal["parquet", "jsonl"]
MANIFEST = "_manifest.json"
_LOCK = "_lock"
_KEYS = ["row", "index", "row_samples", "error"]


class StoreError(Exception):
    """The folder cannot be used for this job; the message says why."""


class Done:
    """Which samples are written: a byte per row, and a set of bits per row that has only some of its samples."""

    def __init__(self) -> None:
        self._complete = bytearray()
        self._partial: dict[int, int] = {}
        self.samples = 0
        self.rows = 0
        """Complete rows, failed ones included."""
        self.failed_rows = 0
        """Complete rows with an error in any sample."""
        self._erring: set[int] = set()

    def add(self, row: int, index: int, row_samples: int, failed: bool) -> None:
        """Note one sample. Raises ValueError when it is there already."""
        bits = self._partial.get(row, 0)
        if self.complete(row) or bits >> index & 1:
            raise ValueError(f"sample {index} of row {row} is written twice")
        self.samples += not failed
        if failed:
            self._erring.add(row)
        bits |= 1 << index
        if bits == (1 << row_samples) - 1:
            self._finish(row)
        else:
            self._partial[row] = bits

    def _finish(self, row: int) -> None:
        self._partial.pop(row, None)
        if row >= len(self._complete):
            self._complete.extend(bytes(row + 1 - len(self._complete)))
        self._complete[row] = 1
        self.rows += 1
        self.failed_rows += row in self._erring
        self._erring.discard(row)

    def complete(self, row: int) -> bool:
        return row < len(self._complete) and bool(self._complete[row])

    def missing(self, row: int, row_samples: int) -> list[int]:
        """The choice indices of the row that are not written yet."""
        if self.complete(row):
            return []
        bits = self._partial.get(row, 0)
        return [index for index in range(row_samples) if not bits >> index & 1]


class SampleStore:
    """`add` and `done` belong to one event loop; `flush` may run in a thread. See `open`."""

    def __init__(self, url: str, form: Form) -> None:
        self._fs, self._folder = fsspec.core.url_to_fs(url)
        self._local = "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))
        self._form: Form = form
        self._pending: list[Sample] = []
        self._taking = threading.Lock()
        self._flushing = threading.Lock()
        self._lock_file: io.TextIOWrapper | None = None
        self._next = 0
        self._manifest: dict[str, Any] = {}
        self.done = Done()
        self.created = int(time.time())
        """When the job was first started, Unix seconds."""
        self.notes: dict[str, Any] = {}
        """What `note` was told."""
        self.summary: dict[str, Any] | None = None
        """What `finish` was told, once the job has ended."""

    @classmethod
    def open(cls, url: str, job: Mapping[str, Any], form: Form, *, force: bool = False) -> "SampleStore":
        """The store of `job`, a flat description of all that fixes its output. A folder of the same job is resumed.

        Raises StoreError when the folder holds another job, naming what differs, unless `force` drops that job's
        output; and when another process writes there.
        """
        store = cls(url, form)
        store._fs.makedirs(store._folder, exist_ok=True)
        store._lock()
        if force:
            store.notes = (store._read_manifest() or {}).get("notes", {})
            store._drop()
        known = store._read_manifest()
        wanted = json.loads(_json({**job, "format": form}))
        if known is None:
            if store._shards():
                raise StoreError(f"{url} holds shards but no {MANIFEST}; choose an empty folder")
            store._manifest = {"job": wanted, "created": store.created, "notes": store.notes, "summary": None}
            store._write(MANIFEST, _json(store._manifest))
        else:
            _refuse_other(url, known["job"], wanted)
            store._manifest = known
            store.created, store.notes, store.summary = known["created"], known["notes"], known["summary"]
            store._recover()
        return store

    @classmethod
    def read(cls, url: str) -> "SampleStore":
        """The store at `url` for its `records` alone, also while a job writes there. Raises StoreError."""
        store = cls(url, "parquet")
        if (known := store._read_manifest()) is None:
            raise StoreError(f"{url} has no {MANIFEST}: no batch has written there")
        store._form = known["job"]["format"]
        return store

    def close(self) -> None:
        """Flush, and let others open the folder."""
        self.flush()
        if self._lock_file is not None:
            self._lock_file.close()

    def add(self, sample: Sample) -> None:
        """Take a sample; it is safe after the next `flush`. Raises ValueError for one that is there already."""
        self.done.add(sample.row, sample.index, sample.row_samples, sample.error is not None)
        with self._taking:
            self._pending.append(sample)

    def flush(self) -> None:
        """Write what was added as one shard; returns when it is on disk."""
        with self._flushing:
            with self._taking:
                taken, self._pending = self._pending, []
            if not taken:
                return
            try:
                self._write(f"part-{self._next:08d}.{self._form}", self._encoded(taken))
            except BaseException:
                with self._taking:
                    self._pending = taken + self._pending
                raise
            self._next += 1

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Flush, and note that the job has ended."""
        self.flush()
        self.summary = dict(summary)
        self._update(summary=self.summary)

    def note(self, name: str, value: Any) -> None:
        """Keep a small value beside the job; it is on disk on return. `force` keeps it."""
        self.notes = {**self.notes, name: value}
        self._update(notes=self.notes)

    def _update(self, **values: Any) -> None:
        self._manifest |= values
        self._write(MANIFEST, _json(self._manifest))

    def records(self, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
        """All written samples as plain data, shard by shard, with all columns or these."""
        for name in self._shards():
            yield from self._read(name, columns)

    def has(self, name: str) -> bool:
        """Whether `write_text` has written a file of this name."""
        return bool(self._fs.exists(f"{self._folder}/{name}"))

    def write_text(self, name: str, lines: Iterator[str]) -> None:
        """Write another file into the folder, atomically, line by line."""
        temporary = f"{self._folder}/_{name}.tmp"
        with self._fs.open(temporary, "wb") as stream:
            for line in lines:
                stream.write(line.encode() + b"\n")
            self._sync(stream)
        self._fs.mv(temporary, f"{self._folder}/{name}")

    def _lock(self) -> None:
        if not self._local:
            return
        self._lock_file = open(f"{self._folder}/{_LOCK}", "w")  # noqa: SIM115 - held as long as the store is open
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock_file.close()
            raise StoreError(f"another process is writing to {self._folder}") from error

    def _drop(self) -> None:
        """The manifest goes last: a kill in between leaves a folder that still belongs to the old job."""
        for name in [*self._shards(), *([MANIFEST] if self._fs.exists(f"{self._folder}/{MANIFEST}") else [])]:
            self._fs.rm_file(f"{self._folder}/{name}")

    def _read_manifest(self) -> dict[str, Any] | None:
        try:
            with self._fs.open(f"{self._folder}/{MANIFEST}", "rb") as stream:
                manifest: dict[str, Any] = json.load(stream)
        except FileNotFoundError:
            return None
        return manifest

    def _shards(self) -> list[str]:
        self._fs.invalidate_cache()
        names = (str(path).rpartition("/")[2] for path in self._fs.ls(self._folder, detail=False))
        return sorted(name for name in names if name.startswith("part-"))

    def _recover(self) -> None:
        for name in self._shards():
            for record in self._read(name, _KEYS):
                self.done.add(record["row"], record["index"], record["row_samples"], record["error"] is not None)
            self._next = int(name.removeprefix("part-").partition(".")[0]) + 1

    def _read(self, name: str, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
        with self._fs.open(f"{self._folder}/{name}", "rb") as stream:
            if name.endswith(".jsonl"):
                for record in map(json.loads, stream):
                    yield {name: record[name] for name in columns or record}
            else:
                yield from pq.read_table(stream, columns=columns).to_pylist()

    def _encoded(self, samples: list[Sample]) -> bytes:
        records = [sample.record() for sample in samples]
        if self._form == "jsonl":
            return b"".join(_json(record) + b"\n" for record in records)
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(records, SCHEMA), sink, compression="zstd")
        return sink.getvalue()

    def _write(self, name: str, data: bytes) -> None:
        """Whole or not at all. An object store does that by itself, a disk needs a rename between two syncs."""
        path = f"{self._folder}/{name}"
        if not self._local:
            self._fs.pipe_file(path, data)
            return
        temporary = f"{self._folder}/_{name}.tmp"
        with open(temporary, "wb") as stream:
            stream.write(data)
            self._sync(stream)
        os.rename(temporary, path)
        _sync_folder(self._folder)

    def _sync(self, stream: Any) -> None:
        stream.flush()
        if self._local:
            os.fsync(stream.fileno())


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_other(url: str, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    differing = [name for name in sorted({*known, *wanted}) if known.get(name) != wanted.get(name)]
    if differing:
        raise StoreError(f"{url} holds another job: {', '.join(differing)} changed; --force starts anew and drops it")


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
