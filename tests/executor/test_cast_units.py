"""Parameters that one rank casts for itself, against autograd through casts."""

from __future__ import annotations

from itertools import product

import pytest

torch = pytest.importorskip("torch")

from executor.model.decoder import Decoder, init_weights  # noqa: E402 - as above
from executor.parallel.activation_checkpoint import apply_activation_checkpoint  # noqa: E402 - as above
from executor.parallel.cast_units import cast_units  # noqa: E402 - as above
from executor.parallel.parallelize import CASTS, FSDP, wrapper  # noqa: E402 - as above
from simulator.columns.plan_table import plan_table  # noqa: E402 - as above
from simulator.config.adapter import Adapter  # noqa: E402 - as above
from simulator.config.model import Model  # noqa: E402 - as above
from simulator.config.plan import Plan  # noqa: E402 - as above
from simulator.config.runtime import Runtime  # noqa: E402 - as above
from simulator.config.workload import Workload  # noqa: E402 - as above
from simulator.runtimes.library import runtime_spec, wraps_one  # noqa: E402 - as above

SHAPES = {
    "name": "tiny", "family": "x", "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 96,
}  # fmt: skip
TOKENS = torch.arange(24).view(3, 2, 4) * 7 % 96  # three micro batches


def _decoder(*, tied: bool, recompute: str = "none") -> Decoder:
    decoder = Decoder(Model(**SHAPES, layers=2, tied_embeddings=tied))
    init_weights(decoder, seed=1)
    decoder.set_positions(torch.arange(4), torch.bfloat16)
    apply_activation_checkpoint(decoder, recompute, early_stop=True, compiled=False)
    return decoder


@pytest.mark.parametrize("recompute", ["none", "full", "selective-op"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reshards", [False, True])
def test_gradients_are_those_of_casts(tied: bool, recompute: str, reshards: bool) -> None:
    """They are added up in the type of the parameters, whose casts are there in passes only."""
    decoder, plain = _decoder(tied=tied, recompute=recompute), _decoder(tied=tied)
    units = cast_units(decoder, torch.bfloat16, reshard_after_forward=reshards)
    kept = []
    for tokens in TOKENS:
        narrow = {name: p.to(torch.bfloat16) for name, p in plain.named_parameters()}
        torch.func.functional_call(plain, narrow, (tokens,)).float().square().mean().backward()
        out = decoder(tokens)
        kept.append([unit._here for unit in units])
        assert all(p.dtype == torch.float32 for p in decoder.parameters())
        out.float().square().mean().backward()

    assert kept[0] == ([not reshards] * 2 + ([True] if tied else [True, not reshards]))
    assert not any(unit._here for unit in units)
    for (name, found), (_, expected) in zip(decoder.named_parameters(), plain.named_parameters(), strict=True):
        assert found.grad is not None and torch.equal(found.grad, expected.grad), name  # noqa: PT018 - one thing


def test_what_needs_no_backward_pass_is_freed() -> None:
    decoder = _decoder(tied=True)
    units = cast_units(decoder, torch.bfloat16, reshard_after_forward=False)

    with torch.no_grad():
        decoder(TOKENS[0])

    assert not any(unit._here for unit in units)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("adapter", [None, Adapter(rank=8, target_modules=("all-linear",))])
def test_predictions_wrap_what_the_executor_wraps(stored: str, compiled: bool, adapter: Adapter | None) -> None:
    """Every mix of two ranks along each axis."""
    runtime = Runtime(
        name="meshwright", param_dtype=stored, compute_dtype="bfloat16", compile=compiled, adapter=adapter
    )
    axes = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
    plans = [Plan(**dict(zip(axes, degrees, strict=True))) for degrees in product((1, 2), repeat=len(axes))]
    plans = [plan for plan in plans if plan.ep <= plan.dp_replicate * plan.dp_shard * plan.cp]
    spec = runtime_spec("meshwright")
    table = plan_table(plans, Workload(seq_len=64, global_batch_size=64), wraps_one=wraps_one(spec, runtime))

    described = [
        CASTS if casts else FSDP if wrapped else ""
        for casts, wrapped in zip(table.casts_own, table.fully_sharded, strict=True)
    ]
    assert described == [wrapper(plan, runtime) for plan in plans]
