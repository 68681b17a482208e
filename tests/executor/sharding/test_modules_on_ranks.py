"""Modules written for one GPU, captured, placed and run on gloo: equal to one process, forward and backward."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from executor.sharding import api  # noqa: E402 - after the check for torch
from executor.sharding.capture import capture  # noqa: E402 - after the check for torch
from executor.sharding.operations import run_kernel  # noqa: E402 - after the check for torch
from executor.sharding.places import Context, Place  # noqa: E402 - as above
from simulator.sharded.program import Buffer, Exchange, Kernel, is_of_patches  # noqa: E402 - as above
from tests.executor.sharding import modules  # noqa: E402 - as above
from tests.executor.sharding.ranks import Case, planned_here, run, run_files, run_function  # noqa: E402 - as above
from topology.errors import PlannerError, UserError  # noqa: E402 - as above

torch.manual_seed(0)
X = torch.randn(4, 8, 16, dtype=torch.float64)
LLAMA = {"x": "batch seq embed", "*norm.weight": "embed", "wo.weight": "embed heads", "w2.weight": "embed mlp"} | {
    **dict.fromkeys(("wq.weight", "wk.weight", "wv.weight"), "heads embed"),
    **dict.fromkeys(("w1.weight", "w3.weight"), "mlp embed"),
}
TP = {"heads": "model", "mlp": "model"}
FSDP = {"axes": LLAMA, "parameters": {"embed": "data"}, "compute": {"batch": "data"}}


def block(name, mesh, **constraints):
    return Case(f"llama block, {name}", modules.LlamaBlock().double(), (X,), mesh, {"axes": LLAMA, **constraints})


def on(name, module, args, mesh, **placements):
    return Case(name, module.double(), args, mesh, {"placements": placements})


IMAGE = torch.randn(2, 3, 8, 8, dtype=torch.float64)
IDS = torch.arange(16).reshape(2, 8) % 12
FFN = {"up_weight": ["S(0)"], "up_bias": ["S(0)"], "down_weight": ["S(1)"]}
EXPERTS = {"up": ["S(0)"], "down": ["S(0)"]}
VIT = {"layer.linear1.weight": ["S(0)"], "layer.linear1.bias": ["S(0)"], "layer.linear2.weight": ["S(1)"]}
TWO = [
    on("feed-forward, tensor parallel", modules.FeedForward(), (X,), {"d": 2}, **FFN),
    Case(
        "feed-forward, sequence parallel, its argument by rows of the sequence",
        modules.FeedForward().double(),
        (X,),
        {"d": 2},
        {
            "placements": {**FFN, "output0": ["S(1)"]},
            "domains": {"x": "outer_split(1, 2); parallelize(1, d); allocate(1, 0, 2)"},
        },
        lies=True,
    ),
    block("tensor parallel", {"model": 2}, parameters=TP, compute=TP),
    block(
        "sequence parallel", {"model": 2}, parameters=TP, compute=TP, placements={"x": ["S(1)"], "output0": ["S(1)"]}
    ),
    block("data parallel", {"data": 2}, compute={"batch": "data"}),
    Case("llama block, FSDP", modules.LlamaBlock().double(), (X,), {"data": 2}, FSDP),
    block("context parallel", {"seq": 2}, compute={"seq": "seq"}, chunks={"scaled_dot_product_attention_0": "ring"}),
    block("weights placed by time", {"data": 2}, choose=["w*.weight"], cluster="h200x4", policy="min_time"),
    on("experts, expert parallel", modules.Experts(), (X,), {"ep": 2}, **EXPERTS),
    on("vision transformer, tensor parallel", modules.VisionTransformer(), (IMAGE,), {"d": 2}, **VIT),
    on("vision transformer, data parallel", modules.VisionTransformer(), (IMAGE,), {"d": 2}, image=["S(0)"]),
    on("u-net, data parallel", modules.UNet(), (IMAGE, IMAGE[:, 0, 0, :4]), {"d": 2}, image=["S(0)"], time=["S(0)"]),
    on("u-net, channels", modules.UNet(), (IMAGE, IMAGE[:, 0, 0, :4]), {"d": 2}, **{"conv*.weight": ["S(0)"]}),
    on(
        "classifier, vocabulary sharded",
        modules.Classifier(),
        (IDS, (IDS + 3) % 12),
        {"d": 2},
        **{"embed.weight": ["S(0)"], "head.weight": ["S(0)"]},
    ),
]
INSIDE = {
    "up.weight": "inner_split(0, 2); parallelize(1, DIDx)",  # every second row
    "up.bias": "inner_split(0, 2); parallelize(1, DIDx)",
    "down.weight": "outer_split(1, 4); outer_split(2, 2); parallelize(2, DIDx)",
    "x": "inner_split(1, 2); parallelize(2, DIDx)",
}
TWO.append(Case("devices inside splits", modules.FeedForward().double(), (X,), {"DIDx": 2}, {"domains": INSIDE}))
STAGES = {"axis": "pp", "of": {"layers.1": 1}, "micro_batches": 4}
STACK_TP = {"*.up.weight": ["S(0)"], "*.up.bias": ["S(0)"], "*.down.weight": ["S(1)"]}
TWO.append(Case("two stages, four micro batches", modules.Stack().double(), (X,), {"pp": 2}, {"stages": STAGES}))
IN_TURNS = {**STAGES, "schedule": "1f1b"}
TWO.append(Case("two stages in 1F1B", modules.Stack().double(), (X,), {"pp": 2}, {"stages": IN_TURNS}))
ODD = torch.randn(5, 7, 16, dtype=torch.float64)
UNEVEN = {"axes": LLAMA, "parameters": {"embed": "data"}, "compute": {"batch": "data"}}
TWO += [  # pieces of different sizes
    Case("llama block of five rows, FSDP", modules.LlamaBlock().double(), (ODD,), {"data": 2}, UNEVEN),
    Case(
        "llama block, mlp of 11, sequence of 7",
        modules.LlamaBlock(hidden=11).double(),
        (ODD,),
        {"model": 2},
        {
            "axes": LLAMA,
            "parameters": {"mlp": "model"},
            "compute": {"mlp": "model"},
            "placements": {"x": ["S(1)"], "output0": ["S(1)"]},
        },
    ),
    Case(
        "an odd sequence, context parallel",
        modules.LlamaBlock().double(),
        (ODD,),
        {"seq": 2},
        {"axes": LLAMA, "compute": {"seq": "seq"}},
    ),
    on("from rows to columns", modules.FeedForward(), (ODD,), {"d": 2}, x=["S(0)"], output0=["S(1)"]),
    on("three experts on two ranks", modules.Experts(experts=3), (ODD,), {"ep": 2}, **EXPERTS),
    on(
        "vocabulary of 13",
        modules.Classifier(13),
        (IDS, (IDS + 3) % 12),
        {"d": 2},
        **{"embed.weight": ["S(0)"], "head.weight": ["S(0)"]},
    ),
    Case(
        "nvFuser's split of 11",
        modules.FeedForward(hidden=11).double(),
        (ODD,),
        {"DIDx": 2},
        {
            "domains": {
                "up.*": "outer_split(0, 2); parallelize(0, DIDx)",
                "down.weight": "outer_split(1, 2); parallelize(1, DIDx)",
            }
        },
    ),
]
TWO += [
    on(f"many results, {at}", modules.ManyResults(), (X, X / 2), {"d": 2}, x=[at], t=[at], **{"table.weight": ["S(1)"]})
    for at in ("S(0)", "S(2)")
]
TWO += [on(f"many functions, {at}", modules.ManyFunctions(), (X,), {"d": 2}, x=[at]) for at in ("S(0)", "S(1)")]
ROUTED = {"up": ["S(0)"], "down": ["S(0)"]}
TWO += [
    on("routed tokens, experts on their ranks", modules.RoutedExperts(), (X,), {"ep": 2}, **ROUTED),
    on("routed tokens, halves of experts", modules.RoutedExperts(), (X,), {"tp": 2}, up=["SS(1,2)"], down=["S(2)"]),
]
FEW = torch.randn(4, 7, 16, dtype=torch.float64)


def sent(name, module, args, mesh, **placements):
    """Tokens go to their experts by all-to-all."""
    return Case(name, module.double(), args, mesh, {"placements": placements, "routes": "all_to_all"})


TWO.append(sent("tokens sent to their experts", modules.RoutedExperts(), (X,), {"ep": 2}, **ROUTED, x=["S(1)"]))
FOUR = [
    sent(
        "tokens sent to three experts on four ranks",
        modules.RoutedExperts(3),
        (FEW,),
        {"ep": 4},
        **ROUTED,
        x=["S(0)"],
        output0=["S(1)"],
    ),
    sent(
        "tokens sent to experts inside replicas",
        modules.RoutedExperts(),
        (X,),
        {"dp": 2, "ep": 2},
        up=["R", "S(0)"],
        down=["R", "S(0)"],
        x=["S(0)", "S(1)"],
        output0=["S(0)", "S(1)"],
    ),
    on(
        "three routed experts, and their tokens",
        modules.RoutedExperts(3),
        (ODD,),
        {"ep": 4},
        **ROUTED,
        x=["S(0)"],
        output0=["S(1)"],
    ),
    on(
        "routed experts in two dims",
        modules.RoutedExperts(),
        (X,),
        {"ep": 2, "tp": 2},
        up=["S(0)", "SS(1,2)"],
        down=["S(0)", "S(2)"],
        x=["S(0)", "R"],
    ),
    Case(
        "a rank without rows, 2-D",
        modules.FeedForward().double(),
        (ODD,),
        {"a": 2, "b": 2},
        {"placements": {"x": ["S(0)", "S(0)"], "output0": ["R", "S(1)"]}},
    ),
    on("five rows on four ranks", modules.FeedForward(), (ODD,), {"d": 4}, x=["S(0)"], output0=["S(2)"]),
    Case(
        "two stages in 1F1B, tensor parallel",
        modules.Stack().double(),
        (X,),
        {"pp": 2, "tp": 2},
        {"stages": IN_TURNS, "placements": {n: ["R", *p] for n, p in STACK_TP.items()}},
    ),
    *(
        Case(
            f"two stages, tensor parallel, {'+'.join(names)}",
            modules.Stack().double(),
            (X,),
            dict.fromkeys(names, 2),
            {
                "stages": STAGES,
                "placements": {n: ["R", *p] if names[0] == "pp" else [*p, "R"] for n, p in STACK_TP.items()},
            },
        )
        for names in (("pp", "tp"), ("tp", "pp"))
    ),
    block(
        "FSDP and tensor parallel",
        {"data": 2, "model": 2},
        parameters={"embed": "data", **TP},
        compute={"batch": "data", **TP},
    ),
    block(
        "HSDP",
        {"replica": 2, "data": 2},
        parameters={"embed": "data"},
        compute={"batch": ["replica", "data"]},
    ),
    block("sequence sharded, attention by heads", {"seq": 4}, compute={"seq": "seq"}),
    on("experts over four ranks", modules.Experts(), (X,), {"ep": 4}, **EXPERTS, x=["S(0)"], output0=["S(0)"]),
    on(
        "vision transformer in two dims",
        modules.VisionTransformer(),
        (IMAGE,),
        {"data": 2, "model": 2},
        **{name: ["R", *tokens] for name, tokens in VIT.items()},
        image=["S(0)", "R"],
    ),
]


CHUNKS = [
    Case(
        "feed-forward, sequence parallel, in chunks",
        modules.FeedForward().double(),
        (X,),
        {"d": 2},
        {"placements": {**FFN, "x": ["S(1)"], "output0": ["S(1)"]}, "chunks": {"linear_0": 2, "linear_1": 2}},
    ),
    *(
        Case(
            f"feed-forward, sequence parallel, {way}",
            modules.FeedForward().double(),
            (X,),
            {"d": 2},
            {"placements": {**FFN, "x": ["S(1)"], "output0": ["S(1)"]}, "chunks": {"linear_0": way, "linear_1": way}},
        )
        for way in ("ring", "broadcast", "copy_engine", "fused")
    ),
    Case(
        "feed-forward, tensor parallel, by copy engines",
        modules.FeedForward().double(),
        (X,),
        {"d": 2},
        {"placements": FFN, "chunks": {"linear_1": "copy_engine"}},
    ),
    Case(
        "feed-forward, tensor parallel, its sum around a ring",
        modules.FeedForward().double(),
        (X,),
        {"DIDx": 2},
        {
            "placements": FFN,
            "domains": {"linear_1": "outer_split(1, 2); swizzle1d(1, DIDx); parallelize(1, Stream)"},
        },
    ),
    Case(
        "feed-forward, tensor parallel, in chunks",
        modules.FeedForward().double(),
        (X,),
        {"d": 2},
        {"placements": FFN, "chunks": {"linear_1": 4}},
    ),
    block(
        "sequence parallel, in chunks",
        {"model": 2},
        parameters=TP,
        compute=TP,
        placements={"x": ["S(1)"], "output0": ["S(1)"]},
        chunks={"linear_0": 2},
    ),
]

LITTLE = {**FSDP, "cluster": "h200x4", "memory_limit": 61_000 / 2**30}


def test_random_numbers_are_refused() -> None:
    with pytest.raises(UserError, match="draws random numbers"):
        capture(torch.nn.Dropout(), (X,))


def test_tokens_reach_experts_as_the_cheaper_way_or_as_stated() -> None:
    captured = capture(modules.RoutedExperts().double(), (X,))
    placed = {**ROUTED, "x": ["S(0)"], "output0": ["S(0)"]}

    def kinds(**stated):
        program = planned_here(api.request(captured, {"ep": 4}, placements=placed, **stated))
        return {one.op if isinstance(one, Kernel) else one.kind for one in program.work.values()}

    assert "route.send" in kinds()
    assert "all_gather" not in kinds(routes="all_to_all")
    assert "route.send" not in kinds(routes="all_gather")
    assert "route.send" in kinds(routes="all_to_all", choose=["*"])  # operators inside are open as well


def test_attention_over_a_sharded_sequence_goes_by_heads_where_that_sends_fewer_bytes() -> None:
    captured = capture(modules.LlamaBlock().double(), (X,))

    def kinds(ranks):
        program = planned_here(api.request(captured, {"seq": ranks}, axes=LLAMA, compute={"seq": "seq"}))
        return {one.kind for one in program.work.values() if isinstance(one, Exchange)}

    assert {"all_to_all", "all_gather"} & kinds(4) == {"all_to_all"}
    assert {"all_to_all", "all_gather"} & kinds(2) == {"all_gather"}


def test_tokens_that_are_not_sent_are_refused_by_name() -> None:
    odd = capture(modules.RoutedExperts(3).double(), (ODD,))
    with pytest.raises(PlannerError, match="divides their tokens"):
        planned_here(api.request(odd, {"ep": 2}, placements=ROUTED, routes="all_to_all"))
    plain = capture(modules.FeedForward().double(), (X,))
    with pytest.raises(UserError, match="no experts to which tokens can be sent"):
        planned_here(api.request(plain, {"ep": 2}, routes="all_to_all"))


def test_buffers_that_micro_batches_would_write_are_refused() -> None:
    stages = {"axis": "pp", "of": {"1": 1}, "micro_batches": 2}
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(8).double(), torch.nn.Linear(16, 16).double())

    with pytest.raises(UserError, match=r"writes into its buffer 0\.running_mean"):
        api.shard(module, (X,), mesh={"pp": 2}, stages=stages)


def test_products_in_chunks_compute_the_same() -> None:
    run(CHUNKS, 2)


def test_what_is_dropped_and_made_again_has_the_same_gradients() -> None:
    """Gathered weights, products, attention, norms and casts are made again in two thirds of the memory."""
    run([block("FSDP in little memory", {"data": 2}, **LITTLE)], 2)


def test_the_planner_is_asked_as_a_process() -> None:
    run(TWO[:1], 2, quick=False)


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.nightly)])
def test_ranks_compute_what_one_process_does(ranks, cases) -> None:
    run(cases, ranks)


def test_torch_runs_the_python_file_as_it_stands(tmp_path) -> None:
    cases = [TWO[0], TWO[1], TWO[2], TWO[4], TWO[5], TWO[7]]
    run_files(cases, 2, tmp_path)

    text = (tmp_path / "placed_0.py").read_text()
    assert "'up': ColwiseParallel(" in text
    assert "'down': RowwiseParallel(" in text
    assert "used=" in (tmp_path / "placed_4.py").read_text()


def test_a_function_takes_dtensors_and_returns_dtensors() -> None:
    run_function(2)


def test_a_gradient_enters_attention_as_its_result_lies() -> None:
    """Plans of cuDNN's backward pass are kept by the layouts of queries, keys and values alone."""
    q, k, v = (torch.randn(2, 8, 4, 16, dtype=torch.float64).transpose(1, 2).requires_grad_() for _ in range(3))
    like = Buffer(tensor="o", shape=(2, 4, 8, 16), dtype="f64", dims=((),) * 4, local=(2, 4, 8, 16))
    kernel = Kernel(op="attention", args=([{"tensor": name} for name in "qkv"], False, None))
    out = run_kernel(kernel, {"q": q, "k": k, "v": v}, Context(like, {}, Place({}, {})))
    entered = []
    out.register_hook(entered.append)  # after the kernel's own

    gradient = torch.randn(2, 4, 8, 16, dtype=torch.float64)
    other = gradient if out.stride() != gradient.stride() else gradient.transpose(1, 2).contiguous().transpose(1, 2)
    out.backward(other)

    assert other.stride() != out.stride()
    assert entered[0].stride() == out.stride()
    torch.testing.assert_close(entered[0], other)


