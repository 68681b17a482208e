"""Calibrations of several clusters from one profile, and doubts about whether it applies to them. Samples are fitted
when first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any

from simulator.calibration.calibration import Calibration
from topology.catalog.gpus import gpu_kind
from topology.cluster import Cluster, GpuKind
from topology.errors import BadCluster, Stale

if TYPE_CHECKING:
    from topology.profile.profile import Profile

MAX_AGE_DAYS = 180  # of a profile; drivers, libraries and machines change within this time


@dataclass(slots=True)
class Calibrations:
    """Calibrations from one profile, computed once for each cluster. With `strict`, a profile in doubt is refused."""

    profile: Profile | None
    strict: bool = False
    _found: list[tuple[Cluster, Calibration | None]] = field(default_factory=list)

    def on(self, cluster: Cluster) -> Calibration | None:
        """Return `calibrated(profile, cluster)`. Raises what `check` raises."""
        if self.profile is None:
            return None
        for known, calibration in self._found:
            if known == cluster:
                return calibration
        self.check(cluster)
        fit: Any = import_module("simulator.fitting.calibration_fit")  # imports all fits, which nothing else needs
        self._found.append((cluster, fit.calibrated(self.profile, cluster)))
        return self._found[-1][1]

    def check(self, cluster: Cluster) -> list[str]:
        """Return `doubts`.

        Raises BadInput if the profile's samples are faster than the cluster, Stale if it is in doubt and `strict`.
        """
        doubts = self.doubts(cluster)
        if doubts and self.strict:
            raise Stale(
                f"the profile is not of {cluster.name} as it is", why="; ".join(doubts), remedy="planner calibrate"
            )
        if self.profile is not None and same_gpu(self.profile, cluster.slowest_kind):
            from topology.profile.profile import check_profile  # noqa: PLC0415 - loaded with the profile

            check_profile(self.profile, cluster=cluster)
        return doubts

    def all_doubts(self) -> list[str]:
        """Return the doubts about all clusters that were asked about, each once."""
        return list(dict.fromkeys(doubt for cluster, _ in self._found for doubt in self.doubts(cluster)))

    def doubts(self, cluster: Cluster) -> list[str]:
        """Return the reasons why the profile may not apply to `cluster`, one sentence each."""
        return [] if self.profile is None else doubts_of(self.profile, cluster)


UNMEASURED = Calibrations(None)


def doubts_of(profile: Profile, cluster: Cluster) -> list[str]:
    """Return the reasons why `profile` may not apply to `cluster`: other GPUs, another driver, or measured long ago."""
    kind = cluster.slowest_kind
    if not same_gpu(profile, kind):
        return [f"the profile was taken on {profile.gpu}, the cluster has {kind.title}: it is not used"]
    said = []
    drivers = sorted({finding.what for finding in cluster.findings if finding.code == "driver"})
    if profile.driver and drivers and f"driver {profile.driver}" not in drivers:
        said.append(f"the profile was taken under driver {profile.driver}, the machine has {', '.join(drivers)}")
    taken = _date(profile.taken_at)
    if taken is None:
        said.append("the profile does not say when it was taken")
    elif (datetime.now(UTC) - taken).days > MAX_AGE_DAYS:
        said.append(f"the profile was taken on {taken:%Y-%m-%d}, more than {MAX_AGE_DAYS} days ago")
    return said


def _date(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def same_gpu(profile: Profile, kind: GpuKind) -> bool:
    """Return whether a profile was taken on GPUs of `kind`. A GPU that is not in the catalogue is not of this kind."""
    try:
        return gpu_kind(profile.gpu).name == kind.name
    except BadCluster:
        return False
