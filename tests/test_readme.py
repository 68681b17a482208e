"""What the README says is what CI runs and what the program has."""

import re
from pathlib import Path

from planner.cli import main

ROOT = Path(__file__).parents[1]
PACKAGES = ("topology", "simulator", "planner", "executor", "ui")
README = (ROOT / "README.md").read_text()


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
    """Each `planner X` of the README answers --help."""
    named = set(re.findall(r"^planner (\w+)", README, re.MULTILINE))

    assert {"suggest", "estimate", "probe", "validate", "collective"} <= named
    for command in sorted(named):
        assert main([command, "--help"]) == 0, command
        assert f"planner {command}" in capsys.readouterr().out


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if "://" not in target:
            assert (ROOT / target).exists(), target


CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def test_contributing_names_what_is_there() -> None:
    """Whoever adds something follows these names: each is a file or a folder of ours, whole or by the end of its path."""
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
