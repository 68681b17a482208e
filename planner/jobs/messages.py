"""Objects over a pipe between a server and its worker process, as `multiprocessing` sends them: both ends are this
program.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import IO, Any


def send(pipe: IO[bytes], message: object) -> None:
    """Write one object. Raises OSError when nobody reads."""
    with Connection(os.dup(pipe.fileno()), readable=False) as connection:
        connection.send(message)


def receive(pipe: IO[bytes]) -> Any:
    """Wait for one object. Raises EOFError when the other end is closed."""
    with Connection(os.dup(pipe.fileno()), writable=False) as connection:
        return connection.recv()
