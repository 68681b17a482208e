"""What the README says is what CI runs and what the program has."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from planner.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
PACKAGES = ("topology", "simulator", "planner", "executor", "ui")
README = (ROOT / "README.md").read_text()
PAGES = {path.stem: path.read_text() for path in (ROOT / "examples" / "site" / "pages").glob("*.md")}


def commands() -> list[str]:
    return re.findall(r"^python3 -m venv \.venv && .*$", README, re.MULTILINE)


def test_two_commands_set_everything_up() -> None:
    main, tests = commands()

    assert main.endswith(".venv/bin/planner suggest")
    assert "pytest" in tests


def test_ci_runs_the_readmes_test_command() -> None:
    """Word for word, but for where the environment lies."""
    _, tests = commands()
    gate = (ROOT / ".ci" / "run").read_text()
    ours = (
        tests.replace(".venv/bin", '"$venv/bin').replace("/pip install", '/pip" install').replace("/pytest", '/pytest"')
    )
    ours = ours.replace("venv .venv", 'venv "$venv"')

    assert ours in gate


def test_every_command_named_exists(capsys) -> None:
    """Each `planner X` of the README and of the documentation answers --help, and takes the options that are shown."""
    lines = re.findall(r"^planner .*$", "\n".join([README, *PAGES.values()]), re.MULTILINE)
    shown = [shlex.split(re.sub(r"^planner( --server \S+)?", "", line), comments=True) for line in lines]

    assert {"suggest", "estimate", "probe", "doctor", "check", "export"} <= {command for command, *_ in shown}
    for command, *words in shown:
        assert main([command, "--help"]) == 0, command
        text = capsys.readouterr().out
        assert f"planner {command}" in text
        assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[\w-]+", text)), words


def test_the_documentation_shows_every_command() -> None:
    assert set(re.findall(r"^planner (\w+)", PAGES["commands"], re.MULTILINE)) == set(COMMANDS)


DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md"), *(ROOT / ".github").rglob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def test_contributing_names_what_is_there() -> None:
    """Whoever adds something follows these names: each is a file or a folder of ours, whole or by the end of its
    path.
    """
    named = re.findall(r"`([\w./-]+(?:\.(?:py|toml|json|md)|/))`", CONTRIBUTING.read_text())
    ours = [
        path.relative_to(ROOT) for package in (*PACKAGES, "tests", "examples") for path in (ROOT / package).rglob("*")
    ]
    tails = {"/".join(path.parts[-depth:]) for path in ours for depth in range(1, len(path.parts) + 1)}

    missing = [name for name in named if name.rstrip("/") not in tails and not (ROOT / name).exists()]
    assert len(named) > 100
    assert [
        name for name in missing if name not in {"config.json", "simulator/runtimes/NAME.toml"}
    ] == []  # the asker's own


def test_contributing_has_a_line_for_every_folder() -> None:
    text = CONTRIBUTING.read_text()
    for package in PACKAGES:
        start = text.index(f"| `{package}/`")
        end = text.find("\n\n", start)
        listed = re.findall(r"^\| `(\w+)/` \|", text[start:end], flags=re.MULTILINE)
        folders = [path.parent.name for path in (ROOT / package).glob("*/*.py")]

        assert sorted(listed) == sorted(set(folders)), package


def test_the_version_is_one() -> None:
    """Of the package, of its citation, and of the newest release in the changelog."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    released = re.findall(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert [version] == cited == released[:1]
