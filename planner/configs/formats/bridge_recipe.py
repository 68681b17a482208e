"""Megatron-Bridge's recipes: functions of a Python file that set fields of `cfg`, read as data. Nothing is imported or
run; settings in other files are not read.

Source: `src/megatron/bridge/recipes/` and `perf_recipes/` of Megatron-Bridge at 067f987. `run_recipe.py --recipe NAME`
starts one; its name ends in the GPUs that it is for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from planner.configs.formats import bridge, megatron
from planner.configs.formats.adapters import adapters, bridge_adapter
from planner.configs.formats.command_line import CommandLine
from planner.configs.formats.configuration import MACHINES, CheckFlags, Configuration, unknown_kind
from planner.configs.formats.documents import Document, bounded
from planner.export.mapping import Entry, Facts, NotStated, Settings
from planner.export.named_models import model_said, model_spelt
from topology.errors import BadInput

CONFIG = "cfg"
# `_pretrain_common` and `_sft_common` of recipes/common.py, and what perf_recipes/_common.py changes.
COMMON: Settings = {
    "ddp.use_distributed_optimizer": True,
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
    "mixed_precision": "bf16_mixed",
}
FP32 = "ddp.grad_reduce_in_fp32"
STAGES = ("--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank")
COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
SPLITS = frozenset({*COUNTED, "--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers"})
BENCHMARK = re.compile(r"_(\w+_)?benchmark_common")
NAMED = re.compile(r"_(\d{1,5})gpu_([a-z]+\d+)_")
WITH_BATCH = "_with_global_batch_size"
QUIET = ("dataset.", "tokenizer.", "logger.", "checkpoint.", "scheduler.", "env_vars", "rng.")
TASK = re.compile(r"_(pretrain|sft|peft|low_precision|finetune).*")
MOST_DEEP = 8  # recipes that build on another one
_GPUS, _OVERLAP_FILE = "--recipe", "comm_overlap.tp_comm_overlap_cfg"


@dataclass(slots=True)
class _Said:
    """The settings of a recipe: values, the expressions that contain them, the model's name, and what was not read."""

    settings: Settings = field(default_factory=dict)
    places: dict[str, ast.expr] = field(default_factory=dict)
    model: str = ""
    spelt: str = ""
    names: dict[str, Any] = field(default_factory=dict)  # constants of the function
    unread: dict[str, None] = field(default_factory=dict)


