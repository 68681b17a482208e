"""What a profile says of several machines, as questions are told of it; and nothing, where none was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from simulator.calibration.calibration import Calibration
from topology.cluster import Cluster
from topology.profile.profile import Profile


class Calibrations(Protocol):
    """`strict` refuses a profile that is in doubt."""

    @property
    def profile(self) -> Profile | None: ...
    @property
    def strict(self) -> bool: ...

    def on(self, cluster: Cluster) -> Calibration | None:
        """Return what is known of a machine; None where nothing is. Raises what `check` raises."""

    def check(self, cluster: Cluster) -> list[str]:
        """Return `doubts`. Raises BadInput for samples that cannot be of the cluster, Stale for doubts where strict."""

    def doubts(self, cluster: Cluster) -> list[str]:
        """Return why the profile may not tell of `cluster`, one sentence each."""

    def all_doubts(self) -> list[str]:
        """Return the doubts about all machines that were asked about, each once."""


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """No profile."""

    profile: None = None
    strict: bool = False

    def on(self, _cluster: Cluster) -> None:
        return None

    def check(self, _cluster: Cluster) -> list[str]:
        return []

    def doubts(self, _cluster: Cluster) -> list[str]:
        return []

    def all_doubts(self) -> list[str]:
        return []


UNMEASURED = Unmeasured()
