"""What only GPUs have: half-precision kernels and compiled plans, and schedules over NCCL. Run by hand there:

pytest -m "gpu or multigpu" tests/executor

Where there is one GPU, two ranks share it for the plans whose collectives gloo serves (`tests.executor.shared_gpu`).
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from executor.launch.local_ranks import LaunchResult, launch

torch = pytest.importorskip("torch", reason="torch is not installed")

from executor.model.attention import CausalAttention  # noqa: E402 - after the check for torch
from executor.model.rotary import rotate  # noqa: E402 - as above
from executor.parallel.context_parallel import MIN_CUDNN_TOKENS, combine, part_backward, part_forward  # noqa: E402 - as above
from executor.verify.kernels import check_experts  # noqa: E402 - as above
from tests.executor.test_parallel_plans import OVERLAP, TWO, WORKER  # noqa: E402 - as above

BF16 = 2.0**-8  # a unit in the last place


def drawn(*shape: int, seed: int):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def near(found, expected, units: float = 16.0) -> bool:
    """Whether the largest difference is some units in the last place of the largest number."""
    return bool((found.double() - expected).abs().max() <= units * BF16 * expected.abs().max())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("window", [0, 100])
def test_flash_attention_in_windows_and_groups(kv_heads: int, window: int) -> None:
    q, k, v = drawn(2, 8, 512, 64, seed=0), drawn(2, kv_heads, 512, 64, seed=1), drawn(2, kv_heads, 512, 64, seed=2)
    slope = drawn(2, 8, 512, 64, seed=3)
    narrow, exact = (
        [t.detach().to(kind).requires_grad_() for t in (q, k, v)] for kind in (torch.bfloat16, torch.float64)
    )

    found, expected = CausalAttention(window)(*narrow), CausalAttention(window)(*exact)
    found.backward(slope)
    expected.backward(slope.double())

    assert near(found, expected)
    assert all(near(a.grad, b.grad) for a, b in zip(narrow, exact, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
@pytest.mark.parametrize("half", [MIN_CUDNN_TOKENS // 2, 2 * MIN_CUDNN_TOKENS], ids=["flash", "cudnn"])
def test_parts_of_attention_with_grouped_keys_are_attention(half: int) -> None:
    """What the ring does with each part, and how it puts parts together, against float64."""
    q, k, v = drawn(1, 8, 2 * half, 64, seed=0), drawn(1, 2, 2 * half, 64, seed=1), drawn(1, 2, 2 * half, 64, seed=2)
    slope = drawn(1, 8, 2 * half, 64, seed=3)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, enable_gqa=True)
    expected.backward(slope.double())

    halves = (slice(0, half), slice(half, 2 * half))
    whole = slice(None)
    out, lse = combine([(whole, *part_forward(q, k[:, :, s], v[:, :, s], causal=False)) for s in halves])
    parts = [part_backward(slope, q, k[:, :, s], v[:, :, s], out.bfloat16(), lse, causal=False) for s in halves]

    assert near(out, expected)
    assert near(parts[0][0].double() + parts[1][0].double(), exact[0].grad)
    for place in (1, 2):
        assert near(torch.cat([part[place] for part in parts], dim=2), exact[place].grad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
@pytest.mark.parametrize("autocast", [False, True])
def test_grouped_products_of_experts(autocast: bool) -> None:
    assert check_experts(device=torch.device("cuda", 0), dtype=torch.bfloat16, autocast=autocast).ok


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
@pytest.mark.parametrize("first", [False, True], ids=["sequences first", "tokens first"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("width", [128, 96])
def test_rotary_positions_in_one_kernel(width: int, first: bool, strided: bool) -> None:
    """Forward and backward against float64, operator by operator; angles in one type, then in another."""
    x, slope = (drawn(2, 3, 33, width, seed=seed) for seed in (0, 1))  # sequences, heads, tokens
    order = (2, 0, 1, 3) if first else (0, 2, 1, 3)
    x, slope = (t.permute(order) if strided else t.permute(order).contiguous() for t in (x, slope))
    half = torch.arange(0, width, 2, device="cuda", dtype=torch.float64)
    angles = torch.arange(33, device="cuda", dtype=torch.float64)[:, None] * 500_000.0 ** (-half / width)
    angles = torch.cat((angles, angles), dim=-1).view(33, *((1, 1) if first else (1,)), width)
    for type_of_angles in (torch.float32, torch.bfloat16):
        narrow, exact = (x.detach().to(kind).requires_grad_() for kind in (torch.bfloat16, torch.float64))
        cos, sin = angles.cos().to(type_of_angles), angles.sin().to(type_of_angles)

        found, expected = rotate(narrow, cos, sin), rotate(exact, cos.double(), sin.double())
        found.backward(slope)
        expected.backward(slope.double())

        assert near(found, expected, units=1)
        assert near(narrow.grad, exact.grad, units=1)


V_SHAPED = {name: TWO[name] for name in ("pp-zbv", "pp-zbv-own-table", "pp-dualpipev")}
TYPES = {
    f"bf16-{name}": ({**TWO[name][0], "types": True}, TWO[name][1])
    for name in ("ddp", "fsdp", "tp", "tp-sp", "cp", "cp-all-gather", "ep", "pp-1f1b", "latent-tp", "window-tp")
}
COMPILED = {
    f"compiled-{name}": ({**TWO[name][0], "types": True, "compile": True}, TWO[name][1]) for name in ("fsdp", "tp-sp")
}
OVERLAPPED = {name: ({**changes, "types": True}, plan) for name, (changes, plan) in OVERLAP.items()}
EXACT = {f"float64-{name}": case for name, case in OVERLAP.items()}  # what `planner apply` checks first
ON_TWO = V_SHAPED | TYPES | OVERLAPPED | EXACT | COMPILED
SHARED_S, COMPILING_S = 90.0, 60.0  # for the eager plans of ranks that share a GPU, and for each compiled one
LEAST_S = 20.0  # to start processes and check a plan


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Path:
    """Where one launch of two ranks has left its verdict on every plan that was selected."""
    out = tmp_path_factory.mktemp("cuda")
    launched = verify_plans(selected(request), out, "cuda", budget_s=300)
    assert launched.ok, launched.failure or launched.stderr_tail[-3000:]
    return out


@pytest.fixture(scope="module")
def shared(request, tmp_path_factory) -> tuple[Path, dict[str, LaunchResult]]:
    """As `folder`, on one GPU, and how the launch ended in which a plan was left without a verdict."""
    out, cases = tmp_path_factory.mktemp("shared"), selected(request)
    budget_s = SHARED_S + COMPILING_S * sum(case.get("compile", False) for case in cases)
    return out, verify_all(cases, out, lambda left, left_s: verify_plans(left, out, "share", budget_s=left_s), budget_s)


def verify_all(
    cases: list[dict], out: Path, run: Callable[[list[dict], float], LaunchResult], budget_s: float
) -> dict[str, LaunchResult]:
    """Run cases until all have been reported; a plan that ends its processes is left out of the next launch."""
    ended: dict[str, LaunchResult] = {}
    while cases:
        launched = run(cases, budget_s)
        budget_s -= launched.seconds
        cases = [case for case in cases if not reported(out, case["id"])]
        ended |= {case["id"]: launched for case in cases}
        if launched.outcome != "failed" or budget_s < LEAST_S:
            break
        cases = cases[1:]  # the first is the one that had begun
    return ended


def reported(out: Path, name: str) -> bool:
    return (out / f"{name}.json").is_file() or any(out.glob(f"{name}.rank*.txt"))


def selected(request) -> list[dict]:
    """Return the plans that the tests of a fixture ask for."""
    here = [item for item in request.session.items if request.fixturename in getattr(item, "fixturenames", ())]
    names = {item.callspec.params["name"] for item in here if not item.get_closest_marker("skip")}
    return [{"id": name, **changes, "plan": plan} for name, (changes, plan) in ON_TWO.items() if name in names]


def verify_plans(cases: list[dict], out: Path, where: str, *, budget_s: float) -> LaunchResult:
    (out / "cases.json").write_text(json.dumps(cases))
    return launch(WORKER, [str(out / "cases.json"), str(out), where], ranks=2, budget_s=budget_s)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA GPUs")
@pytest.mark.parametrize("name", ON_TWO)
def test_a_plan_on_two_gpus_computes_what_one_process_computes(folder: Path, name: str) -> None:
    path = folder / f"{name}.json"
    assert path.is_file(), "\n".join(p.read_text() for p in folder.glob(f"{name}.rank0.txt"))

    found = json.loads(path.read_text())
    assert found["ok"], found["verdict"]


def needs_more(plan: dict) -> str:
    """Return why a plan cannot be checked by ranks that share a GPU, or nothing."""
    if plan.get("pp", 1) > 1 or (plan.get("cp", 1) > 1 and plan.get("cp_method", "ring") == "ring"):
        return "gloo sends and receives no CUDA tensors"
    return ""


def sharing(name: str) -> object:
    why = needs_more(ON_TWO[name][1])
    return pytest.param(name, marks=pytest.mark.skip(reason=why)) if why else name


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="there is not one CUDA GPU alone, which ranks would share")
@pytest.mark.parametrize("name", [sharing(name) for name in ON_TWO])
def test_a_plan_on_a_shared_gpu_computes_what_one_process_computes(
    shared: tuple[Path, dict[str, LaunchResult]], name: str
) -> None:
    folder, ended = shared
    path = folder / f"{name}.json"
    if not path.is_file():
        raised = "\n".join(p.read_text() for p in sorted(folder.glob(f"{name}.rank*.txt")))
        end = ended.get(name)
        pytest.fail(raised or (f"{end.outcome}: {end.failure}\n{end.stderr_tail[-3000:]}" if end else "was not begun"))

    found = json.loads(path.read_text())
    assert found["ok"], found["verdict"]
