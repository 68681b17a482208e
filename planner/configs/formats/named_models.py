"""torchtitan's names of models as the models that come with this package."""

from __future__ import annotations

from functools import cache

from planner.export.schema import schema, shipped_model
from simulator.config.hf_config import load_model, shipped_models
from topology.errors import BadInput, Infeasible


@cache
def model_of_flavor(version: str, module: str, flavor: str) -> str:
    """Return the shipped model that torchtitan's flavor is. Raises BadInput where there is none."""
    for name in shipped_models():
        try:
            entry = shipped_model("torchtitan", version, load_model(name))
        except Infeasible:
            continue
        if entry["flavor"] == flavor and module in {entry["module"], "llama3_ft"}:
            return name
    known = ", ".join(f"{entry['module']} {entry['flavor']}" for entry in schema("torchtitan", version)["models"])
    raise BadInput(
        f"torchtitan's model {module[:40]} {flavor[:40]} is none that comes with this package",
        why=f"torchtitan {version} has {known}",
        remedy="--model with its config.json",
    )