def test_a_kronecker_product_takes_a_piece_that_was_gathered_along_its_last_dim() -> None:
    """Such a piece lies in memory in another order, of which torch's own kernel cannot make a view."""
    x, y = torch.arange(6.0).view(2, 3), torch.arange(4.0)[None]
    kernel = Kernel(op="aten.kron.default", args=({"tensor": "x"}, {"tensor": "y"}))
    like = Buffer(tensor="o", shape=(2, 12), dtype="f32", dims=((), ()), local=(2, 12))
    found = run_kernel(kernel, {"x": x.t().contiguous().t(), "y": y}, Context(like, {}, Place({}, {})))

    torch.testing.assert_close(found, torch.kron(x, y))


@pytest.mark.parametrize("at", [1, 2])
def test_rotary_positions_are_those_of_separate_operators(at: int) -> None:
    """With tokens before heads or after them; angles have gradients, too."""
    x = torch.randn(2, 4, 4, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn([4 if dim == at else 8 if dim == 3 else 1 for dim in range(1, 4)], dtype=torch.float64)
    cos, sin = angles.cos().requires_grad_(), angles.sin().requires_grad_()
    kernel = Kernel(op="rotary", args=tuple({"tensor": name} for name in ("x", "cos", "sin")))
    like = Buffer(tensor="y", shape=tuple(x.shape), dtype="f64", dims=((),) * 4, local=tuple(x.shape))
    found = run_kernel(kernel, {"x": x, "cos": cos, "sin": sin}, Context(like, {}, Place({}, {})))
    first, second = x.chunk(2, -1)
    expected = x * cos + torch.cat((-second, first), -1) * sin
    weight = torch.randn_like(expected)

    torch.testing.assert_close(found, expected)
    for one, other in zip(
        *(torch.autograd.grad((y * weight).sum(), (x, cos, sin)) for y in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("name", "image", "weight", "stride", "patches"),
    [
        ("conv1d", (2, 3, 8), (5, 3, 2), [2], True),
        ("conv2d", (2, 3, 8, 8), (5, 3, 4, 4), [4, 4], True),
        ("conv3d", (2, 3, 4, 8, 8), (5, 3, 2, 4, 4), [2, 4, 4], True),
        ("conv2d", (2, 3, 8, 8), (5, 3, 4, 4), [2, 2], False),
        ("conv2d", (2, 3, 9, 8), (5, 3, 4, 4), [4, 4], False),
        ("conv2d", (2, 3, 8, 8), (5, 3, 1, 1), [1, 1], False),
    ],
)
def test_a_convolution_of_patches_is_what_torch_computes(name, image, weight, stride, patches) -> None:
    """Forward, and gradients of images and weights."""
    x, w = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (image, weight))
    kernel = Kernel(op=f"aten.{name}.default", args=({"tensor": "x"}, {"tensor": "w"}, None, stride))
    like = Buffer(tensor="y", shape=(), dtype="f64", dims=(), local=())
    found = run_kernel(kernel, {"x": x, "w": w}, Context(like, {}, Place({}, {})))
    expected = getattr(torch.nn.functional, name)(x, w, None, stride)
    seed = torch.randn_like(expected)

    assert is_of_patches(kernel, image, weight) == patches
    torch.testing.assert_close(found, expected)
    for one, other in zip(*(torch.autograd.grad((y * seed).sum(), (x, w)) for y in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)
