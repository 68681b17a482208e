"""stub"""

from __future__ import annotations
from simulator.calibration import Calibration, RuntimeCosts
from topology.cluster import Cluster
from topology.profile import Profile


def fit_runtimes(profile: Profile, cluster: Cluster, calibration: Calibration) -> dict[tuple[str, bool], RuntimeCosts]:
    return {}
