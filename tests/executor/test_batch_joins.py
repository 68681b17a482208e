"""Which batches torch copies once more where tensor-parallel ranks gather and scatter sequences cut by tokens."""

import pytest

torch = pytest.importorskip("torch")
collectives = pytest.importorskip("torch.distributed._functional_collectives")

from simulator.columns.plan_table import plan_table  # noqa: E402
from simulator.config.hf_config import load_model  # noqa: E402
from simulator.config.plan import Plan  # noqa: E402
from simulator.config.workload import Workload  # noqa: E402
from simulator.kernels.operators import active_rows  # noqa: E402
from simulator.runtimes.model_operators import operators_for  # noqa: E402
from simulator.runtimes.stated import resolve  # noqa: E402

RANKS = 4


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_gathered_batches_of_several_sequences_are_joined(batch):
    """What ranks send lies one after the other: of one sequence it is the sequence, of several it is copied."""
    joined = getattr(collectives, "_maybe_view_chunk_cat", None) or pytest.skip("torch before 2.10 always copies")
    sent = torch.arange(RANKS * batch * 6 * 2.0).reshape(RANKS * batch, 6, 2)
    whole = joined(sent, RANKS, gather_dim=1)
    plans = [
        Plan(tp=RANKS, sequence_parallel=True, micro_batch_size=batch, tp_overlap=mode) for mode in ("none", "async")
    ]
    table = plan_table(plans, Workload(seq_len=4096, global_batch_size=batch))
    operators = operators_for(load_model("llama3-8b"), resolve({"name": "torchtitan"})[0]).dense_layer
    copies = [active_rows(operator, table) for operator in operators if operator.name == "gather_join"]

    assert torch.equal(whole, torch.cat(sent.chunk(RANKS), dim=1))
    assert len(copies) == 2
    for runs in copies:
        assert runs.tolist() == [float(whole.data_ptr() != sent.data_ptr()), 0.0]


def test_plain_tensors_are_cut_by_rows_instead():
    operators = operators_for(load_model("llama3-8b"), resolve({"name": "meshwright"})[0]).dense_layer

    assert not any(operator.name in {"gather_join", "scatter_pieces"} for operator in operators)
