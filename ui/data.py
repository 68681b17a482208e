"""The data of the pages, from the same functions as the command line uses.

Fast results are cached by their arguments; searches and simulations run as jobs (`ui.background.waiting`). Cached
values are frozen, so they are shared between sessions (`cache_resource`) and not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from planner.configs.formats.configuration import CheckFlags
from planner.configs.serving_start import serving_engine
from planner.explain.plan_answer import answer_plan
from planner.export.job import ExportJob
from planner.export.targets.registry import ALL_TARGETS, export
from planner.io.inputs import read_cluster
from planner.io.plan_words import plan_chips, plan_name, plan_settings
from planner.question.cases import case_from_flags
from planner.question.plan_file import plan_file
from planner.runs import runs_store
from planner.search.answer import search_question
from planner.search.fixes import find_savings
from planner.search.result import PRELIMINARY
from planner.search.search import SearchOptions
from simulator.config.hf_config import load_model
from simulator.legality.frameworks import Framework
from topology import codec
from topology.codec import JsonObject
from topology.errors import UserError
from topology.health.diagnose import diagnose
from topology.rates.reach import plannable
from ui import panels, saved_plans, sharing
from ui.background import remote, service, waiting
from ui.charts.look import words
from ui.question import state, uploads
from ui.question.state import LISTED, Inputs, choose_plan, results, source_of

if TYPE_CHECKING:
    from planner.explain.plan_answer import PlanAnswer
    from planner.export.draft import Exported, Target
    from planner.question.flags import Flags
    from planner.runs.runs_store import DamagedRun, RunSummary
    from planner.search.fixes import Fix
    from planner.search.result import RankedPlan, SearchResult
    from planner.search.size_grid import Size
    from simulator.config.estimate import Estimate
    from simulator.config.model import Model
    from topology.cluster import Cluster
    from topology.health.diagnose import Health
    from ui.background.shared_jobs import PendingAnswer
    from ui.background.work import SimulatedStep


# --- fast results --------------------------------------------------------------------------------------------------


@st.cache_resource(max_entries=32, show_spinner=False)
def cluster(choice: str, gpus: int | None = None, gpu: str | None = None) -> Cluster:
    """Return what `planner probe --from` and `planner suggest --cluster` read. Raises PlannerError."""
    return read_cluster(source_of(choice), gpus, gpu=gpu)


@st.cache_resource(max_entries=32, show_spinner=False)
def model(choice: str) -> Model:
    return load_model(source_of(choice))


@st.cache_resource(max_entries=32, show_spinner=False)
def health(_cluster: Cluster, key: str) -> Health:
    """Return what `planner doctor` says of a cluster without measuring it. `key` is its fingerprint."""
    del key
    return diagnose(_cluster)


def what_if(inputs: Inputs, plan: Mapping[str, Any], framework: Framework, *, gpus: int) -> PlanAnswer:
    """Return what `planner estimate` answers for a plan of a framework, stated as a case states it. Raises
    PlannerError.
    """
    flags = inputs.flags()
    runtime = {"name": framework.runtime_name, **flags.runtime}
    case = case_from_flags(replace(flags, gpus=(gpus,), plan=plan, runtime=runtime))
    return answer_plan(case, with_fixes=False)


# --- long work --------------------------------------------------------------------------------------------------------


def search(question: Inputs) -> SearchResult | None:
    """Return what `planner suggest` answers, or None after showing progress. Raises PlannerError."""
    options = SearchOptions(objective=question.objective, top=LISTED)
    asked = (question.flags(), question.framework, options)
    title, start = "Searching all legal plans", _elsewhere(question, options)
    found: SearchResult | None = waiting.ask("search", question.key, *asked, title=title, start=start)
    return found


def prepare() -> None:
    """Answer the initial question of the explorer, and simulate its plan, before any user opens it."""
    if service.server() is None:
        question = Inputs()
        options = SearchOptions(objective=question.objective, top=LISTED)
        waiting.prepare("search", question.key, question.flags(), question.framework, options)
        result: SearchResult = waiting.finished("search", question.key)
        plan = result.plans[0].plan
        waiting.prepare("simulate", f"{question.key} {plan_name(plan)}", result.question, plan)


def other_search(question: Inputs) -> SearchResult | None:
    """Return the best plan of a second question, or None after showing progress. Raises PlannerError."""
    options = SearchOptions(objective=question.objective, top=1)
    asked = (question.flags(), question.framework, options)
    title, start = "Searching for the other question", _elsewhere(question, options)
    found: SearchResult | None = waiting.ask("other", question.key, *asked, title=title, start=start)
    return found


def fastest(question: Inputs) -> Estimate | None:
    """Return the estimate of the fastest plan for a question about memory, or None after showing progress."""
    options = SearchOptions(top=1)
    asked = (question.flags(), question.framework, options)
    title, start = (
        "Searching the fastest plan, to compare with",
        _elsewhere(replace(question, objective="time"), options),
    )
    found: SearchResult | None = waiting.ask("fastest", question.key, *asked, title=title, start=start)
    return found.plans[0].estimate if found is not None else None


def numbers(question: Inputs, counts: tuple[int, ...], gpu_price: float | None) -> SearchResult | None:
    """Return the best plan on each of several numbers of GPUs, or None after showing progress. Raises PlannerError."""
    flags = replace(question.flags(), gpus=counts)
    options = SearchOptions(objective=question.objective, top=1, gpu_price_per_hour=gpu_price)
    key = f"{question.key} {counts} {gpu_price}"
    title = f"Searching plans on {', '.join(map(str, counts))} GPUs"
    start = _elsewhere(question, options, flags)
    found: SearchResult | None = waiting.ask(
        "numbers", key, flags, question.framework, options, title=title, start=start, patience_s=0.0
    )
    return found


def _elsewhere(
    question: Inputs, options: SearchOptions, flags: Flags | None = None
) -> Callable[[], PendingAnswer] | None:
    """Return a function that starts a search on the service of `planner ui --server`; None without a service."""
    if service.server() is None:
        return None
    stated = flags or question.flags()
    if flags is not None and stated.global_batch is None:  # the same batch on all numbers of GPUs
        batch = search_question(flags, question.framework)[0].workload.global_batch_size
        stated = replace(stated, global_batch=batch)
    price = options.gpu_price_per_hour
    said = remote.search_request(question, top=options.top, flags=stated, price=price)
    return lambda: remote.RemoteJob(
        service.client(), "suggest", said, lambda answer: remote.read_search(answer, stated, question.framework)
    )


def checked(question: Inputs, text: str, name: str, launch: str, *, of_the_file: frozenset[str]) -> JsonObject | None:
    """Return what `planner check --json` answers about a configuration, or None after showing progress.

    Its settings are those of the question, except those left to the file. Raises PlannerError.
    """
    if serving_engine(text) and launch:
        raise UserError("a command that starts a server needs no other line", remedy="leave the line out")
    chosen = {"model": question.model, "cluster": question.cluster, "gpu": question.gpu, "gpus": question.gpus}
    chosen |= {"seq_len": question.seq_len, "global_batch": question.global_batch}
    left_out = of_the_file | ({"gpu"} if "cluster" in of_the_file else set())
    said: JsonObject = {key: None if key in left_out else value for key, value in chosen.items()}
    sources = {key: said[key] and source_of(said[key]) for key in ("model", "cluster")}
    flags = CheckFlags(**{**said, **sources}, launch=launch)
    key = codec.fingerprint([text, name, launch, question.key, sorted(of_the_file)])
    title, start = "Checking the configuration", _checked_elsewhere(said, text, name, launch)
    found: JsonObject | None = waiting.ask("check", key, text, name, flags, title=title, start=start)
    return found


def _checked_elsewhere(said: JsonObject, text: str, name: str, launch: str) -> Callable[[], PendingAnswer] | None:
    if service.server() is None:
        return None
    sent = {key: said[key] and uploads.sent(said[key]) for key in ("model", "cluster")}
    stated = {**said, **sent, "file": {"name": name, "content": text}, "launch": launch or None}
    asked = {key: value for key, value in stated.items() if value is not None}
    return lambda: remote.RemoteJob(service.client(), "check", asked, lambda answer: answer)


def simulated(
    question: Inputs, result: SearchResult, ranked: RankedPlan, *, patience_s: float | None = None
) -> SimulatedStep | None:
    """Return the simulated step of a plan, or None after showing progress. Raises PlannerError."""
    key = f"{question.key} {plan_name(ranked.plan)}"
    asked = (result.question, ranked.plan)
    found: SimulatedStep | None = waiting.ask(
        "simulate", key, *asked, title="Simulating the step", patience_s=patience_s
    )
    return found


def sizes(question: Inputs, result: SearchResult, ranked: RankedPlan) -> tuple[Size, ...] | None:
    """Return a plan with other sequences and micro batches, or None after showing progress. Raises PlannerError."""
    key = f"{question.key} {plan_name(ranked.plan)}"
    title = "Trying other lengths and micro batches"
    found: tuple[Size, ...] | None = waiting.ask("sizes", key, result.question, ranked, title=title, patience_s=0.0)
    return found


def savings(result: SearchResult, ranked: RankedPlan) -> tuple[Fix, ...]:
    """Return the changes of one setting that free memory, the most first. Raises PlannerError."""
    return find_savings(result.question, ranked.plan, ranked.estimate)


def chosen(result: SearchResult, name: str) -> RankedPlan:
    """Return the plan of this name, or the best plan if there is none."""
    return next((ranked for ranked in result.plans if plan_name(ranked.plan) == name), result.plans[0])


def second(result: SearchResult, first: RankedPlan) -> RankedPlan | None:
    """Return the plan that the chosen one is compared with, if one is ticked."""
    wanted = st.session_state.get("second")
    return next((r for r in result.plans if plan_name(r.plan) == wanted and r.rank != first.rank), None)


# --- saved runs ------------------------------------------------------------------------------------------------------


def runs() -> tuple[RunSummary, ...]:
    """Return the runs that `planner apply` saved on this machine, newest first. Raises PlannerError."""
    return runs_store.list_runs(limit=500)


def damaged_runs() -> tuple[DamagedRun, ...]:
    """Return the kept runs that cannot be read. Raises PlannerError."""
    return runs_store.damaged_runs()


@st.cache_resource(max_entries=4, show_spinner=False)
def validation_rows(path: str, changed: float) -> tuple[JsonObject, ...]:
    """Return the compared rows of a file that `planner validate --json` wrote. `changed` is its modification time."""
    del changed
    document = codec.read_json(Path(path))
    found = document["rows"] if isinstance(document, dict) else []
    return tuple(row for row in found if row.get("predicted") and not row.get("skipped"))


def published() -> tuple[JsonObject, ...]:
    """Return the published runs with their predictions; nothing where only the package is installed. Raises
    PlannerError.
    """
    path = state.example("validation/cases.json")
    return () if path is None else validation_rows(str(path), path.stat().st_mtime)


def nearest_published(question: Inputs) -> panels.Near | None:
    """Return the published run nearest to a question and the error of its prediction. Raises PlannerError."""
    if not plannable(cluster(question.cluster, question.gpus, question.gpu)):
        return None
    asked, _ = search_question(question.flags(), question.framework)
    found = nearest(
        published(),
        parameters=asked.model.parameters,
        gpu=asked.cluster.slowest_kind.name,
        gpus=asked.count,
        framework=asked.framework.name,
    )
    return None if found is None else panels.Near(off=step_off(found), sentence=sentence(found))


def plan_file_text(result: SearchResult, ranked: RankedPlan) -> str:
    """Return the plan file that `planner suggest --out` would write for this plan."""
    content = plan_file(result.question, ranked.plan, ranked.estimate)
    return codec.to_json(content) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The search result that a page shows, and the question that it answers. `final` is False for what is shown
    before a search ends.
    """

    question: Inputs
    final: bool
    result: SearchResult


