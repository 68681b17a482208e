"""What mkdocs adds to the pages of this folder: the repository's own documents, and pages made from the code.

Every page has its path in the repository, so that a link that works there works on the site, and the other way round.
Pages of commands are made from their `--help`, the page of the Python API from signatures and docstrings: they cannot
differ from the code.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import planner
from planner.cli import COMMANDS, app
from topology import errors

ROOT = Path(__file__).parents[2]
PAGES = Path("examples/site/pages")


def on_config(config: Any) -> None:
    """Put a page for each command into the navigation."""
    commands = next(entry["Commands"] for entry in config.nav if "Commands" in entry)
    commands += [{name: f"commands/{name}.md"} for name in COMMANDS]


def on_files(files: Files, config: Any) -> Files:
    """Add the repository's documents, what they link to, and the pages made from the code."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    linked = {target for document in documents for target in _linked(document)}
    for path in sorted({*documents, *linked}):
        files.append(_file(path.relative_to(ROOT), config))
    for page in files.documentation_pages():
        if page.src_dir == config.docs_dir:  # it is there by its path in the repository
            files.remove(page)
    examples = (ROOT / PAGES / "commands.md").read_text()
    for name in COMMANDS:
        files.append(File.generated(config, f"commands/{name}.md", content=command_page(name, examples)))
    files.append(File.generated(config, "python.md", content=python_page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the answer below each command in a block marked `planner`."""
    return re.sub(r"^```planner\n(.*?)```$", _answered, markdown, flags=re.DOTALL | re.MULTILINE)


def _answered(block: re.Match[str]) -> str:
    words = shlex.split(block[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1"}
    command = [sys.executable, "-m", *words]
    run = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    lines = [line.rstrip() for line in run.stdout.splitlines()]
    return "\n".join(["```console", f"$ {block[1].strip()}", *lines, "```"])


def _file(path: Path, config: Any) -> File:
    """Return a file of the repository; pages of this site lie at the top of it."""
    uri = None
    if path.parent == PAGES:
        uri = f"{path.stem}/index.html"
    return File(path.as_posix(), str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=uri)


def _linked(document: Path) -> set[Path]:
    """Return the files next to documents, such as pictures, that a document links to."""
    targets = re.findall(r"\]\(([^)#:\s]+)\)", document.read_text())
    paths = {(document.parent / target).resolve() for target in targets if not target.endswith(".md")}
    return {path for path in paths if path.is_file() and path.is_relative_to(ROOT)}


def command_page(name: str, examples: str) -> str:
    """Return the page of a command: its help, its options, and the lines of `examples` that use it."""
    root = app.context_class(app, info_name="planner")
    command = app.get_command(root, name)
    context = command.context_class(command, info_name=name, parent=root)
    lines = [line for line in examples.splitlines() if re.match(rf"planner (--server \S+ )?{name}\b", line)]
    parts = [f"# planner {name}", command.help, _code(context.command.get_usage(context)), _code("\n".join(lines))]
    for kind, title in (("argument", "Arguments"), ("option", "Options")):
        params = [param for param in command.get_params(context) if param.param_type_name == kind]
        rows = [record for param in params if (record := param.get_help_record(context))]
        if rows:
            parts += [f"## {title}", "\n".join(["| | |", "|---|---|", *(_row(*record) for record in rows)])]
    return "\n\n".join(part for part in parts if part)


def _row(name: str, meaning: str) -> str:
    # A bar inside a cell would end it, in code spans too.
    name, meaning = (text.replace("|", "&#124;").replace("<", "&lt;").replace(">", "&gt;") for text in (name, meaning))
    return f"| <code>{name}</code> | {meaning.replace('*', '&#42;')} |"


def _code(text: str) -> str:
    return f"```\n{text}\n```" if text else ""


def python_page() -> str:
    """Return the page of the Python API: what `planner` offers, and the exceptions it raises."""
    parts = ["# Python", prose(planner.__doc__ or "")]
    for name in planner.__all__:
        parts += [f"## {name}", _member(getattr(planner, name))]
    parts += ["## Exceptions", "All are in `topology.errors`, and a command that ends with one has its exit code."]
    return "\n\n".join([*parts, prose(errors.__doc__ or "")])


def _member(member: Any) -> str:
    try:
        signature = re.sub(r"(: |-> )'([^']+)'", r"\1\2", str(inspect.signature(member)))
    except (TypeError, ValueError):  # a value, such as a type alias, is not called
        signature = ""
    if len(signature) > 80:  # one parameter a line
        before, arrow, result = signature.rpartition(" -> ")
        inside = re.sub(r", (?=[*\w]+(?:[:=,]|$))", ",\n    ", (before or result)[1:-1])
        signature = f"(\n    {inside},\n){arrow}{result if before else ''}"
    text = f"```python\n{member.__name__}{signature}\n```" if signature else ""
    return f"{text}\n\n{prose(inspect.getdoc(member) or '')}"


def prose(text: str) -> str:
    """Return a docstring as Markdown: paragraphs that are interpreter sessions become code."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return "\n\n".join(
        f"```pycon\n{textwrap.dedent(paragraph)}\n```" if paragraph.lstrip().startswith(">>>") else paragraph
        for paragraph in paragraphs
    )
