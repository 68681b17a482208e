"""One launch for all workers of `pytest -n`: tests of a file may be dealt out, what they ask about is made once."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 600.0


def made_once(tmp_path_factory, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder `name` that `make` has filled, here or in another worker. Raises what `make` raises,
    anywhere.
    """
    folder = tmp_path_factory.getbasetemp() / name
    ended = folder / "ended"
    try:
        folder.mkdir()
    except FileExistsError:
        until = time.monotonic() + PATIENCE_S
        while not ended.is_file():
            assert time.monotonic() < until, f"another worker has not come back from {name}"
            time.sleep(0.2)
        assert not ended.read_text(), ended.read_text()
        return folder
    said = "the launch was cut short"
    try:
        make(folder)
        said = ""
    except BaseException as error:
        said = str(error) or type(error).__name__
        raise
    finally:
        ended.with_suffix(".part").write_text(said)
        ended.with_suffix(".part").replace(ended)
    return folder
