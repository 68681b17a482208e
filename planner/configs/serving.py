"""The command line that starts vLLM or SGLang: read, judged by the engine's own flags and rules, and improved as a
diff.

A script may have other lines; variables that it assigns are looked up (`planner.configs.formats.command_line`). If a
text has several commands, the flags of all count; of equal flags the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches, unified_diff
from itertools import pairwise
from typing import Any

from planner.configs.formats.command_line import CommandLine, option_kinds
from planner.configs.formats.configuration import CheckFlags
from planner.configs.serving_start import serving_engine
from planner.export.mapping import Settings
from planner.export.schema import schema
from planner.export.serving.commands import sglang_limits
from planner.serving import (
    MOST,
    TIE,
    ServingAnswer,
    ServingFlags,
    ServingPlan,
    ServingQuestion,
    answer_deployment,
    parse_release,
    require_pool,
    search_serving,
    serving_question,
    value_of,
)
from planner.validate.serving_row import model_of, plain
from simulator.config.hf_config import hub_name, load_model
from simulator.config.stored_weights import of_name
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.engine import engine_of
from topology.errors import BadInput, BadModel, Infeasible, PlannerError

VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
# Where a text states its release: an image's tag, or a requirement.
_RELEASES = {
    "vllm": re.compile(r"vllm-openai:v([0-9][\w.]*)|\bvllm==([0-9][\w.]*)"),
    "sglang": re.compile(
        r"lmsysorg/sglang:v([0-9][0-9.]*(?:(?:\.?post|rc)[0-9]+)?)|\bsglang(?:\[\w+\])?==([0-9][\w.]*)"
    ),
}
# Formats of weights by the engines' names; a checkpoint that states its own format needs none.
_WEIGHTS = {
    "fp8": "float8", "modelopt": "float8", "fbgemm_fp8": "float8", "compressed-tensors": "float8", "w8a8_fp8": "float8",
    "awq": "int4", "awq_marlin": "int4", "gptq": "int4", "gptq_marlin": "int4",
    "modelopt_fp4": "float4", "nvfp4": "float4", "mxfp4": "float4",
}  # fmt: skip
_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_LONGER = {"vllm": "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "sglang": "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"}
_SHARES = {"gpu_memory_utilization", "mem_fraction_static"}
# Flags that are costed or judged, and flags about where and under which name a server answers.
_READ = {
    "model", "model_path", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
    "enable_expert_parallel", "tp_size", "pp_size", "dp_size", "attn_dp_size", "ep_size", "enable_dp_attention",
    "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "max_running_requests",
    "chunked_prefill_size", "mem_fraction_static", "quantization", "kv_cache_dtype", "max_model_len",
    "context_length", "enforce_eager", "disable_cuda_graph", "disable_custom_all_reduce",
    "enable_two_batch_overlap", "enable_dbo", "enable_eplb", "eplb_config", "scheduler_recv_interval",
    "ep_num_redundant_experts",
}  # fmt: skip
_OF_THE_SERVER = {
    "host", "port", "api_key", "served_model_name", "trust_remote_code", "tokenizer", "tokenizer_path",
    "download_dir", "seed", "random_seed", "revision", "chat_template", "uvicorn_log_level", "log_level",
    "disable_log_requests", "tool_call_parser", "enable_auto_tool_choice", "reasoning_parser",
}  # fmt: skip
MOST_TOKENS = 1 << 31
LISTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingChange:
    """A better deployment, with the unified diff of the command that makes it."""

    what: str
    plan: ServingPlan
    diff: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedServing:
    """The result for a command. `answer` is None if it contradicts itself: see `problems`."""

    engine: str
    problems: tuple[str, ...]
    unknown: tuple[str, ...]
    assumed: tuple[str, ...]
    answer: ServingAnswer | None = None
    changes: tuple[ServingChange, ...] = ()
    no_better: str = ""

    @property
    def legal(self) -> bool:
        return not self.problems and self.answer is not None and self.answer.estimate is not None


def check_serving(
    text: str,
    where: str,
    stated: CheckFlags,
    flags: ServingFlags,
    *,
    search: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> CheckedServing:
    """Judge the command in `text`; `flags` describe the clients' requests. Raises BadInput for an unknown model."""
    engine = serving_engine(text)
    keys = schema(engine, VERSIONS[engine])["keys"]
    document = CommandLine(text, where, option_kinds(keys))
    unknown, problems = _refused(document.settings, keys, engine)
    release = stated.release or release_in(text, engine)
    found_as = {name: flag_of(name, keys) for name in document.settings}
    settings = {setting_of(flag, keys): document.settings[name] for name, flag in found_as.items() if flag}
    name = stated.model or _model_name(document, settings)
    try:
        model = load_model(name) if stated.model else model_of(name)
    except BadModel as error:
        raise BadInput(
            f"{where}: the model {name[:60]!r} is not among the shipped ones",
            remedy="say its shapes: --model config.json",
        ) from error
    try:
        pool = _pool(engine, settings, experts=model.moe is not None)
    except PlannerError as error:
        return CheckedServing(engine=engine, problems=(*problems, error.what), unknown=unknown, assumed=())
    limits = _limits(engine, settings, pool)
    if "weights" not in limits and (said := of_name(name)):
        limits["weights"] = said
    asked = replace(
        flags,
        model=stated.model or model.name,
        cluster=stated.cluster or flags.cluster,
        gpu=stated.gpu,
        gpus=stated.gpus or pool.engines * pool.gpus,
        engine=f"{engine}=={release}" if release else engine,
        **limits,
    )
    question = serving_question(asked)
    deployment = question.deployment(pool)
    found = answer_deployment(question, deployment)
    same = stated.model or plain(name) in {
        plain(model.name),
        plain(hub_name(model.name)),
    }  # and not another model with the same shapes
    problems = (
        *problems,
        *found.problems,
        *_too_long(settings, question, found, positions=model.max_positions if same else 0),
    )
    assumed = tuple(line for line in found.assumed if not (line.startswith("weights") and "weights" in limits))
    assumed = tuple(line for line in assumed if not line.startswith("a checkpoint with")) + _not_costed(
        settings, limits
    )
    if release and parse_release(release) != parse_release(VERSIONS[engine]):
        assumed += (f"flags and times are those of {engine} {VERSIONS[engine]}, features those of {release}",)
    found = replace(found, assumed=assumed)
    base = CheckedServing(engine=engine, problems=problems, unknown=unknown, assumed=assumed, answer=found)
    if not search:
        return base
    try:
        result = search_serving(question, progress=progress)
    except Infeasible as error:
        return replace(base, no_better=error.what)
    better = [plan for plan in result.plans if _gains(question, plan, found)]
    changes = [_change(plan, document, engine, settings, where) for plan in better[:LISTED]]
    return replace(
        base,
        changes=tuple(one for one in changes if one.diff),
        no_better="" if better else "no deployment on these GPUs is better by more than predictions are off",
    )


