"""Folders on disk that appear whole or not at all, one per id, listed in the order they were made.

Ids of one shelf sort by the time they were made, so that a page of a list begins where its cursor is, even when that
one is gone. `router.file_store` and `router.batch_store` keep their things on shelves; it knows neither.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from router.errors import ApiError, Fault, clip

T = TypeVar("T")

STALE_S = 86_400.0
"""A draft nobody has touched for so long was left behind by a process that died."""
_DRAFTS = ".drafts"


class Shelf:
    """The entries under `folder`; their ids begin with `prefix`, and errors call them `noun`."""

    def __init__(self, folder: Path, prefix: str, noun: str) -> None:
        self._folder = folder
        self._drafts = folder / _DRAFTS
        self._prefix = prefix
        self._noun = noun
        self._id = re.compile(re.escape(prefix) + "[0-9a-f]{28}")
        self._drafts.mkdir(parents=True, exist_ok=True, mode=0o700)

    def new_id(self) -> str:
        return f"{self._prefix}{time.time_ns():016x}{secrets.token_hex(6)}"

    def path(self, entry_id: str) -> Path:
        """Where an entry of this id is or would be. Raises ApiError (404) for what cannot be an id."""
        if not self._id.fullmatch(entry_id):
            raise self.missing(entry_id)
        return self._folder / entry_id

    def missing(self, entry_id: str) -> ApiError:
        """The error for an entry that is not here."""
        return ApiError(Fault.NOT_FOUND, f"the {self._noun} {clip(entry_id)!r} does not exist", f"{self._noun}_id")

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """A folder to fill and then `publish`; if that does not happen it is removed."""
        folder = self._drafts / secrets.token_hex(12)
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, draft: Path, entry_id: str) -> None:
        """Make a draft the entry of this id, on disk when this returns. An entry that is there already stays."""
        target = self.path(entry_id)
        sync_folder(draft)
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        sync_folder(self._folder)

    def remove(self, entry_id: str) -> bool:
        """Whether the entry was there; from then on it is not, however long it takes to empty it."""
        rubbish = self._drafts / secrets.token_hex(12)
        try:
            self.path(entry_id).rename(rubbish)
        except FileNotFoundError:
            return False
        sync_folder(self._folder)
        shutil.rmtree(rubbish, ignore_errors=True)
        return True

    def sweep(self) -> None:
        """Remove what processes that died have left half made."""
        oldest = time.time() - STALE_S
        for draft in self._drafts.iterdir():
            newest = max((path.stat().st_mtime for path in (draft, *draft.glob("*"))), default=0.0)
            if newest < oldest:
                shutil.rmtree(draft, ignore_errors=True)

    def ids(self, *, newest_first: bool = False) -> list[str]:
        """All ids, in the order the entries were made or the other way round."""
        names = (name for name in os.listdir(self._folder) if self._id.fullmatch(name))
        return sorted(names, reverse=newest_first)

    def page(
        self, load: Callable[[str], T | None], *, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[T], bool]:
        """At most `limit` entries behind the id `after`, and whether more follow. `load` makes None what is left out.

        Raises ApiError naming `after` when it is no id.
        """
        if after is not None and not self._id.fullmatch(after):
            raise ApiError(Fault.INVALID, f"after must be the id of a {self._noun}", "after")
        found: list[T] = []
        for entry_id in self.ids(newest_first=newest_first):
            behind = after is None or (entry_id < after if newest_first else entry_id > after)
            if behind and (entry := load(entry_id)) is not None:
                if len(found) == limit:
                    return found, True
                found.append(entry)
        return found, False


def write_whole(path: Path, data: bytes) -> None:
    """Replace the file at `path`, on disk when this returns; readers see the old or the new one."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with draft.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make what was created and renamed in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
