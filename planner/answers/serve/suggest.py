"""The deployments of a question of serving, best first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from planner.export.serving.files import serving_files
from planner.requests.serving import Task, refuse, stated
from planner.requests.training import Objective, Suggest
from planner.serving.crossings import Row, over_clients
from planner.serving.pareto import Pareto, pareto
from planner.serving.plan_file import serving_file
from planner.serving.question.from_flags import FEWEST, flags_of_search, machine_of, serving_question
from planner.serving.reports.documents import serving_document, way_out_document
from planner.serving.reports.pareto import pareto_document
from planner.serving.search import ServingPlan, ServingResult, search_serving
from planner.serving.targets.most_load import on_fewest_gpus
from planner.serving.targets.ways import NOTHING, WayOut, way_out
from simulator.config.hf_config import hub_name
from simulator.config.plan import PLAN_FIELDS
from simulator.serving.engine import COMPARED
from topology import codec
from topology.codec import JsonObject
from topology.errors import UserError

# Options of `suggest` without a meaning for serving; those with a default count only if they were stated.
ONLY_TRAINING = (
    *("global_batch", "all_variants", "compile_model", "param_dtype", "compute_dtype", "max_tp"),
    *("tokens", "deadline", "budget", "runtime", "pick"),
    *("mtbf", "checkpoint_bandwidth", "restart", "async_checkpoint", "spot", "repair", "spares"),
)
SPELLED = {"all_variants": "--all", "compile_model": "--compile"}
DEFAULTED = ("seq_len", "framework", "simulate")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedDeployments:
    """The answer of `planner suggest --task serve`: deployments, and which of them is best over the number of
    clients.
    """

    result: ServingResult
    over_clients: Sequence[Row]
    top: int
    out: WayOut = NOTHING

    @property
    def plans(self) -> Sequence[ServingPlan]:
        """Deployments with their estimates, best first."""
        return self.result.plans[: self.top]

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the best plan: it alone if `path` ends in .json, else a folder with the files that start it.

        Raises UserError for a path that is there already, unless `force` is given.
        """
        out = Path(path)
        _refuse_overwrite(out, force=force)
        question, best = self.result.question, self.result.plans[0].deployment
        saved = codec.to_json(serving_file(question, best)) + "\n"
        if out.suffix == ".json":
            codec.write_text(out, saved)
            return
        files = serving_files(
            question.stated(best),
            hub_name(question.model.name),
            longest=question.longest,
            gpus_per_node=question.cluster.gpus_per_node,
        )
        codec.make_folder(out)
        for name, text in {"plan.json": saved, **files}.items():
            codec.write_text(out / name, text)

    def to_dict(self) -> JsonObject:
        """Return the JSON document of the command."""
        return serving_document(self.result, self.over_clients, top=self.top) | way_out_document(self.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedDeployments:
    """The answer of `planner suggest --task serve --objective pareto`."""

    found: Pareto

    @property
    def plans(self) -> Sequence[ServingPlan]:
        """Pareto-optimal deployments, those with the highest speed per user first."""
        return [point.plan for point in self.found.best]

    def to_dict(self) -> JsonObject:
        """Return the JSON document of the command."""
        return pareto_document(self.found)


def suggest(
    asked: Suggest, progress: Callable[[str], None] = lambda _: None
) -> SuggestedDeployments | ComparedDeployments:
    """Return the answer. Raises UserError for options that only training has, Infeasible where nothing fits."""
    _refuse_parts(asked)
    refuse(_of_training(asked), Task.SERVE, SPELLED)
    if asked.objective is Objective.PARETO:
        return _compared(asked, progress)
    _refuse_drawn(asked)
    flags = flags_of_search(asked)
    limit_s = asked.time_limit
    until_s = time.monotonic() + (math.inf if limit_s is None else limit_s)
    fewest = ""
    if asked.gpus == FEWEST:
        flags, fewest = on_fewest_gpus(flags, progress=progress, until_s=until_s)
    question = serving_question(flags)
    if fewest:
        question = replace(question, assumed=(fewest, *question.assumed))
    if asked.out is not None:
        _refuse_overwrite(asked.out, force=asked.force)
    result = search_serving(question, progress=progress, time_limit_s=limit_s)
    load = over_clients(result, until_s=until_s).rows
    progress("what would meet the targets")
    out = way_out(result, partial(machine_of, flags), until_s=until_s)
    return SuggestedDeployments(result=result, over_clients=load, top=asked.top, out=out)


def _compared(asked: Suggest, progress: Callable[[str], None]) -> ComparedDeployments:
    """Return all deployments under the engine asked about, or under each of those compared."""
    if asked.out is not None:
        raise UserError("--out saves one plan", remedy="--csv and --svg save the comparison, or choose an objective")
    if asked.gpus == FEWEST:
        raise UserError(
            f"--gpus {FEWEST} with --objective pareto", why="it compares all loads", remedy="give a number of GPUs"
        )
    flags = flags_of_search(replace(asked, objective=Objective.THROUGHPUT))
    question = serving_question(flags)
    engines = COMPARED if flags.engine is None else (question.engine,)
    limit_s = asked.time_limit
    until_s = time.monotonic() + (math.inf if limit_s is None else limit_s)
    return ComparedDeployments(found=pareto(question, engines, progress=progress, until_s=until_s))


def _refuse_overwrite(out: Path, *, force: bool) -> None:
    if out.exists() and not force:
        raise UserError(f"{out} is there already", remedy="choose another name, or pass --force")


def _refuse_drawn(asked: Suggest) -> None:
    if names := ["--" + name for name, path in (("svg", asked.svg), ("csv", asked.drawn.csv)) if path is not None]:
        raise UserError(f"{', '.join(names)}: of --objective pareto alone", remedy="add --objective pareto")


def _refuse_parts(asked: Suggest) -> None:
    """Raise UserError for parts of a deployment, which a search chooses."""
    stated = [f"--{name} {text}" for name in ("tp", "pp", "ep") if (text := asked.fixed.get(name)) is not None]
    if stated:
        raise UserError(
            f"{' '.join(stated)}: a search chooses the parts of a deployment",
            remedy="leave it out, or ask about one deployment: planner estimate --task serve, with the same flags",
        )


def _of_training(asked: Suggest) -> list[str]:
    """Return the stated options that only training has."""
    parts = [PLAN_FIELDS[name].parameter for name, text in asked.fixed.items() if text is not None]
    others = stated({name: getattr(asked, name) for name in ONLY_TRAINING} | asdict(asked.trained))
    return [*others, *parts, *(name for name in DEFAULTED if name in asked.said)]
