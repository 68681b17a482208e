"""Deployments for serving: which are legal, how each serves the requests, and which is best.

The public names are imported here.
"""

from __future__ import annotations

from planner.serving.answer import Account, ServingAnswer, answer_deployment, serving_account
from planner.serving.crossings import Sweep, over_clients
from planner.serving.explain import compare_answers, explain_serving
from planner.serving.measured.asked_run import AskedRun, all_steps, asked_run
from planner.serving.measured.samples import add_to_profile
from planner.serving.measured.side_by_side import load_rows, print_run, step_rows
from planner.serving.overrides import with_serving_flags
from planner.serving.plan_file import TASK, ServingFile, load_serving, serving_file
from planner.serving.question.from_flags import ServingFlags, flags_of_search, serving_question
from planner.serving.question.question import ServingQuestion
from planner.serving.question.releases import parse_release, sglang_of, trtllm_of, vllm_of
from planner.serving.search import TIE, ServingPlan, ServingResult, search_serving, value_of
from planner.serving.stated import MOST, require_pool

__all__ = [
    "MOST",
    "TASK",
    "TIE",
    "Account",
    "AskedRun",
    "ServingAnswer",
    "ServingFile",
    "ServingFlags",
    "ServingPlan",
    "ServingQuestion",
    "ServingResult",
    "Sweep",
    "add_to_profile",
    "all_steps",
    "answer_deployment",
    "asked_run",
    "compare_answers",
    "explain_serving",
    "flags_of_search",
    "load_rows",
    "load_serving",
    "over_clients",
    "parse_release",
    "print_run",
    "require_pool",
    "search_serving",
    "serving_account",
    "serving_file",
    "serving_question",
    "sglang_of",
    "step_rows",
    "trtllm_of",
    "value_of",
    "vllm_of",
    "with_serving_flags",
]
