"""The driver's version: what the kernel says, and nvidia-smi where a container hides that."""

from pathlib import Path

import pytest

from topology import versions

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 30 03:01:43 UTC 2025\nGCC version: 12.2.0\n"
)


@pytest.mark.parametrize(("text", "version"), [(OPEN, "580.95.05"), (CLOSED, "570.133.20"), (None, "550.90.07")])
def test_driver_is_read_from_the_kernel_else_from_nvidia_smi(
    text: str | None, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 550.90.07\necho 550.90.07\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(versions, "DRIVER", tmp_path / "version")
    if text is not None:
        versions.DRIVER.write_text(text)

    assert versions.driver_version() == version

    smi.unlink()
    versions.DRIVER.unlink(missing_ok=True)
    assert versions.driver_version() is None
