"""Uploaded files, stored under a hash of their content, so that a link that used one works again on this machine.

An upload is checked with the functions that the command line reads it with, and not trusted: its size is limited, its
name reduced to harmless characters, and its text escaped where shown. The oldest are deleted beyond MAX_FILES.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs

from planner.io.inputs import read_cluster
from simulator.config.hf_config import load_model
from topology import codec
from topology.errors import BadInput, PlannerError
from topology.units import MIB

Kind = Literal["cluster", "model"]
MAX_BYTES = 4 * MIB  # real topology files have up to 60 KB
MAX_FILES = 40
_STORED_NAME = re.compile(r"^(cluster|model)-([0-9a-f]{8})-([A-Za-z0-9._-]{1,48})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A stored upload. `choice` is its name in the sidebar and in the URL."""

    kind: Kind
    name: str
    digest: str
    path: Path

    @property
    def choice(self) -> str:
        return f"{self.name} ({self.digest})"


def folder() -> Path:
    """Return the folder of uploads, in the user's cache."""
    return platformdirs.user_cache_path("meshwright", appauthor=False) / "uploads"


def stored(kind: Kind) -> tuple[Upload, ...]:
    """Return the stored uploads of a kind, newest first."""
    found = []
    for path in folder().glob(f"{kind}-*") if folder().is_dir() else ():
        match = _STORED_NAME.match(path.name)
        if match and path.is_file():
            found.append((path.stat().st_mtime, Upload(kind=kind, digest=match[2], name=match[3], path=path)))
    return tuple(upload for _, upload in sorted(found, key=lambda pair: (-pair[0], pair[1].name)))


def choices(kind: Kind) -> list[str]:
    return [upload.choice for upload in stored(kind)]


def find(choice: str) -> Upload | None:
    """Return the upload that a choice in the sidebar names, or None if it is a built-in name."""
    if not choice.endswith(")"):
        return None
    return next((upload for kind in ("cluster", "model") for upload in stored(kind) if upload.choice == choice), None)


def sent(choice: str) -> str | dict[str, str]:
    """Return a choice as a request to the service says it: a name, or the uploaded file."""
    upload = find(choice)
    return choice if upload is None else {"name": upload.name, "content": codec.read_text(upload.path)}


def store(kind: Kind, name: str, content: bytes) -> Upload:
    """Check and store an uploaded file. Raises PlannerError, which names the file, when it is not one of `kind`."""
    if len(content) > MAX_BYTES:
        raise BadInput(
            f"{name} has {len(content) / MIB:.1f} MiB",
            why=f"files up to {MAX_BYTES // MIB} MiB are read; topology texts have a few kilobytes",
            remedy="upload the output of nvidia-smi topo -m, an NCCL topology file, or a cluster file",
        )
    digest = hashlib.sha256(content).hexdigest()[:8]
    kept = harmless(name)
    place = folder()
    path = place / f"{kind}-{digest}-{kept}"
    text = text_of(name, content)
    existed = path.is_file()
    codec.write_text(path, text)
    try:
        _read(kind, path)
    except PlannerError as error:
        if not existed:
            path.unlink(missing_ok=True)
        raise _renamed(error, str(path), name) from error
    for old in sorted(stored("cluster") + stored("model"), key=lambda u: -u.path.stat().st_mtime)[MAX_FILES:]:
        old.path.unlink(missing_ok=True)
    return Upload(kind=kind, name=kept, digest=digest, path=path)


def text_of(name: str, content: bytes) -> str:
    """Return the text of an uploaded file. Raises BadInput."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"byte {error.start + 1} is not UTF-8"
        raise BadInput(f"{name} is not text", why=why, remedy="upload the text itself, as UTF-8") from error


def harmless(name: str) -> str:
    """Return a file's name with nothing but letters, digits, dots, dashes and underscores, and without its folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", Path(name).name)[-48:].lstrip(".") or "file"


def is_model(content: bytes) -> bool:
    """Return whether a file looks like a model's config.json rather than a machine."""
    return content.lstrip()[:1] == b"{" and any(
        key in content for key in (b'"num_hidden_layers"', b'"n_layer"', b'"model_type"')
    )


def _read(kind: Kind, path: Path) -> None:
    if kind == "model":
        load_model(str(path))
    else:
        read_cluster(str(path))


def _renamed(error: PlannerError, path: str, name: str) -> PlannerError:
    """Return the error with the name of the uploaded file in place of the path where it is stored."""

    def rename(text: str) -> str:
        return text.replace(path, name).replace(Path(path).name, name).replace(Path(path).stem, Path(name).stem)

    return type(error)(rename(error.what), why=rename(error.why), remedy=rename(error.remedy))
