"""Bytecode of what ranks import, where an image keeps none alongside the sources.

Every process would compile them anew: a rank imports for 9 s instead of 3. So bytecode is kept in the user's cache, and
as long as that has none, other processors compile the sources ahead of the first rank that imports them.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import platformdirs

NO_BYTECODE, BYTECODE = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
IMPORTED = ("torch", "sympy", "mpmath", "triton", "networkx")  # 1.8 million lines, 10 s of a processor
LEFT_OUT = r"/(tests?|testing|benchmarks)/"
MOST_PROCESSES = 8
FEWEST_PROCESSORS = 4  # below which compiling ahead would only disturb who imports


def keep_bytecode(environment: MutableMapping[str, str]) -> None:
    """Let an environment keep bytecode in the user's cache, where Python writes none and torch has none."""
    if environment.get(NO_BYTECODE) and not environment.get(BYTECODE) and not _compiled("torch"):
        del environment[NO_BYTECODE]
        environment[BYTECODE] = str(_cache())


def compile_ahead(environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """Begin to compile what ranks import, if its bytecode is to be in our cache, which is not there yet; return the
    process, which whoever asked ends.
    """
    processors = os.cpu_count() or 1
    if environment.get(BYTECODE) != str(_cache()) or _cache().exists() or processors < FEWEST_PROCESSORS:
        return None
    folders = [str(Path(spec.origin).parent) for name in IMPORTED if (spec := _found(name)) and spec.origin]
    return subprocess.Popen(
        [
            sys.executable,
            *("-m", "compileall", "-q", "-x", LEFT_OUT),
            *("-j", str(min(MOST_PROCESSES, processors // 2)), *folders),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(environment),
        start_new_session=True,
    )


def _cache() -> Path:
    return Path(platformdirs.user_cache_path("meshwright", appauthor=False)) / "bytecode"


def _found(package: str) -> importlib.machinery.ModuleSpec | None:
    return importlib.util.find_spec(package)


def _compiled(package: str) -> bool:
    """Return whether a package's bytecode is next to its source; True where there is no such package."""
    spec = _found(package)
    return spec is None or spec.origin is None or Path(importlib.util.cache_from_source(spec.origin)).is_file()