def frame(asked: Inputs, *, choose: bool) -> bool:
    """Get the answer for a page, and with `choose` let the user choose one of its plans.

    While a search runs, that is the analytical model's answer as soon as it exists. Before that, returns False: the
    page still shows the last answer, or ends here if there is none.
    """
    last: Answer | None = results().get("answer")
    result = search(asked)
    final = result is not None
    if result is None:
        result = waiting.early("search", asked.key)
    if result is not None and result.search.status == PRELIMINARY:
        st.caption(
            ":material/hourglass_top: Preliminary, by the analytical model:"
            " the plans are being simulated, and may change places."
        )
    if result is not None:
        shown, found = asked, saved_plans.with_saved(asked, saved_plans.with_likely(result))
    elif last is not None:
        shown, found = last.question, last.result
    else:
        st.stop()
    results()["answer"] = Answer(question=shown, final=final, result=found)
    if choose:
        _choose(found)
    return result is not None


def _choose(result: SearchResult) -> None:
    names = [plan_name(ranked.plan) for ranked in result.plans]
    # Without a choice the best plan of this answer is shown, not the one that was best before plans were simulated.
    wanted = state.link().get("plan")
    st.session_state["plan"] = wanted if wanted in names else names[0]
    if wanted not in {None, *names}:
        about = f"{panels.plain(wanted)} is not among the plans listed for this question; the best is shown."
        st.caption(f":material/info: {about}")

    def choose() -> None:
        name = st.session_state["plan"]
        if name in names:  # the browser may still have the plans of the previous answer
            choose_plan(name, best=name == names[0])

    about = "Best first; every page shows the chosen one."
    titles = {name: _title(ranked) for name, ranked in zip(names, result.plans, strict=True)}
    st.selectbox(
        "Plan",
        names,
        key="plan",
        on_change=choose,
        help=about,
        persist_state="session",
        format_func=lambda name: titles.get(name, name),
    )


