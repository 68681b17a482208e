"""Settings of a plan for which a file has no key, as one line of its header that can be read back: the model, and facts
that the program or the launcher states.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, get_type_hints

from planner.export.job import ExportJob
from planner.export.mapping import PLAN_FACTS, RUNTIME_FACTS, WORKLOAD_FACTS, Facts, Settings, Table, read
from planner.export.named_models import model_said
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.verify import verify_model
from simulator.config.workload import Workload
from topology import codec
from topology.errors import BadInput, PlannerError

SECTION = "meshwright"  # of a file without comments
LABEL = "planned"
MOST_OF_A_HEADER = 20_000  # characters
_LINE = re.compile(rf"^# {LABEL}: (\{{.*\}})$", re.MULTILINE)
RUNTIMES = frozenset({"pytorch", "trl"})  # of programs that accelerate starts, whose file is the same for all
_FACTS = (PLAN_FACTS | WORKLOAD_FACTS | RUNTIME_FACTS | {"gpus"}) - {"placement"}


# Fields of a plan whose default depends on the framework or on other fields.
_SAID = frozenset({"recompute", "sequence_parallel", "micro_batch_size"})
_DEFAULTS = {one.name: one.default for one in fields(Plan) if one.name not in _SAID} | {
    "moe_dispatcher": "",
    "cuda_graph": False,
    "graph_scopes": (),
    "savers": (),
    "reentrant": None,
    "logs_each_step": False,
    "low_precision_recipe": "",
    "wide_layers": (0, 0),
    "document_len": 0,
    "routing": "",
}
_SIZES = ("layers", "hidden", "heads", "kv_heads", "vocab")  # facts that every framework's keys for a model contain


def _experts(model: Model) -> tuple[int, int] | None:
    return None if model.moe is None else (model.moe.experts, model.moe.ffn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan for which a file was written, as stated in its header."""

    model: Model | None = None
    runtime: str = ""  # where the file is one of several runtimes'
    facts: Facts = field(default_factory=dict)

    def model_of(self, said: Model | None) -> Model | None:
        """Return the header's model, or the file's own if it has changed since."""
        if said is None or self.model is None:
            return said or self.model
        same = all(getattr(said, size) == getattr(self.model, size) for size in _SIZES)
        return self.model if same and _experts(said) == _experts(self.model) else said


def planned_document(job: ExportJob, table: Table, settings: Settings, *, launches: bool = False) -> dict[str, Any]:
    """Return the model, and the facts that a reader of `settings` takes from its inputs; of a tool that `launches`
    programs of several runtimes, the runtime as well.
    """
    model = job.question.model
    known, _ = model_said(model.name)
    named = known is not None and replace(known, assumed=()) == replace(model, assumed=())
    document: dict[str, Any] = {"model": model.name if named else codec.to_builtins(replace(model, assumed=()))}
    if not table:
        return document
    facts = job.facts()
    cluster = job.question.cluster
    given = {"gpus": job.plan.gpus, "gpus_per_node": cluster.gpus_per_node, "layers": model.layers}
    back = _read(table, settings, given)
    lacking = {
        name: facts[name]
        for name in sorted(_FACTS)
        if back.get(name) != facts[name] and (name in back or facts[name] != _DEFAULTS.get(name))
    }
    again = _read(table, settings, given | lacking)
    document |= {name: value for name, value in lacking.items() if again.get(name) == value}
    runtime = job.question.runtime.name
    document |= {"runtime": runtime} if launches and runtime in RUNTIMES else {}
    return document | {"gpus": job.plan.gpus}


def types_note(job: ExportJob, table: Table, settings: Settings) -> tuple[str, ...]:
    """Return what to say where a tool's own keys give parameters another type than the plan's."""
    if not table:
        return ()
    given = {**job.facts(), "gpus_per_node": job.question.cluster.gpus_per_node, "layers": job.question.model.layers}
    planned = job.question.runtime.param_dtype
    held = _read(table, settings, {name: value for name, value in given.items() if name not in RUNTIME_FACTS})
    written = held.get("param_dtype", planned)
    return () if written == planned else (f"parameters in {planned}: with these keys they are held in {written}",)


def _read(table: Table, settings: Settings, given: Facts) -> Facts:
    try:
        return read(table, settings, given)
    except BadInput:  # a part without a key, such as stages, would make the others fit
        return {}


def planned_in(text: str) -> Planned:
    """Return what the header of an export says; empty for any other text. Raises BadInput for a damaged header."""
    if text.lstrip().startswith("{") and f'"{SECTION}"' in text[:MOST_OF_A_HEADER]:
        whole = codec.parse_json(text, where="the configuration")
        section = whole.get(SECTION) if isinstance(whole, dict) else None
        return planned_of(section.get(LABEL) if isinstance(section, dict) else None)
    found = _LINE.search(text[:MOST_OF_A_HEADER])
    if found is not None:
        return planned_of(codec.parse_json(found[1], where=f"the header's line {LABEL!r}"))
    return Planned()


def planned_of(document: object) -> Planned:
    """Return the content of a header. Raises BadInput for impossible content."""
    if not isinstance(document, dict):
        return Planned()
    said, runtime = document.get("model"), document.get("runtime")
    try:
        if isinstance(said, dict):
            model: Model | None = codec.convert(said, Model, where=f"{LABEL}: model")
            verify_model(codec.convert(said, Model, where="model"), where=LABEL)
        else:
            model, _ = model_said(said)
        facts = {name: _typed(name, value) for name, value in document.items() if name in _FACTS}
    except PlannerError as error:
        raise BadInput(f"the header's line {LABEL!r} is damaged", why=error.what, remedy="take it out") from error
    return Planned(model=model, runtime=runtime if type(runtime) is str and runtime in RUNTIMES else "", facts=facts)


def _typed(name: str, value: object) -> Any:
    """Return a fact with the type of its field; an adapter stays a document. Raises BadInput for another type."""
    read = codec.convert(value, _types().get(name, int), where=f"{LABEL}: {name}")
    return value if name == "adapter" else read


@cache
def _types() -> dict[str, Any]:
    return {**get_type_hints(Runtime), **get_type_hints(Workload), **get_type_hints(Plan)}


def planned_line(document: dict[str, Any]) -> str:
    return f"{LABEL}: {json.dumps(document)}"
