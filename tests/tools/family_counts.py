"""Count the parameters of each row of tests/data/models/transformers_counts.json by transformers' own modules.

Run inside an environment that has them:

    python -m venv /tmp/v && /tmp/v/bin/pip install torch transformers==5.23.0
    /tmp/v/bin/python tests/tools/family_counts.py

It needs nothing of meshwright. A new family is a row with an `id` and a `config`; the counts are written here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

TABLE = Path(__file__).resolve().parents[1] / "data" / "models" / "transformers_counts.json"
SOURCE = (
    "transformers {} on torch {}: AutoModelForCausalLM.from_config on the meta device, tied weights counted once. "
    "selection_bias: elements of e_score_correction_bias, which transformers keeps as a buffer"
)


def counts(config: dict[str, Any]) -> dict[str, int]:
    """Return the parameters of a network, and the elements of its buffers that other software counts as parameters."""
    shape = {"pad_token_id": None, **{key: value for key, value in config.items() if key != "model_type"}}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config["model_type"], **shape)
        )
    biases = [value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")]
    return {
        "parameters": sum(value.numel() for value in model.parameters()),
        "selection_bias": sum(value.numel() for value in biases),
    }


def main() -> None:
    rows = json.loads(TABLE.read_text())["rows"]
    made = [json.dumps({"id": row["id"], "config": row["config"], **counts(row["config"])}) for row in rows]
    source = json.dumps(SOURCE.format(transformers.__version__, torch.__version__.partition("+")[0]))
    body = ",\n  ".join(made)
    TABLE.write_text(f'{{\n "source": {source},\n "rows": [\n  {body}\n ]\n}}\n')


if __name__ == "__main__":
    main()
