"""A time limit holds wherever the time is spent, and what is not proved by then is not called infeasible."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from planner.__main__ import _limit
from planner.cli import main
from planner.question.question import question_of
from planner.search.gpu_counts import best_gpu_count, fewest_gpus
from planner.search.plan_space import judged
from planner.search.search import SearchOptions, suggest
from simulator.config.workload import Workload
from tests.planner.conftest import TINY, make_cluster
from topology.errors import Infeasible, Unproved
from topology.time_limit import check_time, command, limited, reading, with_alarm

PIPED = ("suggest", "--model", "llama3-8b", "--cluster", "dgx-h100", "--pp", "2", "--gpus", "8", "--json")


def small_question():
    workload = Workload(seq_len=512, global_batch_size=8)
    return question_of(TINY, make_cluster(1, 2), workload, framework="torchtitan", gpus=2)


def test_a_limit_ends_work_inside_it_alone():
    check_time()
    with limited(0.0), pytest.raises(Unproved):
        check_time()
    check_time()
    with limited(0.0), limited(None):
        check_time()


def test_a_limit_counts_from_where_its_command_began():
    with command():
        time.sleep(0.02)
        with limited(0.01), pytest.raises(Unproved):
            check_time()


def test_with_an_alarm_a_limit_ends_what_never_looks_at_it():
    def busy_until(far):
        while time.monotonic() < far:
            pass

    with with_alarm(), limited(0.02), pytest.raises(Unproved):
        busy_until(time.monotonic() + 5)


def test_the_time_is_over_earlier_where_others_have_the_processor():
    with command():
        began, busy_s = time.monotonic(), time.process_time() + 0.11
        while time.process_time() < busy_s:
            pass
        time.sleep(0.33)
        with limited(100.0):
            left = reading() - began
    assert 75 <= left < 100 - 0.3


def test_a_process_ends_at_its_limit_before_it_has_loaded_anything():
    words = [sys.executable, "-m", "planner", *PIPED, "--time-limit", "0.01"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert "time limit ended" in done.stderr


@pytest.mark.parametrize("said", [(), ("suggest", "--time-limit", "-1")])
def test_words_that_name_no_limit_get_the_answer_of_the_command_line(said):
    done = subprocess.run([sys.executable, "-m", "planner", *said], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Usage: planner" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("limit", ["nan", "inf", "1e400", "1e12"])
def test_a_limit_is_no_alarm_where_it_never_ends(limit):
    with with_alarm(_limit(["suggest", "--time-limit", limit])), limited(1e12):
        check_time()


def test_what_ends_before_any_plan_is_found_is_unproved(capsys):
    assert main([*PIPED, "--time-limit", "0"]) == 5
    said = capsys.readouterr()
    assert "time limit ended" in said.err
    assert "not shown that there is none" in said.err
    assert not said.out


def test_a_fewest_number_that_was_not_found_in_time_is_unproved(capsys):
    assert main(["suggest", "--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "min", "--time-limit", "0"]) == 5
    assert "time limit ended" in capsys.readouterr().err


def test_a_first_plan_that_is_nearly_there_is_waited_for_a_little(monkeypatch):
    monkeypatch.setattr(judged, "GRACE_S", 100.0)
    assert suggest(small_question(), SearchOptions(time_limit_s=0.0)).plans
    monkeypatch.setattr(judged, "GRACE_S", 0.0)
    with pytest.raises(Unproved):
        suggest(small_question(), SearchOptions(time_limit_s=0.0))


@pytest.mark.parametrize("stage", ["predict_all", "find_flips", "assign_stages"])
def test_the_plans_found_are_the_answer_where_time_ends_later(monkeypatch, stage):
    def ended(*_args, **_kwargs):
        raise Unproved("the time limit ended")

    whole = suggest(small_question(), SearchOptions(simulate=False))
    monkeypatch.setattr(f"planner.search.search.{stage}", ended)
    cut = suggest(small_question(), SearchOptions(simulate=stage == "predict_all"))

    assert [one.plan for one in cut.plans] == [one.plan for one in whole.plans]
    assert [one.estimate.memory for one in cut.plans] == [one.estimate.memory for one in whole.plans]
    assert cut.cut_short is (stage != "assign_stages")


def test_counts_that_were_not_tried_are_not_called_infeasible():
    def none_fits(gpus):
        if gpus == 1:
            raise Infeasible("does not fit")
        raise Unproved("the time limit ended")

    with pytest.raises(Unproved):
        best_gpu_count(none_fits, (1, 2), objective="time")
    with pytest.raises(Unproved):
        fewest_gpus(none_fits, (1, 2))
    with pytest.raises(Unproved, match="before a number of GPUs"):
        fewest_gpus(none_fits, (1, 2), deadline=time.monotonic())