def _title(ranked: RankedPlan) -> str:
    return f"#{ranked.rank}  {plan_chips(ranked.plan)}  ({plan_settings(ranked.plan)})"


def is_final() -> bool:
    """Return whether the answer that the page shows is that of a search that has ended."""
    found: Answer = results()["answer"]
    return found.final


def answer() -> tuple[SearchResult, RankedPlan]:
    """Return the search result, which the frame found before it ran the page, and the plan that is chosen now."""
    found: Answer = results()["answer"]
    return found.result, chosen(found.result, state.link().get("plan", ""))


def question() -> Inputs:
    """Return the question that the page shows the answer to."""
    asked: Inputs = results()["question"]
    return asked


# --- traces and files -------------------------------------------------------------------------------------------------


def exported(result: SearchResult, ranked: RankedPlan, target: Target) -> Exported:
    """Return the file that `planner export --to` would write.

    Raises Infeasible where the target cannot run the plan.
    """
    return export(ExportJob(name=result.question.model.name, plan=ranked.plan, question=result.question), target)


def report(asked: Inputs, result: SearchResult, ranked: RankedPlan) -> str:
    """Return a self-contained HTML report of the answer."""
    return sharing.report(result, ranked, command=asked.command())


def export_archive(result: SearchResult, ranked: RankedPlan) -> bytes:
    """Return all exports of a plan as one zip."""
    return sharing.archive(plan_file_text(result, ranked), ALL_TARGETS, lambda target: exported(result, ranked, target))