def release_in(text: str, engine: str) -> str:
    """Return the release in an image's tag or a requirement of a text; empty without one."""
    found = _RELEASES[engine].search(text)
    return next(filter(None, found.groups()), "") if found else ""


def flag_of(name: str, keys: Mapping[str, Any]) -> str:
    """Return the full flag for a word, as argparse reads it: the flag itself, or the only one that begins with the
    word; else empty.
    """
    plain = name.replace("_", "-")
    if name in keys or plain in keys:
        return name if name in keys else plain
    begun = {setting_of(flag, keys): flag for flag in keys if flag.startswith(plain)} if plain.startswith("--") else {}
    return next(iter(begun.values())) if len(begun) == 1 else ""


def setting_of(flag: str, keys: Mapping[str, Any]) -> str:
    """Return what an engine calls the setting of a flag; a schema says it where the flag does not."""
    return str(keys[flag].get("dest") or flag.lstrip("-").replace("-", "_"))


def _model_name(document: CommandLine, settings: Mapping[str, Any]) -> str:
    """Return the model that a command names. Raises BadInput if it names none."""
    for key in ("model_path", "model"):
        if settings.get(key):
            return str(settings[key])
    words = [document.expanded(word.text) for word in document.words]
    for before, word in pairwise(words):
        if before == "serve" and not word.startswith("-"):
            return word
    raise BadInput("the command names no model", remedy="say it: --model llama3-8b")


