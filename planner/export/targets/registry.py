"""The export targets, and the header of exported files: the plan, and the settings that the file does not express."""

from __future__ import annotations

import json
from dataclasses import replace
from difflib import get_close_matches

from planner.export.adapters import adapter_needs, optimizer_needs, saver_needs
from planner.export.draft import Draft, Exported, Target
from planner.export.frameworks import accelerate, deepspeed, megatron, torchtitan_cli, torchtitan_toml
from planner.export.frameworks.tuning import TUNING
from planner.export.job import ExportJob
from planner.export.launchers import skypilot, slurm, torchrun, trainjob
from planner.export.planned import LABEL, SECTION, planned_document, planned_line, types_note
from planner.export.script import comment
from planner.io.plan_words import degrees_text, policy_text
from planner.io.version import version
from simulator.config.plan import MESH_AXES, NCCL
from simulator.config.runtime import TF32
from simulator.config.workload import Workload
from simulator.legality.frameworks import MESHWRIGHT
from simulator.runtimes.called import called
from simulator.runtimes.library import is_described, runtime_spec
from simulator.runtimes.parts import ToolsSpec
from topology.codec import JsonObject
from topology.errors import Infeasible, UserError

# Newest version of a target first.
TARGETS: tuple[Target, ...] = (
    torchrun.TARGET,
    torchtitan_cli.TARGET,
    torchtitan_toml.TARGET,
    megatron.TARGET,
    deepspeed.TARGET,
    accelerate.TARGET,
    slurm.TARGET,
    trainjob.TARGET,
    skypilot.TARGET,
)
ALL_TARGETS = (*TARGETS, *TUNING)
TF32_NOTE = "products in TF32: the program has to call torch.set_float32_matmul_precision('high')"
ALIASES = {
    "executor": "torchrun",
    "fsdp2": "accelerate",
    "sbatch": "slurm",
    "kubernetes": "trainjob",
    "k8s": "trainjob",
    "sky": "skypilot",
    "llamafactory": "llama-factory",
    "nemo-automodel": "automodel",
}


def find_target(text: str, wanted: str | None = None) -> Target:
    """Return the target `name` or `name@version`, or the one that plans of a runtime of that name are written for;
    `wanted` is the version to prefer if `text` has none.

    Raises UserError (exit 2) with the known names and versions.
    """
    name, _, stated = text.partition("@")
    bare = name.strip().lower()
    bare = ALIASES.get(bare, bare)
    bare = bare if any(target.name == bare for target in ALL_TARGETS) else called(bare)[0]
    tuned = any(target.name == bare for target in TUNING)
    if not tuned and is_described(bare) and runtime_spec(bare).tools.export != ToolsSpec().export:
        bare = runtime_spec(bare).tools.export
    versions = [target for target in ALL_TARGETS if target.name == bare]
    if not versions:
        known = list(dict.fromkeys(target.name for target in ALL_TARGETS))
        near = get_close_matches(bare, [*known, *ALIASES], n=2)
        raise UserError(
            f"no export to {name[:60]!r}",
            why=f"training plans are written for {', '.join(known)}",
            remedy=f"did you mean {' or '.join(near)}?" if near else "--to with one of these names",
        )
    if not stated:
        return next((target for target in versions if target.version == wanted), versions[0])
    for target in versions:
        if target.version == stated or target.version.startswith(f"{stated}."):
            return target
    raise UserError(
        f"no export to {bare} {stated[:40]!r}",
        why=f"its keys are known for {', '.join(target.version for target in versions)}; other versions use other keys",
        remedy=f"--to {bare}@{versions[0].version}",
    )


def export(job: ExportJob, target: Target) -> Exported:
    """Return the file of `target` for `job`. Raises Infeasible (exit 3) when the target cannot run the plan."""
    # Targets with keys of their own, and those of tuning, run other programs than our executor.
    other, elsewhere = job.plan.fsdp_exchange, bool(target.table) or target in TUNING
    job = job.with_plan(job.plan.with_(fsdp_exchange=NCCL)) if elsewhere else job
    draft = target.write(job)
    if elsewhere and other != NCCL:
        left_out = f"FSDP's exchanges by {other}: {target.title} exchanges by NCCL"
        draft = replace(draft, not_expressed=(*draft.not_expressed, left_out))
    if job.question.runtime.compute_dtype == TF32 and job.question.framework is not MESHWRIGHT:
        draft = replace(draft, not_expressed=(*draft.not_expressed, TF32_NOTE))
    draft = replace(draft, not_expressed=(*draft.not_expressed, *_of_the_data(job.question.workload)))
    launches = target is accelerate.TARGET  # programs, which choose the type of their parameters
    lost = () if launches else types_note(job, target.table, draft.settings)
    draft = replace(draft, not_expressed=(*draft.not_expressed, *lost))
    runtime = job.question.runtime
    more = (*adapter_needs(target.name, runtime), *optimizer_needs(runtime), *saver_needs(target.name, runtime))
    more = () if target in TUNING else more  # the files of these tools state all of it
    draft = replace(draft, needed=(*draft.needed, *more))
    run = draft.run or target.run
    facts = header(job, target, replace(draft, needed=(*draft.needed, f"to run: {run}")))
    run_as = job if draft.plan is None else job.with_plan(draft.plan)
    facts[LABEL] = planned_document(run_as, target.table, draft.settings, launches=launches)
    if isinstance(draft.body, dict):
        text = json.dumps({SECTION: facts, **draft.body}, indent=2) + "\n"
    else:
        first = f"{target.first_line}\n" if target.first_line else ""
        text = f"{first}{comment(header_lines(facts))}{draft.body}"
    return Exported(
        target=target.name,
        version=target.version,
        file_name=target.file_name,
        plan_hash=job.plan_hash,
        settings=draft.settings,
        not_expressed=draft.not_expressed,
        needed=draft.needed,
        notes=draft.notes,
        environment=(*job.environment(), *draft.environment),
        run=run,
        text=text,
        files=draft.files,
    )


