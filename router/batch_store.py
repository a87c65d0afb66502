"""Batches on disk: what each is and how far it is, who works on it, and whether it is to be cancelled.

Only who holds a batch's lock writes its description; a request to cancel is a file of its own, so that any router may
make one. Called by `router.batches` and `router.batch_executor`; knows neither HTTP nor engines.
"""

import fcntl
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from router.errors import ApiError, Fault
from router.shelf import Shelf, write_whole

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Ending = Literal["completed", "expired", "cancelled"]
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
_ABOUT = "batch.json"
_CANCEL = "cancel"
_LOCK = "lock"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RequestCounts(_Part):
    """Lines of the batch; `completed` have an answer, `failed` have an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputError(_Part):
    """What is wrong with the input, or with one line of it (from 1)."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(_Part):
    object: Literal["list"] = "list"
    data: tuple[InputError, ...]


class Batch(_Part):
    """OpenAI's batch object, and behind it what only the server needs. Times in Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] | None = None

    fingerprint: str
    """Of the model the batch was made for; only a server of that model goes on with it."""
    output_expires_s: int | None = None
    ending: Ending | None = None
    """How the batch will have ended once its files are written."""

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def to(self, status: Status, at: float, **fields: Any) -> Self:
        """The batch in another state since `at`."""
        return self.model_copy(update={"status": status, f"{status}_at": int(at), **fields})

    def public(self) -> dict[str, Any]:
        """OpenAI's object: what is not known is not there."""
        hidden = {"fingerprint", "output_expires_s", "ending"}
        if not self.ended:
            hidden |= {"output_file_id", "error_file_id"}  # fixed, but not written yet
        return self.model_dump(mode="json", exclude_none=True, exclude=hidden)


class BatchStore:
    """The batches under `folder`, which several processes may use at a time, if need be over a shared file system."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self._shelf = Shelf(folder, "batch_", "batch")
        self._now = now
        self._ended: set[str] = set()
        """Batches known to have ended: they change no more."""

    def new_id(self) -> str:
        return self._shelf.new_id()

    def add(self, batch: Batch) -> None:
        """Keep a new batch."""
        with self._shelf.draft() as draft:
            write_whole(draft / _ABOUT, batch.model_dump_json().encode())
            self._shelf.publish(draft, batch.id)

    def save(self, batch: Batch) -> None:
        """Keep the new state of a batch; to be called under its lock alone."""
        write_whole(self._shelf.path(batch.id) / _ABOUT, batch.model_dump_json().encode())

    def load(self, batch_id: str) -> Batch:
        """The batch as it was saved. Raises ApiError (404)."""
        try:
            return Batch.model_validate_json((self._shelf.path(batch_id) / _ABOUT).read_bytes())
        except FileNotFoundError:
            raise self._shelf.missing(batch_id) from None

    def get(self, batch_id: str) -> Batch:
        """The batch as clients see it: one that is to be cancelled is `cancelling` at once. Raises ApiError (404)."""
        batch = self.load(batch_id)
        if batch.status in ("validating", "in_progress") and (at := self.cancel_asked(batch_id)) is not None:
            return batch.to("cancelling", at)
        return batch

    def page(self, *, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Newest first; see `Shelf.page`."""
        return self._shelf.page(self.get, after=after, limit=limit, newest_first=True)

    def ask_cancel(self, batch_id: str) -> Batch:
        """Have a batch cancelled; asking again changes nothing. Raises ApiError: 404, or 409 when it is too late."""
        batch = self.get(batch_id)
        if batch.status in ("validating", "in_progress"):
            write_whole(self._shelf.path(batch_id) / _CANCEL, str(int(self._now())).encode())
            batch = self.get(batch_id)
        if batch.status not in ("cancelling", "cancelled"):
            raise ApiError(Fault.CONFLICT, f"a batch that is {batch.status} cannot be cancelled", "batch_id")
        return batch

    def cancel_asked(self, batch_id: str) -> int | None:
        """Since when the batch is to be cancelled, if it is."""
        try:
            return int((self._shelf.path(batch_id) / _CANCEL).read_text())
        except FileNotFoundError:
            return None

    def unfinished(self) -> list[Batch]:
        """All batches that have not ended, oldest first; those found to have ended lose their samples."""
        found = [self.load(batch_id) for batch_id in self._shelf.ids() if batch_id not in self._ended]
        for batch in found:
            if batch.ended:
                self._ended.add(batch.id)
                shutil.rmtree(self.samples(batch.id), ignore_errors=True)
        return [batch for batch in found if not batch.ended]

    def uses(self, file_id: str) -> bool:
        """Whether a batch that has not ended needs this file."""
        used = ((batch.input_file_id, batch.output_file_id, batch.error_file_id) for batch in self.unfinished())
        return any(file_id in ids for ids in used)

    def samples(self, batch_id: str) -> Path:
        """The folder in which finished samples are kept until the batch ends."""
        return self._shelf.path(batch_id) / "samples"

    def lock(self, batch_id: str) -> IO[bytes] | None:
        """The right to work on a batch until the file is closed, or its holder dies; None when another one has it."""
        stream = (self._shelf.path(batch_id) / _LOCK).open("ab")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.close()
            return None
        return stream