class Recipe(Document):
    """One recipe of a Python file. Raises BadInput for a text that is not Python, NotStated if there are several
    recipes.
    """

    def __init__(self, text: str, where: str, name: str | None) -> None:
        self.text = bounded(text, where)
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BadInput(f"{where} is not Python", why=str(error)[:200]) from error
        self._functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
        self._constants = dict(_constants(tree.body))
        recipes = [one for one in self._functions if one.endswith("_config") and not one.startswith("_")]
        if not recipes:
            raise unknown_kind(where, "it has no function that ends in _config, as recipes of Megatron-Bridge do")
        if name is None and len(recipes) > 1:
            raise NotStated(
                f"which of its {len(recipes)} recipes? {', '.join(recipes)[:400]}", remedy=f"--launch '{_GPUS} NAME'"
            )
        self.name = name or recipes[0]
        if self.name not in self._functions:
            raise BadInput(f"{where} has no recipe {self.name[:60]!r}", why=f"it has {', '.join(recipes)[:400]}")
        self.said = self._read(self.name, 0)
        self.settings = self.said.settings
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _read(self, name: str, depth: int) -> _Said:
        said = _Said()
        for statement in self._functions[name].body:
            self._statement(statement, said, depth)
        return said

    def _statement(self, statement: ast.stmt, said: _Said, depth: int) -> None:
        call = statement.value if isinstance(statement, ast.Expr | ast.Return) else None
        if isinstance(statement, ast.Assign):
            target, path = statement.targets[0], _path(statement.targets[0])
            if path == CONFIG:
                self._begin(statement.value, said, depth)
            elif path is not None:
                self._assign(path.removeprefix(f"{CONFIG}."), statement.value, said)
            elif isinstance(target, ast.Name):
                said.names[target.id] = _literal(statement.value)
        elif isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            if BENCHMARK.fullmatch(call.func.id):
                said.settings[FP32] = False
            elif call.func.id in self._functions and depth < MOST_DEEP:
                self._over(said, self._read(call.func.id, depth + 1))
            else:
                said.unread[f"{call.func.id}()"] = None
        elif isinstance(statement, ast.If | ast.For | ast.With) and any(map(_counts, ast.walk(statement))):
            said.unread[f"line {statement.lineno} (a condition)"] = None

    def _begin(self, value: ast.expr, said: _Said, depth: int) -> None:
        """Copy the settings of another recipe, or the common defaults."""
        name = _called(value)
        if name == WITH_BATCH and isinstance(value, ast.Call) and len(value.args) == 2:
            self._begin(value.args[0], said, depth)
            said.settings["train.global_batch_size"] = self._value(value.args[1], said)
            return
        if name in self._functions and depth < MOST_DEEP:
            self._over(said, self._read(name, depth + 1))
            return
        said.settings |= COMMON
        if not name.endswith("_common"):
            said.spelt = TASK.sub("", name)
            said.unread[f"{name}() of another file"] = None

    @staticmethod
    def _over(said: _Said, other: _Said) -> None:
        said.settings |= other.settings
        said.model, said.spelt = other.model or said.model, other.spelt or said.spelt
        said.unread |= other.unread

    def _assign(self, path: str, value: ast.expr, said: _Said) -> None:
        known = self._value(value, said)
        if path == "model":
            said.model = next((one for one in _strings(value)), "") or self._hub(value, said)
        elif path == "mixed_precision":
            words = [*_strings(value), *(one.id for one in ast.walk(value) if isinstance(one, ast.Name))]
            said.settings[path] = next((word for word in words if re.match(r"bf16|fp16|fp8|nvfp4", word)), None)
        elif known is not _UNKNOWN:
            said.settings[path], said.places[path] = known, value
        elif isinstance(value, ast.Call):
            for keyword in value.keywords:
                if keyword.arg and (inner := self._value(keyword.value, said)) is not _UNKNOWN:
                    said.settings[f"{path}.{keyword.arg}"] = inner
                    said.places[f"{path}.{keyword.arg}"] = keyword.value
        elif path == _OVERLAP_FILE:
            said.settings["comm_overlap.tp_comm_overlap"] = True

    def _hub(self, value: ast.expr, said: _Said) -> str:
        """Return the name on the Hub that is passed to a call as a constant of the file."""
        names = (one.id for one in ast.walk(value) if isinstance(one, ast.Name))
        return next((word for name in names if isinstance(word := self._named(name, said), str)), "")

    def _named(self, name: str, said: _Said) -> Any:
        return said.names.get(name, self._constants.get(name, _UNKNOWN))

    def _value(self, value: ast.expr, said: _Said) -> Any:
        return self._named(value.id, said) if isinstance(value, ast.Name) else _literal(value)

    def edited(self, changes: Settings) -> str:
        edits, added = [], []
        for path, value in changes.items():
            said = None if value == "null" else value
            if path in self.said.places:
                edits.append((*self._span(self.said.places[path]), repr(said)))
            elif said is not None or path in self.settings:
                added.append(f"    {CONFIG}.{path} = {said!r}\n")
        if added:
            last = max((one.end_lineno or 0 for one in self._own()), default=0)
            edits.append((self._starts[last], self._starts[last], "".join(added)))
        text = self.text
        for start, end, instead in sorted(edits, reverse=True):
            text = text[:start] + instead + text[end:]
        return text

    def _own(self) -> Iterator[ast.stmt]:
        """Yield the statements that assign `cfg` or its fields."""
        for statement in self._functions[self.name].body:
            if isinstance(statement, ast.Assign) and _path(statement.targets[0]) is not None:
                yield statement

    def _span(self, node: ast.expr) -> tuple[int, int]:
        """Return the characters of an expression; Python counts bytes within a line."""
        places = ((node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0))
        lines = self.text.splitlines(keepends=True)
        start, end = (self._starts[row - 1] + len(lines[row - 1].encode()[:column].decode()) for row, column in places)
        return start, end