def _refused(
    settings: Mapping[str, Any], keys: Mapping[str, Any], engine: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return flags that the engine does not have, and values that its parser would refuse."""
    unknown, problems = [], []
    for name, value in settings.items():
        flag = flag_of(name, keys)
        entry = keys.get(flag)
        if entry is None and name.startswith("--no-") and "--" + name[5:] in keys:
            continue
        if entry is None:
            unknown.append(name)
            near = get_close_matches(name, keys, 1)
            hint = f"; near it: {near[0]}" if near else ""
            problems.append(f"{name} is not a flag of {engine} {VERSIONS[engine]}{hint}")
        elif "$" in str(value):
            problems.append(f"{name} is {value!r}: the text does not assign that variable")
        elif entry.get("choices") and str(value) not in entry["choices"]:
            problems.append(f"{name} {value}: {engine} {VERSIONS[engine]} takes {', '.join(entry['choices'])}")
        elif entry["type"] in {"int", "float"} and not _is_number(value, entry["type"]):
            problems.append(f"{name} {value}: not a number")
        elif setting_of(flag, keys) in _SHARES and _number(value) > 1:
            problems.append(f"{name} {value}: a share of the GPU's memory is at most 1")
    return tuple(unknown), tuple(problems)


def _is_number(value: object, kind: str) -> bool:
    pattern = r"-?\d+[kKmMgG]?" if kind == "int" else r"-?\d+(\.\d*)?([eE]-?\d+)?|-?\.\d+"
    return not isinstance(value, bool) and re.fullmatch(pattern, str(value)) is not None


def _whole(settings: Mapping[str, Any], key: str, default: int = 1) -> int:
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise BadInput(f"{key} is {str(value)[:40]!r}", remedy=f"a number from 1 to {MOST}")
    return value


def _pool(engine: str, settings: Mapping[str, Any], *, experts: bool) -> Pool:
    """Return the engines that a command starts. Raises BadInput and BadPlan."""
    if engine == "vllm":
        tp, pp, dp = (_whole(settings, f"{axis}_parallel_size") for axis in ("tensor", "pipeline", "data"))
        spread = settings.get("enable_expert_parallel") is True
        said = settings.get("eplb_config")
        twice = re.search(r'"num_redundant_experts": {0,9}([0-9]{1,5})', str(said)) if said else None
        pool = (
            Pool(
                tp=tp,
                pp=pp,
                dp_attention=dp,
                ep=tp * dp if spread else 1,
                redundant_experts=int(twice[1]) if twice and spread else 0,
            )
            if experts
            else Pool(engines=dp, tp=tp, pp=pp)
        )
    else:
        ranks, pp, dp = (_whole(settings, key) for key in ("tp_size", "pp_size", "dp_size"))
        inside = _whole(settings, "attn_dp_size")
        if settings.get("enable_dp_attention") is True:
            inside, dp = dp, 1
        if ranks % inside:
            raise BadInput(f"attention over {inside} groups does not divide --tp-size {ranks}")
        copies = _whole(settings, "ep_num_redundant_experts", 0) if settings.get("ep_num_redundant_experts") else 0
        pool = Pool(
            engines=dp,
            tp=ranks // inside,
            pp=pp,
            dp_attention=inside,
            ep=_whole(settings, "ep_size"),
            redundant_experts=copies,
        )
    require_pool(pool, "the command")
    return pool


def _limits(engine: str, settings: Mapping[str, Any], pool: Pool) -> Settings:
    """Return the formats and limits in a command as fields of ServingFlags, whose limits are of one rank of attention.
    SGLang's are of all together (`sglang_limits`).
    """
    shared = pool.dp_attention if engine == "sglang" else 1
    names = {
        "vllm": ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"),
        "sglang": ("max_running_requests", "chunked_prefill_size", "mem_fraction_static"),
    }[engine]
    fields = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
    found: Settings = {}
    for name, field in zip(names, fields, strict=True):
        number = _number(settings.get(name))
        if number > 0:
            whole = max(1, int(min(number // shared, MOST_TOKENS)))
            found[field] = min(number, 1.0) if field == "gpu_memory_utilization" else whole
    weights = _WEIGHTS.get(str(settings.get("quantization", "")).lower())
    if weights:
        found["weights"] = weights
    if str(settings.get("kv_cache_dtype", "")).startswith("fp8"):
        found["kv_cache"] = "float8"
    if settings.get("enforce_eager") is True or settings.get("disable_cuda_graph") is True:
        found["eager"] = True
    if settings.get("disable_custom_all_reduce") is True:
        found["no_custom_all_reduce"] = True
    if settings.get("enable_two_batch_overlap") is True or settings.get("enable_dbo") is True:
        found["two_batch_overlap"] = True
    if every := _number(settings.get("scheduler_recv_interval")):
        found["receive_every"] = int(min(every, 1 << 16))
    return found


def _not_costed(settings: Mapping[str, Any], limits: Mapping[str, Any]) -> tuple[str, ...]:
    """Return sentences about settings that the engine accepts and that do not change the prediction."""
    read = _READ if "weights" in limits else _READ - {"quantization"}
    names = sorted(f"--{name.replace('_', '-')}" for name in settings if name not in read | _OF_THE_SERVER)
    return (f"nothing changed by {', '.join(names)}",) if names else ()


def _number(value: object) -> float:
    """Return a number as the engines write it, also `8k` and `8K` (vLLM's 1,000 and 1,024); 0 for anything else."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d*)?|\.\d+)([kKmMgG]?)", str(value))
    return float(found[1]) * _UNITS[found[2]] if found else 0.0


def _too_long(
    settings: Mapping[str, Any], question: ServingQuestion, found: ServingAnswer, *, positions: int
) -> tuple[str, ...]:
    """Return what the engine refuses about lengths, at its start or for each request. `positions` of 0 are unknown."""
    longest = int(_number(settings.get("max_model_len", settings.get("context_length"))))
    if not longest:
        return ()
    problems = []
    if positions and longest > positions:
        problems.append(
            f"a context of {longest} tokens is beyond the {positions} positions of {question.model.name}: "
            f"it does not start unless {_LONGER[engine_of(question.engine).program]}=1 is set"
        )
    if question.longest > longest:
        problems.append(f"requests of {question.longest} tokens are refused: the limit is {longest}")
    if found.estimate is not None and found.estimate.room.tokens < longest:
        problems.append(
            f"the KV cache holds {found.estimate.room.tokens} tokens, one request may have {longest}: it does not start"
        )
    return tuple(problems)


def _gains(question: ServingQuestion, plan: ServingPlan, found: ServingAnswer) -> bool:
    if plan.deployment.prefill is not None:
        return False
    if found.estimate is None or (plan.meets and not found.meets):
        return True
    mine = ServingPlan(deployment=found.deployment, estimate=found.estimate, meets=found.meets)
    return plan.meets >= found.meets and value_of(question, plan) * (1 + TIE) < value_of(question, mine)


def _change(
    plan: ServingPlan, document: CommandLine, engine: str, settings: Mapping[str, Any], where: str
) -> ServingChange:
    wanted = parallel_flags(engine, plan.deployment, deprecated="enable_dp_attention" in settings)
    if engine == "sglang":
        limits = sglang_limits(plan.deployment, plan.deployment.pool)
        stated = {flag: _number(settings.get(flag.removeprefix("--").replace("-", "_"))) for flag in limits}
        ranks = plan.deployment.pool.dp_attention
        wanted |= {
            name: limits[name] for name, now in stated.items() if now > 0 and now // ranks != limits[name] // ranks
        }
    flag_names = {flag: _name_used(flag, document, engine) for flag in wanted}
    defaults: Settings = {flag: 1 for flag, value in wanted.items() if not isinstance(value, bool)}
    changes = {
        flag_names[flag]: value
        for flag, value in wanted.items()
        if document.settings.get(flag_names[flag], defaults.get(flag, False)) != value
    }
    edited = document.edited(changes)
    diff = "".join(
        unified_diff(document.text.splitlines(keepends=True), edited.splitlines(keepends=True), where, where)
    )
    what = ", ".join(f"{flag} {document.settings.get(flag, 'unset')} -> {value}" for flag, value in changes.items())
    return ServingChange(what=what, plan=plan, diff=diff)


def _name_used(flag: str, document: CommandLine, engine: str) -> str:
    """Return the spelling of a flag that the text uses, by default the first."""
    keys = schema(engine, VERSIONS[engine])["keys"]
    setting = setting_of(flag, keys)
    used = ((name, flag_of(name, keys)) for name in document.settings)
    return next((name for name, known in used if known and setting_of(known, keys) == setting), flag)


def parallel_flags(engine: str, deployment: Deployment, *, deprecated: bool = False) -> Settings:
    """Return all flags that spread one command over GPUs, defaults included.

    `deprecated` writes SGLang's attention groups as it did before 0.5.20: `--dp-size N --enable-dp-attention`.
    """
    pool = deployment.pool
    if engine == "vllm":
        return {
            "--tensor-parallel-size": pool.tp,
            "--pipeline-parallel-size": pool.pp,
            "--data-parallel-size": pool.engines * pool.dp_attention,
            "--enable-expert-parallel": pool.ep > 1,
        }
    found: Settings = {"--tp-size": pool.ranks, "--pp-size": pool.pp, "--ep-size": pool.ep}
    if deprecated:
        return found | {
            "--dp-size": max(pool.engines, pool.dp_attention),
            "--enable-dp-attention": pool.dp_attention > 1,
        }
    return found | {"--dp-size": pool.engines, "--attn-dp-size": pool.dp_attention}
