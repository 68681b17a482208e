"""Keep the schemas by which Kubernetes judges our manifests: tests/data/kubernetes_schemas.json, offline and small.

    python -m venv /tmp/v && /tmp/v/bin/pip install kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0
    /tmp/v/bin/python tests/tools/kubernetes_schemas.py

Job and Service are of Kubernetes' OpenAPI document, strict (kubernetes-validate, Apache-2.0, as Kubernetes itself);
TrainJob and JobSet of the models that Kubeflow generates of its custom resources' definitions (kubeflow-trainer-api,
Apache-2.0). Descriptions are left out, and of the definitions those that none of the four reaches.
"""

from __future__ import annotations

import json
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

from kubeflow_trainer_api.models import JobsetV1alpha2JobSet, TrainerV1alpha1TrainJob

OUT = Path(__file__).resolve().parents[1] / "data" / "kubernetes_schemas.json"
RELEASE = "v1.37.0-local-strict"


def bare(node: Any) -> Any:
    """Return a schema without descriptions and titles, and with references below #/$defs."""
    if isinstance(node, list):
        return [bare(one) for one in node]
    if not isinstance(node, dict):
        return node
    found = {}
    for key, value in node.items():
        if (key in {"description", "title"} and isinstance(value, str)) or key.startswith("x-"):
            continue
        found[key] = "#/$defs/" + value.rpartition("/")[2] if key == "$ref" and isinstance(value, str) else bare(value)
    return found


def renamed(node: Any, names: dict[str, str]) -> Any:
    """Return a schema with other names in its references."""
    if isinstance(node, list):
        return [renamed(one, names) for one in node]
    if not isinstance(node, dict):
        return node
    found = {key: renamed(value, names) for key, value in node.items()}
    if isinstance(node.get("$ref"), str):
        name = node["$ref"].rpartition("/")[2]
        found["$ref"] = f"#/$defs/{names.get(name, name)}"
    return found


def references(node: Any) -> set[str]:
    """Return the names of the definitions that a schema uses."""
    if isinstance(node, list):
        return set().union(*map(references, node)) if node else set()
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"].rpartition("/")[2]} if isinstance(node.get("$ref"), str) else set()
    return own.union(*map(references, node.values())) if node else own


def strict(node: Any) -> Any:
    """Return a schema of pydantic's that takes no other keys, as the API server does with fieldValidation=Strict."""
    if isinstance(node, list):
        return [strict(one) for one in node]
    if not isinstance(node, dict):
        return node
    found = {key: strict(value) for key, value in node.items()}
    if "properties" in node and isinstance(node["properties"], dict) and node.get("type") == "object":
        found["additionalProperties"] = False
    return found


def main() -> None:
    package = Path(str(distribution("kubernetes-validate").locate_file("kubernetes_validate")))
    folder = package / "kubernetes-json-schema" / RELEASE
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    kinds = {
        "Job": json.loads((folder / "job-batch-v1.json").read_text()),
        "Service": json.loads((folder / "service-v1.json").read_text()),
    }
    for kind, model in (("TrainJob", TrainerV1alpha1TrainJob), ("JobSet", JobsetV1alpha2JobSet)):
        schema = strict(model.model_json_schema(by_alias=True))
        definitions |= schema.pop("$defs")
        kinds[kind] = schema
    # Kubeflow's copies of Kubernetes' own types have classes for what is a number or a text: take the originals.
    own = {name.replace(".", "").lower(): name for name in definitions if name.startswith("io.k8s.")}
    same = {name: own[name.lower()] for name in definitions if name.startswith("Io") and name.lower() in own}
    kinds, left = renamed(bare(kinds), same), set()
    wanted = references(kinds)
    while wanted:
        name = wanted.pop()
        left.add(name)
        definitions[name] = renamed(bare(definitions[name]), same)
        wanted |= references(definitions[name]) - left
    document = {
        "sources": {name: version(name) for name in ("kubernetes-validate", "kubeflow-trainer-api")},
        "licence": "Apache-2.0",
        "kinds": kinds,
        "$defs": {name: definitions[name] for name in sorted(left)},
    }
    OUT.write_text(json.dumps(document, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
