"""Read files of a serving plan with the tools' own parsers. Run by `serving_table.py` under an interpreter that has one
of them.

    python serving_readers.py vllm|sglang|compose|kubernetes FILE     FILE: a JSON list of commands, or of documents'
    texts

Prints a JSON list: of a command the settings that the engine takes from it, of a document what is wrong with it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def vllm(words: list[str]) -> dict[str, Any]:
    """Return the arguments that `vllm serve` takes from a command, after its own checks. No GPU is asked for."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()  # the parser asks which devices there are
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert words[:2] == ["vllm", "serve"]
    found = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(words[2:])
    validate_parsed_serve_args(found)
    return {**vars(found), "model": found.model_tag or found.model}


def sglang(words: list[str]) -> dict[str, Any]:
    """Return the arguments that `sglang.launch_server` takes from a command, as parsed: its later checks ask for the
    model.
    """
    import argparse

    from sglang.srt.server_args import ServerArgs

    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return vars(parser.parse_args(words[3:]))


def compose(text: str) -> str:
    """Return what docker-compose's own reader refuses of a file."""
    from compose.config import config
    from compose.config.errors import ConfigurationError

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "compose.yaml")
        path.write_text(text)
        try:
            config.load(config.ConfigDetails(folder, [config.ConfigFile.from_filename(str(path))]))
        except ConfigurationError as error:
            return str(error)
    return ""


def kubernetes(text: str) -> str:
    """Return what the schemas of Kubernetes refuse of a file's documents, unknown fields included."""
    import kubernetes_validate as schemas
    import yaml

    for document in yaml.safe_load_all(text):
        try:
            schemas.validate(document, schemas.latest_version(), strict=True)
        except schemas.ValidationError as error:
            return f"{document.get('kind')}: {error.message}"
    return ""


def main() -> None:
    """Read every item of the file and print the answers."""
    read = {"vllm": vllm, "sglang": sglang, "compose": compose, "kubernetes": kubernetes}[sys.argv[1]]
    items = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    print(json.dumps([read(item) for item in items], default=lambda value: getattr(value, "value", None) or str(value)))


if __name__ == "__main__":
    main()
