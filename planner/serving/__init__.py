"""Deployments for serving: which are legal, what each answers of the requests that arrive, and which is best.

What others use is here; a module is loaded when one of its names is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.io.on_demand import on_demand

if TYPE_CHECKING:
    from planner.serving.account import Account as Account
    from planner.serving.account import serving_account as serving_account
    from planner.serving.answer import ServingAnswer as ServingAnswer
    from planner.serving.answer import answer_deployment as answer_deployment
    from planner.serving.compare import compare_answers as compare_answers
    from planner.serving.crossings import Sweep as Sweep
    from planner.serving.crossings import over_clients as over_clients
    from planner.serving.explain import Links as Links
    from planner.serving.explain import explain_serving as explain_serving
    from planner.serving.measured.asked_run import AskedRun as AskedRun
    from planner.serving.measured.asked_run import all_steps as all_steps
    from planner.serving.measured.asked_run import asked_run as asked_run
    from planner.serving.measured.samples import add_to_profile as add_to_profile
    from planner.serving.measured.side_by_side import load_rows as load_rows
    from planner.serving.measured.side_by_side import print_run as print_run
    from planner.serving.measured.side_by_side import step_rows as step_rows
    from planner.serving.overrides import with_serving_flags as with_serving_flags
    from planner.serving.plan_file import TASK as TASK
    from planner.serving.plan_file import ServingFile as ServingFile
    from planner.serving.plan_file import load_serving as load_serving
    from planner.serving.plan_file import serving_file as serving_file
    from planner.serving.question.from_flags import ServingFlags as ServingFlags
    from planner.serving.question.from_flags import flags_of_search as flags_of_search
    from planner.serving.question.from_flags import serving_question as serving_question
    from planner.serving.question.question import ServingQuestion as ServingQuestion
    from planner.serving.question.releases import parse_release as parse_release
    from planner.serving.question.releases import vllm_of as vllm_of
    from planner.serving.reports.documents import comparison_document as comparison_document
    from planner.serving.reports.documents import estimate_document as estimate_document
    from planner.serving.reports.documents import explanation_document as explanation_document
    from planner.serving.reports.documents import listed_document as listed_document
    from planner.serving.reports.documents import price_per_million as price_per_million
    from planner.serving.reports.documents import serving_document as serving_document
    from planner.serving.reports.plan_text import print_answer as print_answer
    from planner.serving.reports.plan_text import print_compared as print_compared
    from planner.serving.reports.plan_text import print_explained as print_explained
    from planner.serving.reports.plan_text import words as words
    from planner.serving.reports.text import answer_sentence as answer_sentence
    from planner.serving.reports.text import deployment_text as deployment_text
    from planner.serving.reports.text import ms_text as ms_text
    from planner.serving.reports.text import print_serving as print_serving
    from planner.serving.search import TIE as TIE
    from planner.serving.search import ServingPlan as ServingPlan
    from planner.serving.search import ServingResult as ServingResult
    from planner.serving.search import search_serving as search_serving
    from planner.serving.search import value_of as value_of
    from planner.serving.stated import MOST as MOST
    from planner.serving.stated import require_pool as require_pool
    from planner.serving.stated import stated_deployment as stated_deployment

__getattr__ = on_demand(
    __name__,
    {
        "account": "Account serving_account",
        "answer": "ServingAnswer answer_deployment",
        "compare": "compare_answers",
        "crossings": "Sweep over_clients",
        "explain": "Links explain_serving",
        "measured.asked_run": "AskedRun all_steps asked_run",
        "measured.samples": "add_to_profile",
        "measured.side_by_side": "load_rows print_run step_rows",
        "overrides": "with_serving_flags",
        "plan_file": "ServingFile TASK load_serving serving_file",
        "question.from_flags": "ServingFlags flags_of_search serving_question",
        "question.question": "ServingQuestion",
        "question.releases": "parse_release vllm_of",
        "reports.documents": "comparison_document estimate_document explanation_document"
        " listed_document price_per_million serving_document",
        "reports.plan_text": "print_answer print_compared print_explained words",
        "reports.text": "answer_sentence deployment_text ms_text print_serving",
        "search": "ServingPlan ServingResult TIE search_serving value_of",
        "stated": "MOST require_pool stated_deployment",
    },
)
