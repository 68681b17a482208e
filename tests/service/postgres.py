"""A PostgreSQL server of our own, from the binaries of this machine's distribution, in a temporary folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

USER = "meshwright"
DAEMON = "postgres"  # the system's user for it: the server refuses to run as root


def binaries() -> Path | None:
    """Return the folder of the newest `postgres` and `initdb` of this machine; None where there are none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    on_path = shutil.which("initdb")
    return found[-1] if found else Path(on_path).resolve().parent if on_path else None


@dataclass
class Server:
    """A server on a socket in `folder`, which tests start and stop."""

    folder: Path
    bin: Path

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@/postgres?host={self.folder}"

    @property
    def _as(self) -> dict[str, str]:
        return {"user": DAEMON} if os.name == "posix" and os.getuid() == 0 else {}

    def make(self) -> None:
        self.folder.mkdir(parents=True)
        if self._as:
            shutil.chown(self.folder, DAEMON)
        data = str(self.folder / "data")
        made = [str(self.bin / "initdb"), "-D", data, "-U", USER, "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(made, check=True, capture_output=True, cwd="/", **self._as)

    def start(self) -> None:
        data = str(self.folder / "data")
        started = [str(self.bin / "pg_ctl"), "-D", data, "-w", "-t", "60", "-o", f"-k {self.folder} -h '' -F", "start"]
        log = self.folder / "log"
        subprocess.run([*started, "-l", str(log)], check=True, stdout=subprocess.DEVNULL, cwd="/", **self._as)

    def stop(self, how: str = "fast") -> None:
        data = str(self.folder / "data")
        subprocess.run(
            [str(self.bin / "pg_ctl"), "-D", data, "-m", how, "-w", "stop"],
            check=False,
            stdout=subprocess.DEVNULL,
            cwd="/",
            **self._as,
        )