# --- the published run nearest to a question --------------------------------------------------------------------------


OTHER_FRAMEWORK, OTHER_GPU = 4.0, 3.0  # each counts as this many doublings of GPUs or parameters


def nearest(
    compared: Iterable[Mapping[str, Any]], *, parameters: float, gpu: str, gpus: int, framework: str
) -> Mapping[str, Any] | None:
    """Return the row of `planner validate --json` whose run is most like a question; None where no row says what it is
    about.
    """

    def distance(row: Mapping[str, Any]) -> float:
        about = row["about"]
        far: float = (
            abs(log2(about["gpus"] / gpus))
            + abs(log2(about["parameters"] / parameters))
            + OTHER_FRAMEWORK * (about["framework"] != framework)
            + OTHER_GPU * (about["gpu"] != gpu)
        )
        return far

    usable = [row for row in compared if row.get("about") and row["error"]["step"] is not None]
    return min(usable, key=distance, default=None)


def sentence(row: Mapping[str, Any]) -> str:
    """Return what a compared run was and how far off its prediction is."""
    about, error = row["about"], row["error"]
    source = words(row["file"].removesuffix(".json"))
    parts = [f"step predicted {step_off(row)}"]
    parts += [f"memory {_off(error['memory'], 'high', 'low')}"] if error["memory"] is not None else []
    billions = about["parameters"] / 1e9
    size = f"{billions:.0f}" if billions >= 10 else f"{billions:.2g}"
    by = "" if about["framework"] in {"any", source} else f" with {about['framework']}"
    what = f"{size} B parameters on {about['gpus']:,} x {about['gpu']}{by}"
    return f"{what} ({source}): {', '.join(parts)}"


def step_off(row: Mapping[str, Any]) -> str:
    """Return how far off the predicted step of a compared run is."""
    return _off(row["error"]["step"], "long", "short")


def _off(error: float, more: str, less: str) -> str:
    return "as measured" if abs(error) < 0.005 else f"{abs(error):.0%} too {more if error > 0 else less}"
