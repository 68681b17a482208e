"""Every plan computes what one process computes: losses, gradients and updated parameters, on gloo processes.

One launch runs many plans, because starting processes costs more than the plans do. The tolerances are those of
`executor.verify.plans` (2^10 units in the last place of the type); float64 is used so that a mistake cannot hide in
rounding.
"""

import json
from pathlib import Path

import pytest

from tests.executor.forked_ranks import run_module
from tests.executor.launched_once import made_once

pytest.importorskip("torch", reason="torch is not installed: plans cannot be run")

pytestmark = pytest.mark.slow

WORKER = "tests.executor.workers.verify_worker"

BOTH = ["chunked_loss", "optimizer_in_backward"]
# id, what differs from the default case, plan. Two layers, 8 sequences of 16 tokens, float64, if nothing else is said.
TWO = {
    "ddp": ({}, {"dp_replicate": 2, "micro_batch_size": 2}),
    "ddp-tied": ({"model": "tied"}, {"dp_replicate": 2, "micro_batch_size": 2}),
    "fsdp": ({}, {"dp_shard": 2, "micro_batch_size": 2}),
    "fsdp-float32": ({"dtype": "float32"}, {"dp_shard": 2, "micro_batch_size": 2}),
    "fsdp-copies": ({}, {"dp_shard": 2, "micro_batch_size": 2, "fsdp_exchange": "copy_engine"}),
    "fsdp-tied": ({"model": "tied"}, {"dp_shard": 2, "micro_batch_size": 4}),
    "tp": ({}, {"tp": 2, "micro_batch_size": 8}),
    "tp-sp": ({"model": "qk_norm"}, {"tp": 2, "sequence_parallel": True, "micro_batch_size": 8}),
    "cp": ({}, {"cp": 2, "micro_batch_size": 8, "cp_method": "ring"}),
    "cp-heads": ({}, {"cp": 2, "micro_batch_size": 8, "cp_method": "all_to_all"}),
    "cp-heads-window": ({"model": "window"}, {"cp": 2, "micro_batch_size": 8, "cp_method": "all_to_all"}),
    "cp-heads-latent": ({"model": "latent"}, {"cp": 2, "micro_batch_size": 8, "cp_method": "all_to_all"}),
    "cp-all-gather": ({}, {"cp": 2, "micro_batch_size": 8, "cp_method": "all_gather"}),
    "latent-tp": ({"model": "latent"}, {"tp": 2, "sequence_parallel": True, "micro_batch_size": 8}),
    "latent-tp-whole": ({"model": "latent"}, {"tp": 2, "micro_batch_size": 8}),
    "latent-fsdp": ({"model": "latent"}, {"dp_shard": 2, "micro_batch_size": 4, "recompute": "full"}),
    "window-tp": ({"model": "window"}, {"tp": 2, "sequence_parallel": True, "micro_batch_size": 8}),
    "window-pp": ({"model": "window"}, {"pp": 2, "micro_batch_size": 2}),
    "shared-ddp": ({"model": "shared"}, {"dp_replicate": 2, "micro_batch_size": 4}),
    "shared-tp": ({"model": "shared"}, {"tp": 2, "micro_batch_size": 8}),
    "shared-ep": ({"model": "shared"}, {"dp_shard": 2, "ep": 2, "micro_batch_size": 4}),
    "ep": ({"model": "moe"}, {"dp_shard": 2, "ep": 2, "micro_batch_size": 4}),
    "pp-gpipe": ({}, {"pp": 2, "schedule": "GPipe", "micro_batch_size": 2}),
    "pp-1f1b": ({}, {"pp": 2, "schedule": "1F1B", "micro_batch_size": 2}),
    "pp-1f1b-own-table": ({"own_table": True}, {"pp": 2, "schedule": "1F1B", "micro_batch_size": 2}),
    "pp-zbh1-own-table": ({}, {"pp": 2, "schedule": "ZBH1", "micro_batch_size": 2}),
    "pp-interleaved": (
        {"model": "four"},
        {"pp": 2, "virtual_stages": 2, "schedule": "Interleaved1F1B", "micro_batch_size": 2},
    ),
    "pp-looped-bfs": (
        {"model": "four"},
        {"pp": 2, "virtual_stages": 2, "schedule": "LoopedBFS", "micro_batch_size": 2},
    ),
    "pp-zbv": ({"model": "four"}, {"pp": 2, "virtual_stages": 2, "schedule": "ZBVZeroBubble", "micro_batch_size": 2}),
    "pp-zbv-own-table": (
        {"model": "four", "own_table": True},
        {"pp": 2, "virtual_stages": 2, "schedule": "ZBVZeroBubble", "micro_batch_size": 2},
    ),
    "pp-dualpipev": (
        {"model": "four"},
        {"pp": 2, "virtual_stages": 2, "schedule": "DualPipeV", "micro_batch_size": 2},
    ),
    "pp-dualpipev-own-table": (
        {"model": "four", "own_table": True},
        {"pp": 2, "virtual_stages": 2, "schedule": "DualPipeV", "micro_batch_size": 2},
    ),
    "pp-recompute-per-stage": (
        {"model": "four"},
        {
            "pp": 2,
            "virtual_stages": 2,
            "schedule": "Interleaved1F1B",
            "recompute_per_stage": ["full", "none", "selective-op", "selective"],
            "micro_batch_size": 2,
        },
    ),
    # Kept results: of every kind of attention, and of reductions.
    "tp-selective-op": ({}, {"tp": 2, "recompute": "selective-op", "micro_batch_size": 8}),
    "tp-sp-selective-op": (
        {"model": "qk_norm"},
        {"tp": 2, "sequence_parallel": True, "recompute": "selective-op", "micro_batch_size": 4},
    ),
    "cp-selective-op": ({}, {"cp": 2, "micro_batch_size": 8, "recompute": "selective-op", "cp_method": "ring"}),
    "cp-heads-selective-op": (
        {},
        {"cp": 2, "micro_batch_size": 8, "recompute": "selective-op", "cp_method": "all_to_all"},
    ),
    "latent-selective-op": (
        {"model": "latent"},
        {"tp": 2, "sequence_parallel": True, "recompute": "selective-op", "micro_batch_size": 8},
    ),
    "ep-selective-op": ({"model": "moe"}, {"dp_shard": 2, "ep": 2, "recompute": "selective-op", "micro_batch_size": 4}),
    # Allowed because they were seen to run: unequal widths, halves of a rank that tp does not divide, ends without
    # layers.
    "odd-tp": ({"model": "odd"}, {"tp": 2, "micro_batch_size": 8}),
    "odd-tp-sp-overlap": (
        {"model": "odd"},
        {"tp": 2, "sequence_parallel": True, "tp_overlap": "chunked", "micro_batch_size": 8},
    ),
    "odd-moe-tp": ({"model": "odd_moe"}, {"tp": 2, "sequence_parallel": True, "micro_batch_size": 8}),
    "latent-overlap": (
        {"model": "latent"},
        {
            "tp": 2,
            "sequence_parallel": True,
            "tp_overlap": "attention_out=chunked,mlp_in=chunked,mlp_out=chunked",
            "micro_batch_size": 8,
        },
    ),
    "pp-uneven": ({"model": "four"}, {"pp": 2, "layers_per_stage": [3, 1], "micro_batch_size": 2}),
    "lora-ddp": (
        {"adapter": {"rank": 4, "target_modules": ["all-linear"]}},
        {"dp_replicate": 2, "micro_batch_size": 2},
    ),
    "lora-fsdp": (
        {"adapter": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}},
        {"dp_shard": 2, "recompute": "selective-op", "micro_batch_size": 2},
    ),
    "lora-pp": (
        {"adapter": {"rank": 4, "target_modules": ["all-linear"]}},
        {"pp": 2, "schedule": "1F1B", "micro_batch_size": 2},
    ),
    "frozen-fsdp": (
        {"adapter": {"kind": "frozen", "target_modules": ["embed_tokens", "mlp", "norm"]}},
        {"dp_shard": 2, "recompute": "full", "micro_batch_size": 4},
    ),
    # Head and loss piece by piece, with gradients added up and for a tied head; parameters updated as gradients come.
    "pieces-ddp": ({"savers": ["chunked_loss"]}, {"dp_replicate": 2, "micro_batch_size": 2}),
    "pieces-fsdp-tied": ({"model": "tied", "savers": BOTH}, {"dp_shard": 2, "micro_batch_size": 4}),
    "pieces-cp": (
        {"savers": [*BOTH, "activation_offload"]},
        {"cp": 2, "recompute": "full", "micro_batch_size": 8, "cp_method": "ring"},
    ),
}
MIXED = {
    "mixed": "attention_in=copy_engine,mlp_in=fused,mlp_out=chunked",
    "one-scatter": "attention_out=chunked",
    "one-gather": "mlp_in=chunked",
}
OVERLAP = {
    f"tp-overlap-{name}": (
        {"model": "qk_norm"},
        {
            "tp": 2,
            "sequence_parallel": True,
            "tp_overlap": text,
            "micro_batch_size": 8,
            "recompute": "selective-op" if name == "chunked" else "none",
        },
    )
    for name, text in {
        **{mode: mode for mode in ("chunked", "copy_engine", "fused")},
        **MIXED,
    }.items()
}
TWO |= OVERLAP
COMPILED = {
    f"compiled-{name}": ({**TWO[name][0], "compile": True}, TWO[name][1])
    for name in ("ddp", "fsdp-tied", "tp", "tp-sp-selective-op", "latent-tp", "cp", "cp-heads", "ep", "pp-1f1b")
}
# The compiler takes seconds a plan, ten where experts are sharded: two kinds of graphs are compiled every time, all of
# them nightly.
SELDOM = COMPILED.keys() - {"compiled-tp-sp-selective-op", "compiled-cp"}
TWO |= COMPILED
FOUR = {
    "pieces-hsdp": ({"savers": BOTH}, {"dp_replicate": 2, "dp_shard": 2, "micro_batch_size": 2}),
    "hsdp": ({}, {"dp_replicate": 2, "dp_shard": 2, "micro_batch_size": 1}),
    "fsdp-selective": ({}, {"dp_shard": 4, "recompute": "selective", "micro_batch_size": 2}),
    "replicate-tp": ({}, {"dp_replicate": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 4}),
    "fsdp-tp-selective-op": (
        {"model": "qk_norm"},
        {"dp_shard": 2, "tp": 2, "sequence_parallel": True, "recompute": "selective-op", "micro_batch_size": 4},
    ),
    "fsdp-tp-float32": (
        {"dtype": "float32"},
        {"dp_shard": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 4},
    ),
    "fsdp-tp-tied": ({"model": "tied"}, {"dp_shard": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 4}),
    "cp4": ({"seq_len": 32}, {"cp": 4, "micro_batch_size": 8, "cp_method": "ring"}),
    "cp-heads-tp": (
        {"model": "wide"},
        {"cp": 2, "tp": 2, "sequence_parallel": True, "cp_method": "all_to_all", "micro_batch_size": 8},
    ),
    "cp4-all-gather": ({"seq_len": 32}, {"cp": 4, "micro_batch_size": 8, "cp_method": "all_gather"}),
    "fsdp-cp-full": ({}, {"dp_shard": 2, "cp": 2, "recompute": "full", "micro_batch_size": 4}),
    "cp-tp": ({}, {"cp": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 8}),
    "fsdp-ep2": ({"model": "half_moe"}, {"dp_shard": 4, "ep": 2, "micro_batch_size": 2}),
    "hsdp-ep-full": (
        {"model": "moe"},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "recompute": "full", "micro_batch_size": 2},
    ),
    "ep-cp": ({"model": "moe"}, {"dp_shard": 2, "cp": 2, "ep": 4, "micro_batch_size": 4}),
    "ep-tp": ({"model": "moe"}, {"dp_shard": 2, "tp": 2, "ep": 4, "sequence_parallel": True, "micro_batch_size": 4}),
    "latent-fsdp-tp": (
        {"model": "latent"},
        {"dp_shard": 2, "tp": 2, "sequence_parallel": True, "recompute": "selective-op", "micro_batch_size": 4},
    ),
    "latent-pp-tp": ({"model": "latent"}, {"pp": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 2}),
    "shared-ep-tp": (
        {"model": "shared"},
        {"dp_shard": 2, "tp": 2, "ep": 4, "sequence_parallel": True, "micro_batch_size": 4},
    ),
    "moe-tp": ({"model": "moe"}, {"dp_shard": 2, "tp": 2, "micro_batch_size": 4}),
    "pp-fsdp": ({}, {"pp": 2, "dp_shard": 2, "micro_batch_size": 1}),
    "pp-fsdp-own-table": ({"own_table": True}, {"pp": 2, "dp_shard": 2, "schedule": "1F1B", "micro_batch_size": 1}),
    "pp-fsdp-interleaved-zero-bubble": (
        {"model": "four"},
        {
            "pp": 2,
            "virtual_stages": 2,
            "dp_shard": 2,
            "schedule": "InterleavedZeroBubble",
            "micro_batch_size": 1,
        },
    ),
    "pp-fsdp-zbv": (
        {"model": "four"},
        {"pp": 2, "virtual_stages": 2, "dp_shard": 2, "schedule": "ZBVZeroBubble", "micro_batch_size": 1},
    ),
    "pp-tp-dualpipev": (
        {"model": "four"},
        {
            "pp": 2,
            "virtual_stages": 2,
            "tp": 2,
            "sequence_parallel": True,
            "schedule": "DualPipeV",
            "micro_batch_size": 2,
        },
    ),
    "pp-tp": ({}, {"pp": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 2}),
    "pp-cp": ({}, {"pp": 2, "cp": 2, "micro_batch_size": 2}),
    "pp-ep": ({"model": "moe"}, {"pp": 2, "dp_shard": 2, "ep": 2, "micro_batch_size": 1}),
    "odd-pp-tp": ({"model": "odd"}, {"pp": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 2}),
    "odd-fsdp-tp": ({"model": "odd"}, {"dp_shard": 2, "tp": 2, "micro_batch_size": 4}),
    "cp-tp-odd-halves": ({"seq_len": 12}, {"cp": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 8}),
    "pp4-bare-ends": ({}, {"pp": 4, "micro_batch_size": 1}),
    "pp4": ({"model": "four"}, {"pp": 4, "micro_batch_size": 1}),
}
# Takes as long as all others on four ranks together; its parts are compiled on two.
COMPILED_ON_FOUR = "fsdp-tp-selective-op"
FOUR[f"compiled-{COMPILED_ON_FOUR}"] = ({**FOUR[COMPILED_ON_FOUR][0], "compile": True}, FOUR[COMPILED_ON_FOUR][1])
EIGHT = {
    "fsdp-cp-tp": ({}, {"dp_shard": 2, "cp": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 4}),
    "hsdp-tp": (
        {},
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 2},
    ),
    "pp-fsdp-tp": ({}, {"pp": 2, "dp_shard": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 2}),
    "pp-cp-tp": ({}, {"pp": 2, "cp": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 4}),
    "pp-fsdp-cp": ({}, {"pp": 2, "dp_shard": 2, "cp": 2, "micro_batch_size": 2}),
    "pp-fsdp-tp-ep": (
        {"model": "moe"},
        {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 4, "sequence_parallel": True, "micro_batch_size": 2},
    ),
}
# One step in float32 stored and bfloat16 computed, as it would be timed.
TYPES = {
    f"types-{name}": ({**TWO[name][0], "types": True}, TWO[name][1])
    for name in (
        "ddp",
        "fsdp",
        "tp",
        "tp-sp",
        "cp",
        "cp-all-gather",
        "cp-heads",
        "ep",
        "pp-1f1b",
        "latent-tp",
        "tp-sp-selective-op",
        "lora-fsdp",
        "frozen-fsdp",
        "pieces-fsdp-tied",
    )
}
# A gradient that is wrong by one part in 1e9 on one rank.
WRONG = {"wrong-gradient": ({"fault": 1e-9}, {"dp_shard": 2, "micro_batch_size": 4})}
# In bfloat16 one process is off by about a percent, so what is seen is a mistake of structure: here, a rank twice.
WRONG_TYPES = {"wrong-types": ({"fault": 1.0, "types": True}, {"dp_shard": 2, "micro_batch_size": 4})}
NO_NUMBER = {"no-number": ({"fault": "nan"}, {"dp_shard": 2, "micro_batch_size": 4})}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Return a function that launches those cases that were selected, once, and returns the folder of the answers."""
    ours = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    parameters = [item.callspec.params for item in ours]
    selected = {(found.get("ranks"), found.get("name")) for found in parameters}

    def run(ranks: int) -> Path:
        def make(folder: Path) -> None:
            cases = {2: TWO | TYPES, 4: FOUR, 8: EIGHT}[ranks]
            cases = {name: case for name, case in cases.items() if (ranks, name) in selected}
            if ranks == 2:
                cases |= WRONG | WRONG_TYPES | NO_NUMBER
            listed = [{"id": name, **changes, "plan": plan} for name, (changes, plan) in cases.items()]
            (folder / "cases.json").write_text(json.dumps(listed))
            run_module(WORKER, [str(folder / "cases.json"), str(folder)], ranks)

        # One that failed is not tried again: its folder is there, and says why.
        return made_once(tmp_path_factory, f"plans-{ranks}", make)

    return run


def _verdict(folder: Path, name: str) -> dict:
    path = folder / f"{name}.json"
    assert path.is_file(), "\n".join(p.read_text() for p in folder.glob(f"{name}.rank0.txt"))
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("ranks", "name"),
    [pytest.param(2, name, marks=[pytest.mark.nightly] * (name in SELDOM)) for name in TWO | TYPES]
    + [pytest.param(4, name, marks=[pytest.mark.nightly] * name.startswith("compiled")) for name in FOUR]
    + [(8, name) for name in EIGHT],
)
def test_a_plan_computes_what_one_process_computes(results, ranks: int, name: str) -> None:
    found = _verdict(results(ranks), name)

    assert found["ok"], found["verdict"]


def test_a_gradient_wrong_by_a_billionth_is_seen(results) -> None:
    found = _verdict(results(2), "wrong-gradient")

    assert not found["ok"]
    assert found["verdict"]["gradient"] == pytest.approx(1e-9, rel=1e-3)


def test_a_mistake_of_structure_is_seen_in_narrow_types(results) -> None:
    found = _verdict(results(2), "wrong-types")

    assert not found["ok"]
    assert found["verdict"]["gradient"] == pytest.approx(1.0, abs=0.1)
    assert found["verdict"]["allowed"] < 0.3


def test_a_gradient_that_is_no_number_is_infinitely_wrong(results) -> None:
    found = _verdict(results(2), "no-number")

    assert not found["ok"]
    assert found["verdict"]["gradient"] is None  # JSON has no word for infinity


@pytest.fixture(scope="module")
def precisions(tmp_path_factory) -> dict:
    """Losses of plans in two precisions, and differences of kernels, from one launch."""

    def make(folder: Path) -> None:
        run_module("tests.executor.workers.precision_worker", [str(folder / "losses.json")], 2)

    return json.loads((made_once(tmp_path_factory, "precision", make) / "losses.json").read_text())


def test_computing_in_bfloat16_keeps_parameters_wide_and_the_loss_near(precisions) -> None:
    """Losses of about ln 128 = 4.85 differ by the rounding of bfloat16 logits, 2^-9 of numbers below 1."""
    names = {name.rpartition("-")[0] for name in precisions if name.endswith("-bfloat16")}

    assert len(names) == 7
    for name in names:
        wide, narrow = precisions[f"{name}-float32"], precisions[f"{name}-bfloat16"]
        assert narrow[0] != wide[0], name
        assert narrow[0] == pytest.approx(wide[0], abs=2e-3), name
        assert narrow[1] == ["torch.float32"], name


def test_what_is_verified_is_built_as_what_is_timed(precisions) -> None:
    """Every module of every plan has the same type, whether it computes in float64 or in bfloat16 from float32."""
    for name, built in precisions.items():
        if name.endswith("-bfloat16"):
            assert built[2] == precisions[f"{name.rpartition('-')[0]}-float64"][2], name


def test_tensor_parallelism_alone_in_one_type_is_not_wrapped(precisions) -> None:
    wrapped = {
        name.removesuffix("-float32"): any(kind.startswith("FSDP") for _, kind in built[2])
        for name, built in precisions.items()
        if name.endswith("-float32")
    }

    assert wrapped == {
        "ddp": False, "ddp-moe": False, "fsdp": True, "ep": True, "tp": False, "cp": True, "pp": True,
    }  # fmt: skip


def test_kernels_agree_with_float64_to_the_rounding_of_their_type(precisions) -> None:
    for difference, tolerance in precisions["kernels-torch.bfloat16"]:
        assert 1e-4 < difference <= tolerance < 0.2  # rounding is seen, and bounded
    for difference, _ in precisions["kernels-torch.float64"]:
        assert difference < 1e-13
