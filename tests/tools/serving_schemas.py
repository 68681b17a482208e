"""Read the flags of serving engines off their sources, into planner/export/schema/.

The packages are unpacked, not installed: they weigh gigabytes with what they need.

    pip download --no-deps vllm==0.33.0 sglang==0.5.23
    unzip vllm-*.whl 'vllm/*.py' 'vllm/**/*.py' -d unpacked; unzip sglang-*.whl 'sglang/*.py' 'sglang/**/*.py' -d
    unpacked python tests/tools/serving_schemas.py unpacked --vllm 0.33.0 --sglang 0.5.23

Both build their parser from typed fields; here the types are read from the same source text, without running it.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "planner" / "export" / "schema"
PLAIN = {"int", "float", "str", "bool"}


def entry_of(annotation: str) -> dict[str, Any]:
    """Return the type of a field as data: its first plain type, and the words of a Literal."""
    tree = ast.parse(annotation, mode="eval").body
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal":
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            words = [one.value for one in inner if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            return {"type": "str", "choices": sorted(words)} if words else {"type": "str"}
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in PLAIN]
    if names == ["bool"]:
        return {"type": "flag"}
    return {"type": names[0] if len(set(names)) == 1 else "str"}


def fields_of(source: str) -> Iterator[tuple[str, str, str, ast.expr]]:
    """Yield (class, field, type, annotation) of every annotated field of a module."""
    for kind in ast.walk(ast.parse(source)):
        if isinstance(kind, ast.ClassDef):
            for line in kind.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield kind.name, line.target.id, ast.unparse(line.annotation), line.annotation


def aliases_of(source: str) -> dict[str, str]:
    """Return names that a module gives to types: `Kind = Literal[...]`."""
    return {
        line.targets[0].id: ast.unparse(line.value)
        for line in ast.parse(source).body
        if isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Name)
        and "Literal" in ast.unparse(line.value)
    }


def spelled_out(text: str, named: dict[str, str]) -> str:
    """Return a type with the names that modules give to types written out."""
    return re.sub(r"\b[A-Z]\w+\b", lambda found: named.get(found[0], found[0]), text)


# --- vLLM: add_argument("--flag", **kwargs["field"]) next to configuration classes
# ---------------------------------------


def vllm_keys(root: Path) -> dict[str, Any]:
    texts = [path.read_text() for path in sorted((root / "vllm/config").glob("*.py"))]
    named = {name: text for source in texts for name, text in aliases_of(source).items()}
    known = {(kind, field): spelled_out(text, named) for source in texts for kind, field, text, _ in fields_of(source)}
    tree = ast.parse((root / "vllm/engine/arg_utils.py").read_text())
    classes = {
        line.targets[0].id: line.value.args[0].id
        for line in ast.walk(tree)
        if isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Name)
        and isinstance(line.value, ast.Call)
        and getattr(line.value.func, "id", "") == "get_kwargs"
    }
    keys: dict[str, Any] = {}
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument"):
            continue
        flags = [word.value for word in call.args if isinstance(word, ast.Constant)]
        entry = {"type": "str"}
        for keyword in call.keywords:
            value = keyword.value
            field = next((one for one in ast.walk(value) if isinstance(one, ast.Subscript)), None)
            if keyword.arg is None and field is not None and isinstance(field.slice, ast.Constant):
                kind = classes.get(getattr(field.value, "id", ""), "")
                entry = entry_of(known.get((kind, field.slice.value), "str"))
            elif keyword.arg == "action" and "store_true" in ast.unparse(value):
                entry = {"type": "flag"}
        keep(keys, flags, entry)
    for _, field, text, _ in fields_of((root / "vllm/entrypoints/common/cli_args.py").read_text()):
        keep(keys, ["--" + field.replace("_", "-")], entry_of(text))
    return keys


# --- SGLang: fields annotated A[type, Arg(...)]
# -------------------------------------------------------------------------


def sglang_keys(root: Path) -> dict[str, Any]:
    folder = root / "sglang/srt/arg_groups"
    named = aliases_of((folder / "choices.py").read_text())
    keys: dict[str, Any] = {}
    for path in sorted((folder / "fields").glob("*.py")):
        for _, field, _, annotation in fields_of(path.read_text()):
            if not (isinstance(annotation, ast.Subscript) and getattr(annotation.value, "id", "") == "A"):
                continue
            kind, *notes = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            said = {
                keyword.arg: keyword.value for note in notes if isinstance(note, ast.Call) for keyword in note.keywords
            }
            if "no_cli" in said:
                continue
            name = ast.literal_eval(said["cli_name"]) if "cli_name" in said else "--" + field.replace("_", "-")
            text = ast.unparse(kind)
            flags = [name, *(ast.literal_eval(said["aliases"]) if "aliases" in said else [])]
            keep(keys, flags, entry_of(spelled_out(text, named)))
    for call in ast.walk(ast.parse((root / "sglang/srt/server_args.py").read_text())):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument":
            flags = [word.value for word in call.args if isinstance(word, ast.Constant)]
            keep(keys, flags, {"type": "str" if any(one.arg in {"type", "nargs"} for one in call.keywords) else "flag"})
    return keys


def keep(keys: dict[str, Any], flags: list[str], entry: dict[str, Any]) -> None:
    first, *_ = names = [flag.lstrip("-").replace("-", "_") for flag in flags]
    for flag, name in zip(flags, names, strict=True):
        if flag.startswith("-"):
            keys[flag] = entry | ({} if name == first else {"dest": first})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--vllm")
    parser.add_argument("--sglang")
    options = parser.parse_args()
    for name, version, read in (("vllm", options.vllm, vllm_keys), ("sglang", options.sglang, sglang_keys)):
        if version:
            content = {"package": name, "version": version, "keys": dict(sorted(read(options.root).items()))}
            path = FOLDER / f"{name}_{version}.json"
            path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
