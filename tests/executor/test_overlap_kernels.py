"""The Triton kernels without a GPU: numbers in the interpreter, and what the compiler makes of them for Hopper.

A software pipeliner may move a load above a wait that it does not depend on, and nothing but the compiled code shows
it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: triton's interpreter needs it")
triton = pytest.importorskip("triton", reason="triton is not installed: there are no kernels")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY_BYTES = 232_448  # of one program on sm_90, CUDA C++ Programming Guide, table of compute capabilities
# A few units in the last place of what is stored; all but float64 is summed in float32.
UNITS = {"float64": 2.0**-49, "bfloat16": 2.0**-6, "float16": 2.0**-9}
FLOAT32 = 2.0**-20


def test_numbers_order_and_coverage_in_the_interpreter() -> None:
    """In a process of its own: whether kernels are interpreted is decided when they are imported."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.executor.workers.interpreted_kernels"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if run.returncode and "only integer scalar arrays" in run.stderr:
        pytest.skip("this triton's interpreter does not run loops with this numpy (2.4 and later)")
    assert run.returncode == 0, run.stderr[-2000:]
    cases = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(cases) > 50
    for case in cases:
        of_type = [units for name, units in UNITS.items() if f"torch.{name}" in case["what"]]
        assert case["difference"] <= (of_type or [FLOAT32])[0], case


GATHER = [
    {"BLOCK_N": 256, "HALVES": True, "stages": 4, "B_TRANSPOSED": True},
    {"BLOCK_N": 256, "HALVES": True, "stages": 4, "B_TRANSPOSED": False},
    {"BLOCK_N": 128, "HALVES": False, "stages": 4, "B_TRANSPOSED": True},
]
SCATTER = [
    {"WORLD": 2, "BLOCK_N": 256, "stages": 3, "B_TRANSPOSED": True},
    {"WORLD": 4, "BLOCK_N": 256, "stages": 3, "B_TRANSPOSED": False},
    {"WORLD": 8, "BLOCK_N": 256, "stages": 3, "B_TRANSPOSED": True},
    {"WORLD": 2, "BLOCK_N": 128, "stages": 4, "B_TRANSPOSED": False},
]


@pytest.mark.parametrize("case", GATHER, ids=str)
def test_gather_matmul_compiled(case: dict[str, Any]) -> None:
    from executor.kernels.gather_matmul import gather_matmul

    width = case["BLOCK_N"] // (2 if case["HALVES"] else 1)
    right = (case["BLOCK_N"], 64) if case["B_TRANSPOSED"] else (64, case["BLOCK_N"])
    words = dict.fromkeys(("flags", "ticket", "error"), "*i32")
    compiled = _compile(
        gather_matmul,
        {"own": _tile(128, 64), "gathered": _tile(128, 64), "b": _tile(*right), "c": _tile(1, 128, width), **words},
        ("rows", "columns", "depth", "piece_rows", "pieces"),
        {"RANK": 1, "WORLD": 4, "BLOCK_M": 128, "BLOCK_K": 64, "GROUP_M": 8, "LIMIT": 1 << 20, "ASM": True, **case},
    )

    _fits(compiled)
    lines = compiled.asm["ttgir"].splitlines()
    copies = [number for number, line in enumerate(lines) if "async_tma_copy_global_to_local %gathered" in line]
    assert copies, "the gathered rows are not loaded by TMA"
    for copy in copies:
        assert "acquire, sys" in _region_that_yields_the_row(lines, copy), f"not guarded by a wait: {lines[copy]}"
    own = [number for number, line in enumerate(lines) if "async_tma_copy_global_to_local %own" in line]
    assert own
    for copy in own:
        assert "acquire" not in _region_that_yields_the_row(lines, copy), "own rows wait for nobody"


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("size", ["large", "small"])
def test_specialised_gather_compiled(size: str, *, transposed: bool) -> None:
    """For Hopper: a loading warp with few registers, and nothing of other ranks is loaded before its wait."""
    from executor.kernels.gather_specialised import Place, gather_specialised
    from executor.overlap.fused import SPECIALISED_TILES

    tile = SPECIALISED_TILES[size == "small"]
    right = (tile.block_n, 64) if transposed else (64, tile.block_n)
    width = tile.block_n // (2 if tile.halves else 1)
    tiles = {"own": (128, 64), "gathered": (128, 64), "b": right, "c": (1, 128, width)}
    compiled = _compile(
        gather_specialised,
        {name: _gluon_tile(*shape) for name, shape in tiles.items()}
        | dict.fromkeys(("flags", "ticket", "error"), "*i32"),
        ("rows", "columns", "depth", "piece_rows", "pieces"),
        {"place": Place(rank=1, world=4, transposed=transposed, limit=1 << 20), "tile": tile},
    )

    _fits(compiled)
    ptx = compiled.asm["ptx"]
    assert f"m64n{tile.block_n}k16" in ptx, "the tile is not one instruction wide"
    assert re.search(r"setmaxnreg\.inc\.sync\.aligned\.u32\s+40;", ptx), "the loading warp has no registers of its own"
    polls = [match.start() for match in re.finditer(r"ld\.volatile\.global", ptx)]
    loads = [match.start() for match in re.finditer(r"cp\.async\.bulk\.tensor\.2d\.shared", ptx)]
    fence = ptx.index("fence.proxy.async;", ptx.index("fence.acq_rel.sys", polls[0]))
    assert len(polls) == 1
    own, others = [load for load in loads if load < polls[0]], [load for load in loads if load > fence]
    assert len(own) == len(others) >= 2, "tiles of both operands: own rows wait for nobody, others for the flag"
    assert len(own) + len(others) == len(loads)


