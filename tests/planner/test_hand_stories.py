"""Answers against what a person works out by hand: the stories of examples/answers.md."""

import json
import shlex

import pytest

from tests.bench.hand_stories import STORIES

# In the gate: one each of state, links, a pipeline and a loss. The rest takes seconds each.
GATE = {
    "How many GPUs hold a 70B model's state?",
    "What does tensor parallelism cost without NVLink?",
    "How long is a pipeline idle?",
    "Six GiB over: where do they come from?",
}


@pytest.mark.parametrize(
    "story",
    [pytest.param(one, id=one.title, marks=() if one.title in GATE else pytest.mark.nightly) for one in STORIES],
)
def test_the_answer_is_what_a_calculation_by_hand_gives(planner, story) -> None:
    done = planner(*shlex.split(story.flags), "--json")

    assert done.returncode == 0, done.stderr
    assert story.said(json.loads(done.stdout)) == pytest.approx(story.by_hand, rel=story.within)
