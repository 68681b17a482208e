"""Steps that read next to eight answers, after a pause and back to back, against those of the executor on one H200."""

from __future__ import annotations

import pytest

from simulator.config.hf_config import load_model
from simulator.serving.deployment import Deployment, Pool
from simulator.serving.forward_pass import ForwardPass
from simulator.serving.power import PowerLimit
from topology.catalog.cluster_file import load_cluster
from topology.catalog.gpus import gpu_kind

COSTS = ForwardPass(
    load_model("llama3-8b"), load_cluster("h200x4"), Deployment(engine="meshwright", pool=Pool()), Pool()
)
ANSWERS, CONTEXT = 8, 1100
# Seconds for which answers alone went on before, rows, measured seconds (examples/validation/serving_2xH200.md).
MEASURED = (
    (0.1, 1024, 23.44e-3),
    (0.1, 1536, 34.63e-3),
    (0.1, 2048, 47.15e-3),
    (0.1, 3072, 72.00e-3),
    (0.02, 2048, 49.09e-3),
    (0.02, 3072, 76.26e-3),
    (0.0, 1024, 26.80e-3),
    (0.0, 1536, 39.46e-3),
    (0.0, 2048, 53.41e-3),
    (0.0, 3072, 81.44e-3),
)


@pytest.mark.parametrize(("rested_s", "rows", "measured_s"), MEASURED)
def test_steps_after_others_take_as_long_as_measured(rested_s: float, rows: int, measured_s: float) -> None:
    read = rows - ANSWERS
    found = COSTS.seconds(
        prompt_tokens=read,
        pairs=read * (read + 1) / 2,
        sequences=ANSWERS,
        keys=float(ANSWERS * CONTEXT),
        rested_s=rested_s,
    )
    assert found == pytest.approx(measured_s, rel=0.03)


def test_more_spare_power_never_delays_products() -> None:
    limit = PowerLimit.of(gpu_kind("h200-sxm"), 1.3)
    spare = ((0.0, 0.0, 0.0), (2e-3, 0.0, 0.0), (2e-3, 2e-3, 0.0), (2e-3, 2e-3, 1e-2), (1.0, 1.0, 1.0))
    found = [
        limit.held_back(2e-2, moving_s=2e-2 * limit.least + moving, attending_s=attending, before_s=before)
        for moving, attending, before in spare
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(1.0)
    assert found[-1] == 0.0
