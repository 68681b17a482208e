"""Parts of the executor that need no second process, against torch's own or closed forms."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn import functional  # noqa: E402 - after the check for torch

from executor.model.decoder import Decoder, draw  # noqa: E402 - as above
from executor.model.moe import Experts  # noqa: E402 - as above
from executor.parallel.context_parallel import combine, part_backward, part_forward, positions  # noqa: E402 - as above
from executor.parallel.train_step import rank_batch, row  # noqa: E402 - as above
from executor.verify.plans import small_model, small_plan, small_workload  # noqa: E402 - as above
from simulator.config.hf_config import load_model  # noqa: E402 - as above
from simulator.config.plan import Plan  # noqa: E402 - as above
from simulator.config.workload import Workload  # noqa: E402 - as above


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_token_is_held_once_and_causal_work_is_even(world: int) -> None:
    length = 24
    held = [positions(length, rank, world, torch.device("cpu")) for rank in range(world)]

    assert sorted(torch.cat(held).tolist()) == list(range(length))
    assert len({int((part + 1).sum()) for part in held}) == 1  # keys that a rank's queries meet


def test_attention_over_parts_is_attention_over_all() -> None:
    q, k, v = random(2, 4, 6, 8), random(2, 2, 10, 8, seed=1), random(2, 2, 10, 8, seed=2)

    first, second = (part_forward(q, k[:, :, s], v[:, :, s], causal=False) for s in (slice(0, 3), slice(3, 10)))
    out, _ = combine([(slice(None), *first), (slice(None), *second)])

    expected = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_a_part_are_those_of_autograd(causal: bool) -> None:
    q, k, v = (random(2, heads, 6, 8, seed=heads).requires_grad_() for heads in (4, 2, 2))
    grad = random(2, 4, 6, 8, seed=9)
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    expected.backward(grad)

    with torch.no_grad():
        out, lse = part_forward(q, k, v, causal=causal)
        found = part_backward(grad, q, k, v, out, lse, causal=causal)

    for mine, theirs in zip(found, (q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["tiny-llama", "llama3-8b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen2.5-7b"])
def test_the_decoder_has_as_many_parameters_as_the_model_says(name: str) -> None:
    model = load_model(name)
    with torch.device("meta"):
        decoder = Decoder(model)

    assert sum(p.numel() for p in decoder.parameters()) == model.parameters


def test_parts_of_a_model_have_the_names_of_the_whole() -> None:
    model = load_model("tiny-llama")
    with torch.device("meta"):
        whole = dict(Decoder(model).named_parameters())
        head, tail = Decoder(model, range(3), last=False), Decoder(model, range(3, 4), first=False)

    assert {*dict(head.named_parameters()), *dict(tail.named_parameters())} == set(whole)


def test_weights_depend_on_name_and_seed_alone() -> None:
    def one(name: str, seed: int) -> torch.Tensor:
        return draw(name, torch.Size((8, 4)), seed=seed, device=torch.device("cpu"), dtype=torch.float32)

    assert torch.equal(one("layers.0.attention.wq.weight", 1), one("layers.0.attention.wq.weight", 1))
    assert not torch.equal(one("layers.0.attention.wq.weight", 1), one("layers.1.attention.wq.weight", 1))
    assert not torch.equal(one("layers.0.attention.wq.weight", 1), one("layers.0.attention.wq.weight", 2))


def test_ranks_together_hold_the_batch_once() -> None:
    plan, work = Plan(dp_shard=2, cp=2), Workload(seq_len=16, global_batch_size=4)
    whole = torch.stack([row(i, 0, vocab=50, seq_len=16, seed=0) for i in range(4)])

    for data in range(2):
        for cp in range(2):
            tokens, targets = rank_batch(plan, work, vocab=50, step=0, seed=0, data_rank=data, cp_rank=cp)
            held = positions(16, cp, 2, torch.device("cpu"))
            assert torch.equal(tokens, whole[2 * data : 2 * data + 2][:, held])
            assert torch.equal(targets, whole[2 * data : 2 * data + 2][:, held + 1])


def test_experts_without_tokens_have_a_gradient_of_zero() -> None:
    experts = Experts(4, 8, 3).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)

    experts(random(5, 4), torch.tensor([2, 0, 3])).sum().backward()

    assert experts.w1.grad[1].abs().max() == 0
    assert experts.w1.grad[0].abs().max() > 0


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama3-70b", Plan(dp_shard=2, tp=8, sequence_parallel=True)),
        ("llama3-8b", Plan(pp=4, virtual_stages=2, schedule="Interleaved1F1B", dp_shard=2)),
        ("qwen3-30b-a3b", Plan(dp_shard=2, tp=4, ep=8, sequence_parallel=True)),
        ("mixtral-8x7b", Plan(cp=4, dp_shard=2, ep=8)),
    ],
)
def test_the_small_model_of_a_check_suits_the_plan(name: str, plan: Plan) -> None:
    from executor.launch.legal import check
    from simulator.config.runtime import Runtime

    model = small_model(load_model(name), plan)
    work = small_workload(plan, Workload(seq_len=8192, global_batch_size=128))

    check(small_plan(plan), model, work, Runtime(param_dtype="float64", compute_dtype="float64"))
    assert model.parameters < 1e6
    assert model.qk_norm == load_model(name).qk_norm


def test_rows_taken_in_another_order_come_back_with_their_gradients() -> None:
    """Against autograd's own way back from an index, for a permutation and for three copies of each row."""
    from executor.model.permute import inverse_of, take

    for copies in (1, 3):
        x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(copies)).requires_grad_()
        order = torch.randperm(5 * copies, generator=torch.Generator().manual_seed(7))
        slope = torch.randn(5 * copies, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
        plain = x.detach().clone().requires_grad_()

        found, expected = take(x, order, inverse_of(order), copies=copies), plain[order // copies]
        found.backward(slope)
        expected.backward(slope)

        assert torch.equal(found, expected)
        assert torch.allclose(x.grad, plain.grad, rtol=1e-14, atol=0)


def test_the_loss_and_its_gradient_are_those_of_cross_entropy(monkeypatch) -> None:
    """The slope of a rank's columns, as the cut loss computes it, where one rank has all of them; eagerly, by
    pieces.
    """
    from executor.model import vocabulary_loss
    from executor.model.vocabulary_loss import VocabularyLoss, _exp_sums, _logits_grad, _row_max

    logits = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.tensor([[0, 6, 3], [2, 2, 5]])

    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    (slope,) = torch.autograd.grad(expected, logits)
    for piece in (1, 16, 1 << 23):  # of one token, of two, and of all
        monkeypatch.setattr(vocabulary_loss, "PIECE_LOGITS", piece)
        loss = VocabularyLoss(7, None, compiled=False)(logits, targets)
        assert torch.allclose(loss, expected, rtol=1e-14, atol=0)
        (found,) = torch.autograd.grad(3 * loss, logits)
        assert torch.allclose(found, 3 * slope, rtol=1e-12, atol=1e-15)
    flat, column, mine = logits.detach().flatten(0, 1), targets.flatten(), torch.ones(6, dtype=torch.bool)
    row_max = _row_max(flat)
    total, chosen = _exp_sums(flat, row_max, column, mine)
    assert torch.allclose((total.log() - chosen).sum(), expected.detach(), rtol=1e-14)
    cut = _logits_grad(flat, row_max, total, column, mine, torch.tensor(1.0, dtype=torch.float64))
    assert torch.allclose(cut, slope.flatten(0, 1), rtol=1e-12)


@pytest.mark.parametrize("frozen", ["nothing", "head", "tokens"])
@pytest.mark.parametrize("kind", ["float64", "autocast"])
def test_a_head_in_pieces_has_the_loss_and_gradients_of_both_together(kind, frozen, monkeypatch) -> None:
    """Five tokens in pieces of two, against one product and torch's cross entropy in float64."""
    from executor.model import vocabulary_loss
    from executor.model.vocabulary_loss import HeadInPieces, VocabularyLoss

    monkeypatch.setattr(vocabulary_loss, "HEAD_LOGITS", 2 * 7)
    draw = torch.Generator().manual_seed(0)
    dtype = torch.float64 if kind == "float64" else torch.float32
    x = torch.randn(1, 5, 4, dtype=torch.float64, generator=draw).to(dtype).requires_grad_(frozen != "tokens")
    head = torch.nn.Linear(4, 7, bias=False, dtype=dtype).requires_grad_(frozen != "head")
    targets = torch.tensor([[0, 6, 3, 2, 5]])
    trained = [one for one in (x, head.weight) if one.requires_grad]
    pieces = HeadInPieces.of(head, VocabularyLoss(7, None, compiled=False))

    exact = torch.nn.functional.cross_entropy(
        (x.double() @ head.weight.double().t()).flatten(0, 1), targets.flatten(), reduction="sum"
    )
    expected = torch.autograd.grad(exact / 3, trained)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        loss = pieces(x, targets)
    found = torch.autograd.grad(loss / 3, trained)

    near = {"rtol": 1e-12, "atol": 1e-14} if kind == "float64" else {"rtol": 0.02, "atol": 0.02}
    assert float(loss) == pytest.approx(exact.item(), rel=near["rtol"])
    assert all(torch.allclose(one, other, **near) for one, other in zip(found, expected, strict=True))


def test_a_model_updated_in_backward_goes_when_it_is_let_go() -> None:
    """Plans that share processes come one after the other: states of one that is over would fill the next one's GPU."""
    from executor.parallel.optimizer_in_backward import OptimizerInBackward

    module = torch.nn.Linear(3, 2)
    updates = OptimizerInBackward(module.named_parameters(), torch.optim.AdamW)
    module(torch.ones(1, 3)).sum().backward()
    kept = weakref.ref(module.weight), weakref.ref(updates)
    assert float(updates.norm(torch.device("cpu"))) == pytest.approx((2 * 4) ** 0.5)
    gc.disable()
    try:
        del module, updates
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()


def test_angles_of_another_type_are_read_by_a_kernel_of_their_own(monkeypatch) -> None:
    """In one process: a decoder's in float32, then those of a module whose angles are in bfloat16."""
    from executor.model import rotary

    prepared: list[torch.dtype] = []

    def prepare(x, out, cos, sin, *, back):
        prepared.append(cos.dtype)
        return lambda *addresses: None

    monkeypatch.setattr(rotary, "_kernels", {})
    monkeypatch.setattr(rotary, "_prepare_kernel", prepare)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    x, angles = torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16), torch.zeros(4, 1, 8)
    for kind in (torch.float32, torch.bfloat16, torch.float32):
        rotary.rotate_fused(x, angles.to(kind), angles.to(kind), back=True)

    assert prepared == [torch.float32, torch.bfloat16]


def test_cut_columns_give_the_loss_of_all_of_them_even_where_a_rank_has_next_to_nothing(monkeypatch) -> None:
    """Two ranks' parts put together by hand: the second's columns are e^-900 of the sum, too little for a float64."""
    from executor.model import vocabulary_loss
    from executor.model.vocabulary_loss import _EagerLoss

    logits = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits[0, 3:] -= 900.0
    logits.requires_grad_()
    targets = torch.tensor([5, 0, 3, 2])
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    (slope,) = torch.autograd.grad(expected, logits)
    whole = logits.detach().logsumexp(-1)[:, None], logits.detach().gather(-1, targets[:, None])
    monkeypatch.setattr(vocabulary_loss, "_combine_ranks", lambda *_: whole)

    for first in (0, 3):
        part = logits.detach()[:, first : first + 3].clone().requires_grad_()
        loss = _EagerLoss.apply(part, targets, first, object())
        loss.backward()
        assert torch.allclose(loss, expected, rtol=1e-14, atol=0)
        assert torch.allclose(part.grad, slope[:, first : first + 3], rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_eager_loss_holds_what_the_runtime_says(dtype, monkeypatch) -> None:
    """The most bytes held at once, the logits among them, by the account of torch's own allocator; pieces an eighth as
    large.
    """
    from executor.model import vocabulary_loss
    from executor.model.vocabulary_loss import PIECE_LOGITS, VocabularyLoss
    from simulator.config.runtime import DTYPE_BYTES
    from simulator.kernels.operators import tensor_bytes
    from simulator.runtimes.library import runtime_spec

    piece = PIECE_LOGITS // 8
    monkeypatch.setattr(vocabulary_loss, "PIECE_LOGITS", piece)
    tokens, vocab = 3072, 16384
    logits = torch.randn(1, tokens, vocab).to(getattr(torch, dtype)).requires_grad_()
    targets = torch.randint(0, vocab, (1, tokens))
    loss = VocabularyLoss(vocab, None, compiled=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss(logits, targets).backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = logits.numel() * logits.element_size()
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)

    width = {"f32": 4, "compute": DTYPE_BYTES[dtype]}
    (moment,) = runtime_spec("meshwright").layer.head_peak
    parts = [tensor_bytes(x, {"t": tokens, "v": vocab, "one": 1.0}, width.__getitem__) for x in moment]
    assert parts[1] == 2 * PIECE_LOGITS * 4
    said = parts[0] + 2 * piece * 4
    per_token = 64 * tokens  # columns of the loss, its exponents and masks
    assert tokens * vocab > 4 * piece
    assert 2 * logits.numel() * width["compute"] <= most <= said + per_token
    wide = torch.nn.functional.cross_entropy(logits.detach().double().flatten(0, 1), targets.flatten(), reduction="sum")
    assert torch.allclose(loss(logits, targets).double(), wide, rtol=1e-6)


def test_no_call_keeps_the_buckets_of_replicas_beyond_the_backward_pass(monkeypatch) -> None:
    """NCCL's calls hold their tensors until somebody waits: with one process, calls that do just that."""
    import weakref
    from types import SimpleNamespace

    import torch.distributed as dist

    from executor.parallel.data_parallel import Replica
    from executor.parallel.train_step import Trainer

    buckets: list[weakref.ref] = []
    right = dist.all_reduce

    class Call:
        def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
            self.held: list[torch.Tensor] = [tensor]
            self.work = right(tensor, group=group, async_op=True)
            buckets.append(weakref.ref(tensor))

        def get_future(self) -> torch.futures.Future:
            return self.work.get_future()

        def wait(self) -> None:
            self.work.wait()
            self.work = None
            self.held.clear()

    kept = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group, **_: kept.append(Call(tensor, group)) or kept[-1])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        first_is_there = []

        def loss(out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            first_is_there.append(bool(buckets) and buckets[0]() is not None)
            return (out - wanted).square().sum()

        trainer = SimpleNamespace(
            parallel=SimpleNamespace(modules=(Replica(model, dist.group.WORLD, torch.device("cpu")),), loss=loss),
            device="cpu",
            micro_batches=2,
            workload=SimpleNamespace(tokens_per_step=8),
            in_pieces=False,
            _precision=nullcontext,
        )
        trainer._loss = partial(Trainer._loss, trainer)
        x, wanted = torch.randn(8, 64), torch.randn(8, 64)
        Trainer._accumulate(trainer, x, wanted)
        assert [call.held for call in kept] == [[]]  # one bucket, once for both micro batches
        assert buckets[0]() is not None  # it is still the one that the next gradients would go to
        first = [p.grad.clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        Trainer._accumulate(trainer, x, wanted)
        # The second step's forward pass makes new buckets; when backward of its loss begins the old one is gone.
        assert first_is_there == [False, False, False, False]
        again = [p.grad for p in model.parameters()]
    finally:
        dist.destroy_process_group()

    alone = torch.autograd.grad((model(x) - wanted).square().sum() / 8, list(model.parameters()))
    for found, repeated, expected in zip(first, again, alone, strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert torch.allclose(repeated, expected, rtol=1e-5, atol=1e-6)


def test_nothing_is_collected_within_steps() -> None:
    import gc

    from executor.launch.garbage_collection import PausedGarbageCollection

    assert gc.isenabled()
    with PausedGarbageCollection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_experts_under_autocast_compute_in_its_type() -> None:
    """Weights and tokens are float32 there, and torch's autocast looks at no product of experts."""
    from executor.model.moe import Experts
    from executor.verify.kernels import check_experts

    experts = Experts(16, 32, 2)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = experts(torch.randn(8, 16), torch.tensor([3, 5]))

    assert found.dtype == torch.bfloat16
    assert experts(torch.randn(8, 16), torch.tensor([3, 5])).dtype == torch.float32
    assert check_experts(device=torch.device("cpu"), dtype=torch.bfloat16, autocast=True).ok