@pytest.mark.parametrize("case", SCATTER, ids=str)
def test_matmul_scatter_compiled(case: dict[str, Any]) -> None:
    from executor.kernels.matmul_scatter import matmul_scatter

    right = (case["BLOCK_N"], 64) if case["B_TRANSPOSED"] else (64, case["BLOCK_N"])
    half = case["BLOCK_N"] // 2
    words = dict.fromkeys(("done", "flags", "ticket", "error"), "*i32")
    tiles = {"a": _tile(128, 64), "b": _tile(*right), "parts": _tile(1, 128, half)}
    compiled = _compile(
        matmul_scatter,
        {**tiles, "slots": "*bf16", "c": _tile(128, half), **words},
        ("rows", "eighth", "depth", "piece_rows", "pieces"),
        {"RANK": 1, "BLOCK_M": 128, "BLOCK_K": 64, "GROUP_M": 8, "LIMIT": 1 << 20, "ASM": True, **case},
        {(3,): [["tt.divisibility", 16]]},  # slots: sets begin at multiples of symmetric.STORE_ALIGNMENT
    )

    _fits(compiled)
    lines = compiled.asm["ttgir"].splitlines()
    loads = [
        n
        for n, line in enumerate(lines)
        if re.search(r"(tt\.load|ttg\.async_copy_global_to_local).*!tt\.ptr<bf16>", line)
    ]
    assert loads, "the others' parts are not loaded"
    stores = [number for number, line in enumerate(lines) if "async_tma_copy_local_to_global %parts" in line]
    for load in loads:
        waits = [n for n, line in enumerate(lines[:load]) if "acquire, sys" in line]
        assert waits, "parts are loaded before anybody waited for them"
        assert waits[-1] > stores[-1], "the wait belongs to the loop over own tiles"
        between = lines[waits[-1] : load]
        assert not any("warp_group_dot %" in line for line in between), "the wait was for another tile"
    # Counting a tile that TMA has stored: the full wait, not the one for shared memory, comes before the release.
    ptx = compiled.asm["ptx"]
    releases = [match.start() for match in re.finditer(r"atom\S*\.release\S*\.add|red\S*\.release\S*\.add", ptx)]
    assert releases
    for release in releases:
        waits = [match.start() for match in re.finditer(r"cp\.async\.bulk\.wait_group\s+\d", ptx[:release])]
        stored = [match.start() for match in re.finditer(r"cp\.async\.bulk\.tensor\.3d\.global\.shared", ptx[:release])]
        assert waits, "a tile is counted without waiting for its stores"
        assert stored, "nothing was stored before"
        assert waits[-1] > stored[-1]


@pytest.mark.parametrize("name", ["one_shot", "two_shot"])
@pytest.mark.parametrize("norm", [False, True])
def test_all_reduce_compiled(name: str, *, norm: bool) -> None:
    from executor.kernels import all_reduce

    tensors = dict.fromkeys(("x", "out", "residual", "residual_out", "weight", "slots"), "*bf16")
    words = {"peer_slots": "*i64", "flags": "*i32", "peer_flags": "*i64"}
    words |= dict.fromkeys(("epoch", "ticket", "error"), "*i32")
    numbers = {"numel": "i32", "columns": "i32", "set_numel": "i32"}
    constants = {"EPS": 1e-5, "RANK": 1, "WORLD": 4, "NORM": norm, "BLOCK": 2048, "STRIDE": 256, "LIMIT": 1 << 20}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(15)}
    compiled = _compile(getattr(all_reduce, name), tensors | words | numbers, (), constants, aligned)

    _fits(compiled)
    ptx = compiled.asm["ptx"]
    assert "st.global.v4" in ptx, "stores to peers are not 16 bytes wide"
    first_acquire, first_release = ptx.index("acquire"), ptx.index("release")
    assert first_release < first_acquire, "everybody would wait before speaking"


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize("name", ["add_slots", "one_shot", "two_shot"])
def test_what_ranks_sent_is_summed_as_widely_as_it_is(name: str, dtype: str) -> None:
    """float64 in float64 from the load to the store, the rest in float32."""
    from executor.kernels import all_reduce, copies

    if name == "add_slots":
        constants = {"RANK": 1, "WORLD": 4, "BLOCK": 1024}
        compiled = _compile(copies.add_slots, {"own": f"*{dtype}", "slots": f"*{dtype}"}, ("numel",), constants)
    else:
        tensors = dict.fromkeys(("x", "out", "residual", "residual_out", "weight", "slots"), f"*{dtype}")
        words = {"peer_slots": "*i64", "flags": "*i32", "peer_flags": "*i64"}
        words |= dict.fromkeys(("epoch", "ticket", "error"), "*i32")
        constants = {"EPS": 1e-5, "RANK": 1, "WORLD": 4, "NORM": True, "BLOCK": 1024, "STRIDE": 256, "LIMIT": 1 << 20}
        compiled = _compile(getattr(all_reduce, name), tensors | words, ("numel", "columns", "set_numel"), constants)

    ttir = compiled.asm["ttir"]
    sums = set(re.findall(r"arith\.addf .* : tensor<\S*x(f\d+)>", ttir))
    assert sums == {"f64" if dtype == "fp64" else "f32"}
    if dtype == "fp64":
        assert "f32" not in ttir, "a number passes through float32"


