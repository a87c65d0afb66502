"""Uploaded files and the files batches make, on disk: content and description appear and vanish together.

Several processes may use one folder at a time, if need be over a shared file system. Called by `router.files` and
`router.batch_executor`; knows nothing of HTTP but the errors it raises.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from router.errors import ApiError, Fault
from router.shelf import Shelf, write_whole

Purpose = Literal["batch", "batch_output"]
BATCH_FILE_S = 30 * 86_400
"""Uploads for batches live so long unless the client says otherwise; files that batches make stay."""
_ABOUT = "about.json"
_CONTENT = "content"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """What is known of a file beside its content. Times in Unix seconds, size in bytes."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    expires_at: int | None

    def public(self) -> dict[str, Any]:
        """OpenAI's file object."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {**known, "object": "file", "status": "processed"}


class FileStore:
    """The files under `folder`, each at most `max_bytes` long. An expired file is not there any more."""

    def __init__(self, folder: Path, max_bytes: int, now: Callable[[], float] = time.time) -> None:
        self._shelf = Shelf(folder, "file-", "file")
        self._max_bytes = max_bytes
        self._now = now

    def new_id(self) -> str:
        return self._shelf.new_id()

    def upload(self, chunks: Iterable[bytes], filename: str, expires_s: int | None) -> StoredFile:
        """Keep a client's input of a batch. Raises ApiError (413) when it is too long."""
        return self._create(self.new_id(), self._bounded(chunks), filename, "batch", expires_s or BATCH_FILE_S)

    def keep_output(self, file_id: str, chunks: Iterable[bytes], filename: str, expires_s: int | None) -> StoredFile:
        """Keep what a batch has made, under an id of `new_id`; a file that has this id already stays."""
        return self._create(file_id, chunks, filename, "batch_output", expires_s)

    def get(self, file_id: str) -> StoredFile:
        """Raises ApiError (404) when there is no such file, or no longer."""
        if (found := self._load(file_id)) is None:
            raise self._shelf.missing(file_id)
        return found

    def content(self, file_id: str) -> Path:
        """Where the bytes of a file lie, also of an expired one until it is swept away."""
        return self._shelf.path(file_id) / _CONTENT

    def page(
        self, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[StoredFile], bool]:
        """See `Shelf.page`."""

        def load(file_id: str) -> StoredFile | None:
            found = self._load(file_id)
            return found if found is not None and purpose in (None, found.purpose) else None

        return self._shelf.page(load, after=after, limit=limit, newest_first=newest_first)

    def delete(self, file_id: str) -> None:
        """Raises ApiError (404) when there is no such file, or no longer."""
        self.get(file_id)
        if not self._shelf.remove(file_id):
            raise self._shelf.missing(file_id)

    def sweep(self, in_use: Callable[[str], bool]) -> None:
        """Free the disk of expired files, but for those in use."""
        self._shelf.sweep()
        for file_id in self._shelf.ids():
            if self._load(file_id) is None and not in_use(file_id):
                self._shelf.remove(file_id)

    def _create(
        self, file_id: str, chunks: Iterable[bytes], filename: str, purpose: Purpose, expires_s: int | None
    ) -> StoredFile:
        created = int(self._now())
        with self._shelf.draft() as draft:
            stored = StoredFile(
                id=file_id,
                bytes=_write(draft / _CONTENT, chunks),
                created_at=created,
                filename=filename,
                purpose=purpose,
                expires_at=None if expires_s is None else created + expires_s,
            )
            write_whole(draft / _ABOUT, json.dumps(asdict(stored)).encode())
            self._shelf.publish(draft, file_id)
        return stored

    def _load(self, file_id: str) -> StoredFile | None:
        """None for a file that is not there, or no longer."""
        try:
            about = json.loads((self._shelf.path(file_id) / _ABOUT).read_bytes())
        except FileNotFoundError:
            return None
        found = StoredFile(**about)
        return found if found.expires_at is None or self._now() < found.expires_at else None

    def _bounded(self, chunks: Iterable[bytes]) -> Iterable[bytes]:
        size = 0
        for chunk in chunks:
            size += len(chunk)
            if size > self._max_bytes:
                raise ApiError(Fault.BODY_TOO_LARGE, f"file is larger than {self._max_bytes} bytes", "file")
            yield chunk


def _write(path: Path, chunks: Iterable[bytes]) -> int:
    """The number of bytes, all of them on disk."""
    with path.open("xb") as stream:
        stream.writelines(chunks)
        stream.flush()
        os.fsync(stream.fileno())
        return stream.tell()
