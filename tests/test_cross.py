"""Every command answers or refuses whatever cluster, model and size meet in it: a few questions of `tests.tools.cross`,
in which most values meet that can be asked in so short a time.
"""

from __future__ import annotations

import os

from tests.tools.cross import COMMANDS, answered, drawn, pairwise, write_files

QUESTIONS = int(os.environ.get("MESHWRIGHT_QUESTIONS", "80"))
# What takes seconds, and is asked by hand.
LONG = {
    "model": {"deep", "most experts"},
    "size": {"divisible", "most"},
    "load": {"crowd", "long answers", "flood"},
    "plan": {"deep pipeline"},
}
LONG_COMMANDS = {"calibrate", "learn", "explain", "explain serving"}


def test_commands_clusters_models_and_sizes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    quick = [name for name in COMMANDS if name not in LONG_COMMANDS]
    candidates = [
        one
        for one in drawn(8 * QUESTIONS, 1, quick)
        if not any(one.values.get(axis) in values for axis, values in LONG.items())
    ]

    wrong = []
    for question in pairwise(candidates, QUESTIONS):
        _, problems = answered(question, tmp_path)
        wrong += [(question.words(), problem) for problem in problems]

    assert wrong == []
