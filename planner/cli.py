"""The `planner` command: the registered commands, and the text and exit code for every way of ending.

A command is a request (`planner.requests`), whose flags the command line has, and a function of its name in
`planner.commands` that answers it. Both are imported only when the command is used, so that `planner --help` is fast.
Results go to standard output, progress and warnings to standard error.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

import click

from planner.io.interrupts import EXIT_CODE as INTERRUPTED
from planner.io.interrupts import raise_again
from planner.io.printable import printable
from planner.io.version import version
from topology.errors import PlannerError, UserError, shortened
from topology.time_limit import command

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
    1  failed, unhealthy, or the plan is stale
    2  usage error; unreadable or invalid input
    3  valid question without a legal or fitting answer
    4  ran, but outside the tolerance
    5  no answer within --time-limit: nothing found yet, nothing ruled out
  130  interrupted

Set MESHWRIGHT_DEBUG=1 for tracebacks, NO_COLOR=1 for plain text.
"""

# The lines of `planner --help`, in order.
COMMANDS = {
    "suggest": "Rank the legal plans for one training step.",
    "estimate": "Predict step time and memory of one plan, if it is legal.",
    "explain": "Show where a plan's time and memory go, and why others lost.",
    "compare": "Compare two plans term by term.",
    "validate": "Compare predictions with measured runs, row by row.",
    "learn": "Learn a runtime's own costs from measured runs.",
    "trace": "Simulate one step, and write a timeline of it.",
    "probe": "Read the GPUs, links and NICs of a machine, or of captured texts.",
    "doctor": "Compare a machine with its datasheet, and say what is wrong.",
    "tune": "Run the plans that could be best, until one surely is.",
    "apply": "Run a plan on this machine, and compare with its prediction.",
    "report": "Show a run: predicted against measured, term by term.",
    "runs": "List the runs that planner apply made.",
    "export": "Write a plan as configuration of the tool that will run it.",
    "check": "Check another tool's configuration, and improve it.",
    "collective": "Predict collectives, or score predictions against tables.",
    "shard": "Choose how the tensors of a graph are sharded.",
    "calibrate": "Measure operators, collectives and layers of this machine.",
    "ui": "Explore clusters, plans and runs in a browser.",
    "service": "Answer questions and start runs for others over HTTP.",
}


class _OnDemand(click.Group):
    """Imports the module of a command when that command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands or ctx.params.get("server"):
            dispatch = import_module("planner.commands.dispatch")
            self.commands[cmd_name] = dispatch.command_of(cmd_name, ctx.params.get("server"))
        raise_again()
        return self.commands[cmd_name]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - as above
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` begin with. Names near an unknown one are suggested."""
        if args and args[0] not in COMMANDS and (near := get_close_matches(args[0], COMMANDS)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {', '.join(map(repr, near))}?")
        return super().resolve_command(ctx, args)


# Error codes of a system without room for the output.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
# Error codes for files that this user may not use.
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}


def _show_version(ctx: click.Context, _option: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"planner (meshwright) {version()}")
        ctx.exit()


app = _OnDemand(
    "planner",
    help=HELP,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},  # as of commands
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            expose_value=False,
            callback=_show_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
        click.Option(["--server"], metavar="URL", help="Let a service answer (planner service)."),
    ],
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code. Never raises. If the reader closes the pipe, the code is 0."""
    _open_closed_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _refuse_undecodable(words)
        with command():
            code = _run(words)
        sys.stdout.flush()
    except PlannerError as error:
        _say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return 0
    except OSError as error:
        return _unwritable(error)
    except Exception as error:  # noqa: BLE001 - the last resort: one line for people, the traceback on request
        return _last_resort(error)
    if code == INTERRUPTED:
        _say("interrupted")
    return code


def _run(words: list[str]) -> int:
    """Run a command; return the exit code it ended with."""
    try:
        with app.make_context("planner", words) as context:
            app.invoke(context)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    return 0


def _refuse_undecodable(words: list[str]) -> None:
    """Raise UserError for arguments that are not valid text: reports and JSON that name such a file could not be
    written.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{word!a} is not text", why="its bytes are not UTF-8", remedy="give the file another name"
            ) from error


def _unwritable(error: OSError) -> int:
    """Print an error of the system that is not the program's fault; return the exit code."""
    if error.errno == errno.ENAMETOOLONG:
        _say(f"error: {str(error.filename)[:40]}... is no file name\n  why: {error.strerror}")
        return 2
    if error.errno in _NOT_ALLOWED and error.filename:
        _say(
            f"error: cannot use {shortened(str(error.filename))}\n  why: {error.strerror}\n"
            "  do: allow this user to read and write it; a file among the user's data moves with XDG_DATA_HOME"
        )
        return 2
    if error.errno not in _NO_ROOM:
        return _last_resort(error)
    _silence_stdout()
    _say(
        f"error: cannot write {error.filename or 'the answer'}\n  why: {error.strerror}\n"
        "  do: free some space, or write elsewhere"
    )
    return 1


def _last_resort(error: Exception) -> int:
    if isinstance(error, click.ClickException):  # errors in the command line
        error.message = shortened(error.message)  # type: ignore[misc]  # what it shows
        error.show()
        return error.exit_code
    if os.environ.get("MESHWRIGHT_DEBUG") == "1":
        traceback.print_exc()
    _say(
        f"internal error: {type(error).__name__}: {shortened(str(error))}; please report it with the command line"
        " (MESHWRIGHT_DEBUG=1 shows where)"
    )
    return 1


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr)


def _open_closed_streams() -> None:
    """Give a process without standard output or error a place to write to."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open for good


def _silence_stdout() -> None:
    """Point standard output at nothing, so that the interpreter's last flush cannot print an error."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # a stream without a descriptor, as in tests
        return


if __name__ == "__main__":
    sys.exit(main())