# --- the compiler -----------------------------------------------------------------------------------------------------


def _tile(*shape: int) -> str:
    return f"tensordesc<bf16[{', '.join(map(str, shape))}]>"


def _gluon_tile(*shape: int) -> str:
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)
    return f"{_tile(*shape)[:-1]},{layout!r}>"


def test_paged_attention_compiled() -> None:
    """The shapes of Llama 3: pages are loaded ahead into shared memory that suffices, and nothing is spilled."""
    from executor.kernels.paged_attention import attend_pages

    floats = dict.fromkeys(("q", "keys", "values"), "*bf16") | dict.fromkeys(("parts", "maxima", "sums"), "*fp32")
    compiled = _compile(
        attend_pages,
        {**floats, "tables": "*i32", "lengths": "*i32", "scale": "fp32"},
        ("q_stride", "table_stride"),
        {"HEADS": 32, "GROUP": 4, "ROWS": 16, "WIDTH": 128, "PAGE": 64, "SPLITS": 4, "PRECISION": "ieee", "warps": 4},
        attrs={(place,): [["tt.divisibility", 16]] for place in (0, 1, 2, 5, 8)},
    )

    _fits(compiled)
    assert "async_copy_global_to_local" in compiled.asm["ttgir"]


def _compile(
    kernel: Any, arguments: dict[str, str], integers: tuple[str, ...], constants: dict[str, Any], attrs: Any = None
) -> Any:
    """Compile for sm_90; `stages` is an option, the other constants are arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    constants = dict(constants)
    options = {"num_warps": constants.pop("warps", 8), "num_stages": constants.pop("stages", 3)}
    given = {**arguments, **dict.fromkeys(integers, "i32"), **dict.fromkeys(constants, "constexpr")}
    signature = {name: given[name] for name in kernel.arg_names}
    assert set(signature) == set(given)
    more = {"attrs": attrs} if attrs else {}
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(kernel, signature=signature, constexprs=constants, **more)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _fits(compiled: Any) -> None:
    """Assert that shared memory suffices and no register is spilled, as the wheel's own cuobjdump reports."""
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    if not tool.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        run = subprocess.run([str(tool), "-res-usage", str(cubin)], capture_output=True, timeout=60, check=True)
    found = re.search(rb"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", run.stdout)
    assert found is not None, run.stdout
    assert (int(found[2]), int(found[3])) == (0, 0), found[0].decode()


def _region_that_yields_the_row(lines: list[str], copy: int) -> str:
    """Return the text of the `scf.if` whose result is the row coordinate of the copy in a line; nothing if none is."""
    row = re.search(r"local %\w+\[(%[\w-]+)", lines[copy])
    assert row is not None, lines[copy]
    defined = [n for n, line in enumerate(lines[:copy]) if re.match(rf"\s*{re.escape(row[1])}(:\d+)? = ", line)]
    if not defined or "scf.if" not in lines[defined[-1]]:  # names are reused: the last definition before is meant
        return ""
    indent = re.match(r"\s*", lines[defined[-1]])
    assert indent is not None
    body = []
    for line in lines[defined[-1] + 1 : copy]:
        if line.startswith(indent[0] + "}") and "else" not in line:
            break
        body.append(line)
    return "\n".join(body)


def test_every_kernel_is_found_by_its_name() -> None:
    """Other folders take kernels from `on_demand`, which names modules in words."""
    from executor.kernels import on_demand

    assert all(callable(getattr(on_demand, name)) for name in on_demand.MODULES)
    with pytest.raises(AttributeError, match="no kernel"):
        on_demand.triton_kernel  # noqa: B018 - asking is the test
