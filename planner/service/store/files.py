"""Files on disk by the digest of their content: what was sent, and what jobs wrote."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path

from topology.errors import PlannerError


class Files:
    """The folder of files by SHA-256. A file appears under its name complete, or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / sha256

    def add_text(self, text: str) -> str:
        """Keep a text and return its digest. Raises PlannerError if it cannot be written."""
        return self._add(text.encode(), hashlib.sha256(text.encode()).hexdigest())

    def add_file(self, source: Path) -> str:
        """Keep a file and return its digest; it shares its disk space with `source` where the disk can."""
        with source.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return self._add(source, sha256)

    def read_text(self, sha256: str) -> str:
        """Return a stored text. Raises PlannerError if it is missing."""
        try:
            return self.path(sha256).read_text(encoding="utf-8")
        except OSError as error:
            raise PlannerError("a file of this job is gone", why=str(error), remedy="ask again") from error

    def forget(self, older_s: float) -> None:
        """Delete files that were last added more than `older_s` seconds ago."""
        for path in self._folder.glob("*/*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > older_s:
                    path.unlink()

    def _add(self, source: bytes | Path, sha256: str) -> str:
        target = self.path(sha256)
        with suppress(OSError):
            os.utime(target)  # updates its time, for `forget`
            return sha256
        temporary = target.with_name(f".{uuid.uuid4().hex}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, bytes):
                with temporary.open("xb") as file:
                    file.write(source)
                    file.flush()
                    os.fsync(file.fileno())
            else:
                try:
                    os.link(source, temporary)
                except OSError:
                    shutil.copyfile(source, temporary)
            temporary.replace(target)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise PlannerError(
                "the service cannot keep a file", why=error.strerror or str(error), remedy="free the disk"
            ) from error
        return sha256
