"""Draws the README's picture: the real output of a command as an SVG, so that it can be looked at without running it.

Run as `python tests/bench/readme_picture.py examples/suggest.svg planner suggest --model llama3-70b ...`.
"""

import argparse
import io
import subprocess
import sys

from rich.console import Console
from rich.text import Text

WIDTH = 128


def main(target: str, command: list[str]) -> None:
    """Run `command` (its first word may be `planner`) and save what it prints to `target`."""
    argv = [sys.executable, "-m", "planner", *command[1:]] if command[0] == "planner" else command
    run = subprocess.run(argv, capture_output=True, text=True, check=True, env={"COLUMNS": str(WIDTH), "PATH": ""})
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ {' '.join(command)}\n", style="bold"))
    console.print(Text(run.stdout.rstrip()))
    console.save_svg(target, title="meshwright")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="an SVG file")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run")
    options = parser.parse_args()
    main(options.target, options.command)
