"""What reading an input must never do: start a process, reach the network, unpickle, or write outside its folder."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "pickle.find_class",
    "ctypes.dlopen",
    "os.remove",
    "os.rmdir",
    "shutil.rmtree",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_watched: list[
    tuple[int, Path, list[str]]
] = []  # the thread that reads, the folder that may be written to, what was seen


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched:
        return
    reader, folder, seen = _watched[-1]
    if event in FORBIDDEN and not (event == "os.remove" and _inside(arguments[0], folder)):
        seen.append(f"{event} {arguments!r:.200}")
    elif (
        event == "open"
        and reader == threading.get_ident()  # other tests leave threads that write to their own folders
        and isinstance(arguments[2], int)
        and arguments[2] & WRITING
        and not _inside(arguments[0], folder)
    ):
        seen.append(f"open for writing {arguments[0]!r:.200}")


def _inside(path: object, folder: Path) -> bool:
    """Return whether a file may be written: in the folder, a null device, or what Python keeps of an imported
    module.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        return True  # a file that is open already
    place = Path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 - as it was named, links included
    compiled = "__pycache__" in place.parts or (sys.pycache_prefix and place.is_relative_to(sys.pycache_prefix))
    return place.is_relative_to(folder) or place == Path(os.devnull) or bool(compiled)


sys.addaudithook(_hook)


@contextmanager
def watching(folder: Path) -> Iterator[list[str]]:
    """Collect what is forbidden and done meanwhile; `folder` may be written to."""
    seen: list[str] = []
    _watched.append((threading.get_ident(), folder.absolute(), seen))
    try:
        yield seen
    finally:
        _watched.pop()
