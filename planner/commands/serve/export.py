"""`planner export` of a serving plan: a script for a node, a compose file, Kubernetes documents."""

from __future__ import annotations

from planner.commands.export import require_one_kind
from planner.export.serving.files import serving_files
from planner.io import output
from planner.io.printable import printable
from planner.question.plan_file import refuse_overwrite
from planner.requests.tools import Export
from planner.serving import TASK, ServingFile, load_serving
from simulator.config.hf_config import hub_name
from simulator.serving.engine import engine_of
from topology import codec
from topology.errors import BadInput, Infeasible, UserError

FILES = {"script": "serve.sh", "compose": "compose.yaml", "kubernetes": "kubernetes.yaml"}


def export(asked: Export) -> None:
    """Print or save the file that `--to` names, or all of them. `--name` is the model's on the hub or a path of its
    weights.

    Raises UserError for another `--to`, Infeasible for a plan that such a file cannot start.
    """
    require_one_kind(asked)
    if asked.case_id is not None:
        raise UserError("--id: a serving plan is one", remedy="leave it out")
    content, out = load_serving(asked.plan), asked.out
    files = files_of(content, asked.name)
    if asked.every and out is not None:
        if out.exists() and not out.is_dir():
            raise BadInput(f"{out} is not a directory", remedy="--out with a new name")
        codec.make_folder(out)
        for file in files:
            refuse_overwrite(out / file, force=asked.force)
        for file, text in files.items():
            codec.write_text(out / file, text)
        if asked.json:
            output.emit_json({"schema_version": output.SCHEMA_VERSION, "task": TASK, "saved": str(out), "files": files})
        else:
            print(printable(f"saved {', '.join(str(out / file) for file in files)}"))
        return
    file = _file(content, str(asked.to))
    if file not in files:
        raise Infeasible(
            f"no {asked.to} for this plan", why="its engines do not fit on one node together", remedy="--to kubernetes"
        )
    if out is not None:
        refuse_overwrite(out, force=asked.force)
        codec.write_text(out, files[file])
    if asked.json:
        saved = str(out) if out else None
        output.emit_json({"schema_version": output.SCHEMA_VERSION, "task": TASK, "text": files[file], "saved": saved})
    else:
        print(files[file] if out is None else printable(f"saved {out}"), end="" if out is None else "\n")


def files_of(content: ServingFile, name: str | None) -> dict[str, str]:
    """Return the text of each file of a saved plan by name."""
    question = content.question
    model = name or hub_name(question.model.name)
    node = question.cluster.gpus_per_node
    return serving_files(question.stated(content.deployment), model, longest=question.longest, gpus_per_node=node)


def _file(content: ServingFile, to: str) -> str:
    """Return the file that a word names: by its kind, or by the plan's engine."""
    engine = engine_of(content.deployment.engine).program
    if to == engine:
        return FILES["script"]
    if to not in FILES:
        raise UserError(
            f"--to {to}: the plan serves with {engine}",
            why=f"of such a plan there are {', '.join(FILES)}",
            remedy=f"--to {engine} or one of these; for another engine plan again with --engine",
        )
    return FILES[to]
