"""Settings at which Megatron-LM stops before it trains, and that describe no plan.

Source: megatron-core 0.19.2, `validate_args` of megatron/training/arguments.py, which checks command lines (`arguments`
among the facts), and `TransformerConfig.__post_init__`, which checks every configuration.
"""

from __future__ import annotations

from planner.export.mapping import Facts, NotStated, Settings, whole
from topology.errors import BadInput

_PER_STAGE, _STAGES = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
_WHOLE_LAYERS = ("--recompute-method", "--recompute-num-layers")


def read_stops(settings: Settings, facts: Facts) -> Facts:
    """Read no fact. Raises BadInput for what Megatron-LM refuses, NotStated for what it has no default for."""
    selective = settings.get("--recompute-activations")
    if settings.get("--recompute-granularity") == "full" and not selective:
        _require_method(settings)
    if facts.get("arguments"):
        _require_micro_batch(settings, facts)
        _refuse_long_sequences(settings)
        _refuse_stages_of_one(settings, facts)
    return {}


def _require_method(settings: Settings) -> None:
    if lacking := [flag for flag in _WHOLE_LAYERS if settings.get(flag) is None]:
        raise BadInput(
            f"--recompute-granularity full without {' and '.join(lacking)}",
            why="Megatron-LM stops at that",
            remedy="--recompute-method uniform --recompute-num-layers 1",
        )


def _require_micro_batch(settings: Settings, facts: Facts) -> None:
    if "--micro-batch-size" not in settings and not facts.get("micro_beside"):
        raise NotStated(
            "--micro-batch-size is not stated",
            why="Megatron-LM has no default for it",
            remedy="--micro-batch SEQUENCES",
        )


def _refuse_long_sequences(settings: Settings) -> None:
    length, most = settings.get("--seq-length"), settings.get("--max-position-embeddings")
    if isinstance(most, int) and isinstance(length, int) and most < length:
        raise BadInput(
            f"--seq-length {length} is more than --max-position-embeddings {most}",
            why="Megatron-LM stops at that",
            remedy=f"--max-position-embeddings {length}",
        )


def _refuse_stages_of_one(settings: Settings, facts: Facts) -> None:
    if whole(settings, "--pipeline-model-parallel-size", 1) > 1:
        return
    each = whole(settings, _PER_STAGE, 0, least=0)
    stages = facts.get("layers", 0) // each if each else whole(settings, _STAGES, 1)
    if stages > 1:
        raise BadInput(
            f"{_PER_STAGE if each else _STAGES} needs --pipeline-model-parallel-size of at least 2",
            why="Megatron-LM stops with one pipeline rank",
        )
