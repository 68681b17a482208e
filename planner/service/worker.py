"""What worker processes of the service have imported, and what they do (`planner.jobs.fork_server`)."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path

from planner.cli import main as run_planner
from planner.io.output import progress_to
from planner.jobs.fork_server import ONE_THREAD
from planner.jobs.worker import Progress

MAX_ANSWER = 64 << 20  # characters
MAX_SAID = 64 << 10


def run_command(progress: Progress, arguments: list[str], folder: str, data_folder: str | None) -> tuple[int, str, str]:
    """Run `planner` with these arguments in a folder. `data_folder` is where runs are kept; None is the user's own.

    Returns the exit code, the text on standard output, and that on standard error.
    """
    answer, said = StringIO(), StringIO()
    with _placed(Path(folder), data_folder), redirect_stdout(answer), redirect_stderr(said), progress_to(progress):
        code = run_planner(arguments)
    text = answer.getvalue()
    if len(text) > MAX_ANSWER:
        return 1, "", f"error: the answer has {len(text):,} characters, and {MAX_ANSWER:,} are kept"
    return code, text, said.getvalue()[-MAX_SAID:]


@contextmanager
def _placed(folder: Path, data_folder: str | None) -> Iterator[None]:
    """Work in `folder` inside, with nothing on standard input."""
    before, stdin, environment = Path.cwd(), sys.stdin, dict(os.environ)
    os.chdir(folder)
    sys.stdin = StringIO()
    for name in ONE_THREAD:
        os.environ.pop(name, None)  # set for this process already; its children get their own
    if data_folder is not None:
        os.environ["XDG_DATA_HOME"] = data_folder
    try:
        yield
    finally:
        sys.stdin = stdin
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(before)


ASKED_MOST = ("suggest", "estimate")

for name in ASKED_MOST:
    import_module(f"planner.commands.{name}")

WORK = {"command": run_command}