def _of_the_data(workload: Workload) -> tuple[str, ...]:
    """Return what a workload says of its data, for which no tool's file has a key."""
    documents = workload.attended_len < workload.seq_len
    lines = {
        f"documents of {workload.document_len:,} tokens packed into sequences, and attention that stays inside them:"
        " set both in the program": documents,
        "routing of tokens that is forced to be balanced: a switch of the program": workload.routing == "balanced",
        "tokens by expert as they were counted: they follow from your data": bool(workload.expert_counts),
    }
    return tuple(line for line, holds in lines.items() if holds)


def header(job: ExportJob, target: Target, draft: Draft) -> JsonObject:
    """Return the header that every exported file has."""
    plan = replace(job.plan, placement=())
    sizes = " x ".join(str(getattr(plan, axis)) for axis in MESH_AXES)
    return {
        "written_by": f"meshwright {version()}",
        "plan": job.plan_hash,
        "for": f"{target.title} {target.version}",
        "model": job.question.model.name,
        "cluster": job.question.cluster.name,
        "gpus": degrees_text(plan),
        "policy": policy_text(plan),
        "rank_order": f"{' x '.join(MESH_AXES)} = {sizes}, the last fastest",
        "not_expressed": list(draft.not_expressed),
        "needed": list(draft.needed),
        "notes": list(draft.notes),
    }


def header_lines(facts: JsonObject) -> list[str]:
    """Return the header as lines; names are written as JSON strings, so that they stay on one line."""
    lines = [
        f"{facts['written_by']}, plan {facts['plan']}, for {facts['for']}",
        f"model {json.dumps(facts['model'])} on {json.dumps(facts['cluster'])}",
        f"{facts['gpus']}; {facts['policy']}",
        f"ranks: {facts['rank_order']}",
    ]
    for label, key in (("not expressed", "not_expressed"), ("needed", "needed"), ("note", "notes")):
        lines += [f"{label}: {line}" for line in facts[key]]
    return [*lines, planned_line(facts[LABEL]), ""]


# --- a folder with a file for every tool ------------------------------------------------------------------------------


README = "README.md"


def export_all(job: ExportJob) -> dict[str, str]:
    """Return the files of the folder by name. Raises Infeasible when no tool can run the plan."""
    done: list[Exported] = []
    refused: list[tuple[str, str]] = []
    for target in ALL_TARGETS:
        try:
            done.append(export(job, target))
        except Infeasible as error:
            refused.append((f"{target.title} {target.version}", f"{error.what}; {error.why}".rstrip("; ")))
    if not done:
        raise Infeasible("no tool can run this plan", why="; ".join(f"{title}: {why}" for title, why in refused))
    files = {name: text for one in done for name, text in {**one.files, one.file_name: one.text}.items()}
    return {**files, README: _readme(job, done, refused)}


def _readme(job: ExportJob, done: list[Exported], refused: list[tuple[str, str]]) -> str:
    lines = [
        f"# Plan {job.plan_hash}",
        "",
        "One command a tool, from this folder. Each file says in its header what of the plan the tool cannot express.",
        "",
    ]
    for one in done:
        lines += [f"## {one.target} {one.version}: {one.file_name}", "", "```", one.run, "```", ""]
        lines += [f"- {_plain(line)}" for line in one.needed]
        lines += [f"- not expressed: {_plain(line)}" for line in one.not_expressed]
        lines += [""]
    if refused:
        lines += ["## Tools that cannot run it", ""]
        lines += [f"- {title}: {_plain(why)}" for title, why in refused]
    return "\n".join(lines).rstrip() + "\n"


def _plain(text: str) -> str:
    """Return text on one line, with control characters escaped."""
    return comment([text]).removeprefix("# ").rstrip("\n")
