"""Versions of the software in this process on which results depend. Only the standard library."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path

PACKAGES = ("meshwright", "torch", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
DRIVER = Path("/proc/driver/nvidia/version")
SMI_S = 10.0  # seconds for nvidia-smi to answer


def versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def driver_version() -> str | None:
    """Return the version of the loaded NVIDIA driver, by the kernel, or by nvidia-smi where a container hides the
    kernel's word; None if there is none.
    """
    try:
        text = DRIVER.read_text(errors="replace")[:4096]
    except OSError:
        return _driver_by_smi()
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else None


def _driver_by_smi() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (
        next((line.strip() for line in done.stdout.splitlines() if line.strip()), None) if not done.returncode else None
    )


def differences(by_node: dict[str, dict[str, str]]) -> list[str]:
    """Return a line for each version that differs between nodes: `torch 2.11 on a, 2.10 on b, c`."""
    lines = []
    for name in sorted({name for found in by_node.values() for name in found}):
        nodes: dict[str, list[str]] = {}
        for node, found in by_node.items():
            nodes.setdefault(found.get(name, "absent"), []).append(node)
        if len(nodes) > 1:
            lines.append(f"{name} " + ", ".join(f"{version} on {', '.join(on[:8])}" for version, on in nodes.items()))
    return lines