_UNKNOWN = object()


def _called(value: ast.expr) -> str:
    return value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""


def _counts(node: ast.AST) -> bool:
    """Return whether a node assigns a field that a step depends on."""
    path = _path(node.targets[0]) if isinstance(node, ast.Assign) else None
    return path is not None and not path.removeprefix(f"{CONFIG}.").startswith(QUIET)


def _literal(value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _UNKNOWN


def _constants(body: list[ast.stmt]) -> Iterator[tuple[str, Any]]:
    for one in body:
        target = (
            one.targets[0] if isinstance(one, ast.Assign) else one.target if isinstance(one, ast.AnnAssign) else None
        )
        value = one.value if isinstance(one, ast.Assign | ast.AnnAssign) else None
        if isinstance(target, ast.Name) and value is not None and (known := _literal(value)) is not _UNKNOWN:
            yield target.id, known


def _path(target: ast.expr) -> str | None:
    """Return the dotted path of a target that is `cfg` or a field below it; None for another target."""
    parts: list[str] = []
    while isinstance(target, ast.Attribute):
        parts.insert(0, target.attr)
        target = target.value
    return ".".join([CONFIG, *parts]) if isinstance(target, ast.Name) and target.id == CONFIG else None


def _strings(value: ast.expr) -> Iterator[str]:
    return (one.value for one in ast.walk(value) if isinstance(one, ast.Constant) and isinstance(one.value, str))


def _ends(flags: Settings) -> Settings:
    """Return the flags that divide layers over stages where they do not divide evenly and nothing states how."""
    sizes = [flags.get(flag, 1) for flag in ("--num-layers", *STAGES)]
    if flags.keys() & SPLITS or not all(type(size) is int and size > 0 for size in sizes):
        return {}
    layers, stages = sizes[0], sizes[1] * sizes[2]
    return dict.fromkeys(COUNTED, True) if layers % stages and (layers + len(COUNTED)) % stages == 0 else {}


def _read_length(settings: Settings, facts: Facts) -> Facts:
    if "--seq-length" not in settings and not facts.get("seq_len"):
        raise NotStated("the length of sequences is set in another file", remedy="--seq-len")
    return {}


def read(text: str, where: str, flags: CheckFlags) -> Configuration:
    """Return the settings of a recipe; the launch line names it if the file has several."""
    launch = CommandLine(flags.launch, "--launch", lambda _: None).settings if flags.launch else {}
    document = Recipe(text, where, launch.get(_GPUS))
    said = document.said
    model = model_said(said.model)[0] if said.model else model_spelt(said.spelt)
    settings = {path: value for path, value in said.settings.items() if path != FP32}
    own, paths = bridge.flags_of(settings)
    own |= {"--grad-reduce-in-bf16": True} if said.settings.get(FP32) is False else {}
    flags_said, whole = megatron.over_model({}, own, paths, model)
    ends = _ends(flags_said) if said.unread else {}
    named = NAMED.search(document.name)

    def edit(changes: Settings) -> str:
        return document.edited(bridge.fields_of(changes, paths))

    found = megatron.configured(
        document,
        {**flags_said, **ends},
        where,
        edit,
        framework="megatron-bridge",
        model=whole,
        gpus=int(named[1]) if named else None,
        cluster=MACHINES.get(named[2].upper()) if named else None,
        in_a_comment=named is not None,
        unknown=(*megatron.costly(settings, paths), *said.unread),
        elsewhere=tuple(said.unread),
        assumed=(f"{' '.join(ends)} (the layers do not divide otherwise; another file says how)",) if ends else (),
    )
    trained = adapters(lambda _: bridge_adapter(said.settings, recipe="peft" in document.name))
    return replace(found, table=(Entry(read=_read_length), *found.table, trained))
