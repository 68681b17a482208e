"""A search that forks has the answer of one that does not."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

from planner.question.question import question_of
from planner.search.plan_space.candidates import Bounds
from planner.search.search import SearchOptions, suggest
from simulator.config.workload import Workload
from tests.planner.conftest import TINY, make_cluster
from topology import cores


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")
def test_a_search_on_several_cores_finds_what_one_core_does(monkeypatch) -> None:
    question = question_of(
        TINY, make_cluster(1, 8), Workload(seq_len=512, global_batch_size=8), framework="torchtitan", gpus=8
    )
    options = SearchOptions(bounds=Bounds(stated={"pp": ((4, 4),)}))
    started: list[int] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: started.append(pid := fork()) or pid)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(cores, "WORTH_S", 0.0)

    one = suggest(question, options)
    assert not started
    with cores.several_cores():
        several = suggest(question, options)

    assert len(started) >= 2
    assert replace(several, search=replace(several.search, seconds=one.search.seconds)) == one
