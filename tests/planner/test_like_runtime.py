"""A runtime that is `like` another has what the other has: its rules, its calibration, its trials and its exports."""

import json
from pathlib import Path

import pytest

from simulator.legality import frameworks
from simulator.runtimes import library

ROOT = Path(__file__).resolve().parents[2]
FORK = {"like": "torchtitan", "names": ["titan-fork"]}
CACHED = (library._files, library._read, library.runtime_spec, frameworks._of_description)
OF_ONE = ("--model", "llama3.2-1b", "--cluster", "h200x4", "--global-batch", "4", "--gpus", "1")
ASKED = (*OF_ONE[:-1], "2")
SEARCHED = ("--micro-batch", "1", "--pp", "1")


@pytest.fixture(autouse=True)
def fork(monkeypatch):
    """Describe a runtime of another name that says nothing but what it is like."""
    files, load = library._files(), library._load_toml
    with monkeypatch.context() as patched:
        patched.setattr(library, "_load_toml", lambda file: dict(FORK) if file == "titan-fork" else load(file))
        patched.setattr(library, "_files", lambda: (*files, "titan-fork"))
        for cached in CACHED[1:]:
            cached.cache_clear()
        yield
    for cached in CACHED[1:]:
        cached.cache_clear()


def both(planner, *words, exit_code=0):
    """Return what a command prints for torchtitan and for the fork, with the fork's name put back."""
    texts = []
    for name in ("torchtitan", "titan-fork"):
        done = planner(*(word.replace("NAME", name) for word in words))
        assert done.returncode == exit_code, done.stderr
        texts.append(done.stdout)
    return texts


def without(text: str, *names: str):
    """Return a JSON answer with one name for both runtimes, and without what is not asked of it."""
    document = json.loads(text.replace("titan-fork", "torchtitan").replace("torchtitan 0.3", "torchtitan"))
    return {key: value for key, value in document.items() if key not in names}


def ranges_aside(document):
    """Return a document without ranges, and without the line that says how wide they are."""
    if isinstance(document, dict):
        return {key: ranges_aside(value) for key, value in document.items() if key not in {"low", "high"}}
    if isinstance(document, list):
        return [ranges_aside(value) for value in document if not str(value).startswith("ranges of steps")]
    return document


def test_plans_cost_the_same_with_what_was_measured_of_the_other(planner, tmp_path) -> None:
    """With a few samples of each kind."""
    whole = json.loads((ROOT / "examples" / "profiles" / "h200x4.json").read_text())
    few = {key: value[:12] if isinstance(value, list) else value for key, value in whole.items()}
    (tmp_path / "few.json").write_text(json.dumps(few))
    profile = ("--profile", str(tmp_path / "few.json"))
    words = ("estimate", *ASKED, *profile, "--dp-shard", "2", "--runtime", "NAME", "--json")
    first, second = map(json.loads, both(planner, *words))

    assert second["legal"]
    assert ranges_aside(second["estimate"]) == ranges_aside(first["estimate"])
    narrow, wide = (document["estimate"]["step_s"] for document in (first, second))
    assert wide["low"] < narrow["low"] < narrow["high"] < wide["high"]  # no step of the fork was ever measured
    unmeasured = json.loads(both(planner, *(w for w in words if w not in profile))[1])
    assert second["estimate"]["step_s"] != unmeasured["estimate"]["step_s"]


def test_a_search_lists_the_same_plans(planner, tmp_path) -> None:
    words = ("suggest", *ASKED, *SEARCHED, "--framework", "NAME", "--json")
    first, second = (without(text, "search") for text in both(planner, *words))

    assert ranges_aside(second) == ranges_aside(first)


def test_a_calibration_measures_the_same(planner) -> None:
    first, second = both(
        planner, "calibrate", "--dry-run", "--cluster", "h200x4", "--gpus", "1", "--runtime", "NAME", "--no-store"
    )

    assert "layers of titan-fork" in second
    assert [line.replace("titan-fork", "torchtitan") for line in second.splitlines()] == first.splitlines()


def test_a_tuning_makes_the_same_trials(planner, tmp_path) -> None:
    place = str(tmp_path / "NAME" / "state.json")
    for name in ("torchtitan", "titan-fork"):
        (tmp_path / name).mkdir()
    both(planner, "tune", *OF_ONE, "--framework", "NAME", "--launcher", "slurm", "--state", place, "--json")
    first, second = (
        {path.name: path.read_text().replace("titan-fork", "torchtitan") for path in Path(tmp_path / name).iterdir()}
        for name in ("torchtitan", "titan-fork")
    )

    assert first.keys() == second.keys()
    assert len(first) > 1


def test_it_is_exported_as_the_other(planner, tmp_path) -> None:
    plan = str(tmp_path / "NAME.json")
    both(planner, "suggest", *ASKED, *SEARCHED, "--framework", "NAME", "--tp", "2", "--out", plan)
    for target in ("NAME", "torchtitan@0.2.2", "torchtitan@0.3.0", "slurm", "skypilot"):
        first, second = (
            without(text, "plan_hash", "text") for text in both(planner, "export", plan, "--to", target, "--json")
        )

        assert second == first
