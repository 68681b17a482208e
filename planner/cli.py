"""The `planner` command: what is registered, and how every way of ending becomes text and an exit code.

Commands live one a file in `planner.commands`; they import what they need when they run, so that `--help` costs only
typer. Results go to standard output, progress and warnings to standard error.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from planner.commands.apply import apply
from planner.commands.calibrate import calibrate
from planner.commands.collective import collective
from planner.commands.compare import compare
from planner.commands.doctor import doctor
from planner.commands.estimate import estimate
from planner.commands.explain import explain
from planner.commands.export import export
from planner.commands.probe import probe
from planner.commands.report import report
from planner.commands.runs import runs
from planner.commands.shard import shard
from planner.commands.suggest import suggest
from planner.commands.trace import trace
from planner.commands.ui import ui
from planner.commands.validate import validate
from topology.errors import PlannerError

HELP = """Plan multi-GPU training: probe the machine, predict every plan, choose one and say why.

Without a GPU, driver or network, `planner suggest` answers from datasheets.
"""

# The marker \b keeps the formatter from joining the lines that follow.
EPILOG = """\b
Units: memory is in GiB (2^30 bytes), link rates in decimal GB/s (10^9 bytes/s, per direction), times in seconds.
JSON (--json) holds bytes, bytes per second and seconds, and a schema_version.

\b
Exit codes:
    0  answered
    1  failed, unhealthy, or a plan gone stale
    2  usage error; unreadable or invalid input
    3  valid question without a legal or fitting answer
    4  ran, but outside the tolerance
  130  interrupted

Set MESHWRIGHT_DEBUG=1 for tracebacks, NO_COLOR=1 for plain text.
"""

app = typer.Typer(
    name="planner",
    help=HELP,
    epilog=EPILOG,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("suggest")(suggest)
app.command("estimate")(estimate)
app.command("explain")(explain)
app.command("compare")(compare)
app.command("validate")(validate)
app.command("trace")(trace)
app.command("probe")(probe)
app.command("doctor")(doctor)
app.command("apply")(apply)
app.command("report")(report)
app.command("runs")(runs)
app.command("export")(export)
app.command("collective")(collective)
app.command("shard")(shard)
app.command("calibrate")(calibrate)
app.command("ui")(ui)


def _show_version(value: bool) -> None:
    if value:
        from planner.version import version  # noqa: PLC0415 - importlib.metadata is slow to import

        typer.echo(f"planner (meshwright) {version()}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hold the options of the program itself; the help text is the module's HELP."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code. Never raises."""
    try:
        code = app(args=argv, prog_name="planner", standalone_mode=False)
        sys.stdout.flush()
    except PlannerError as error:
        _say(f"error: {error}")
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return 1
    except SystemExit as stop:  # raised by the argument parser when a pipe breaks
        _silence_stdout()
        return stop.code if isinstance(stop.code, int) else 1
    except Exception as error:  # noqa: BLE001 - the last resort: one line for people, the traceback on request
        return _last_resort(error)
    return code if isinstance(code, int) else 0


def _last_resort(error: Exception) -> int:
    # Usage errors of the argument parser know how to show themselves; their class is private to typer.
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if callable(show) and isinstance(code, int):
        show()
        return code
    if os.environ.get("MESHWRIGHT_DEBUG") == "1":
        import traceback  # noqa: PLC0415 - only for debugging

        traceback.print_exc()
    _say(
        f"internal error: {type(error).__name__}: {error}; please report it with the command line"
        " (MESHWRIGHT_DEBUG=1 shows where)"
    )
    return 1


def _say(text: str) -> None:
    from planner.output import printable  # noqa: PLC0415 - after argument parsing

    print(printable(text), file=sys.stderr)


def _silence_stdout() -> None:
    """Point standard output at nothing, so that the interpreter's last flush cannot fail aloud."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # a stream without a descriptor, as in tests
        return
