"""The machine against closed forms: streams, hosts, meetings, contention, memory."""

import pytest
import simpy

from simulator.engine.contention import Activity, Contention
from simulator.engine.simulate import simulate
from simulator.program.cost_model import Cost, GpuLimits, LinkUse
from simulator.program.program import CodeWriter, Collective, Launch, Program, Recv, Send
from tests.simulator.engine_toys import SimpleCosts
from topology.errors import PlannerError


def alone(code: CodeWriter) -> Program:
    return Program(codes=(code.code("only", [0]),))


def seconds(**by_name: float) -> SimpleCosts:
    """Costs by the name of a kernel, the op of a collective, `message` or `copy`."""

    def duration(instruction):
        match instruction:
            case Launch():
                return by_name[instruction.name]
            case Collective():
                return by_name[instruction.op]
            case Send() | Recv():
                return by_name["message"]
        return by_name["copy"]

    return SimpleCosts(duration)


def test_a_stream_runs_in_order_and_streams_run_beside_each_other():
    code = CodeWriter()
    code.launch("a")
    code.launch("b")
    code.copy(1, "d2h")

    assert simulate(alone(code), seconds(a=2.0, b=3.0, copy=4.0)).step_s == 5.0


def test_a_host_waits_where_the_queue_of_a_stream_is_full():
    """Kernels of a second, issued in a tenth: with four in the queue the tenth is issued once the sixth has begun, so
    that work of five seconds behind it ends later than they do.
    """
    code = CodeWriter()
    for _ in range(10):
        code.launch("a")
    code.host_work("python", 5.0)
    code.launch("a")

    def step_s(**limits: float) -> float:
        costs = SimpleCosts(lambda _: 1.0, launch_s=0.1, gpu=GpuLimits(**limits))
        return simulate(alone(code), costs).step_s

    assert step_s() == pytest.approx(0.1 + 11.0)
    # The sixth begins at 5.1 and leaves three queued: there is room for the tenth.
    assert step_s(queue=4) == pytest.approx(5.1 + 5.0 + 0.1 + 1.0)


def test_a_long_run_says_how_far_it_is_and_can_be_ended():
    """Kernels of a second each: the clock that is reported rises to the step, and an error from the watcher gets
    out.
    """
    code = CodeWriter()
    for _ in range(5000):
        code.launch("a")
    seen: list[float] = []

    run = simulate(alone(code), seconds(a=1.0), watch=seen.append)
    assert seen == sorted(seen)
    assert len(seen) > 3
    assert 0.0 < seen[-1] <= run.step_s == 5000.0

    def ended(now: float) -> None:
        if now > 500.0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(alone(code), seconds(a=1.0), watch=ended)


def test_an_event_orders_two_streams():
    code = CodeWriter()
    code.launch("a")
    done = code.record("compute")
    code.launch("b")
    code.wait("copy", done)
    code.copy(1, "d2h")

    run = simulate(alone(code), seconds(a=2.0, b=3.0, copy=4.0))

    assert run.step_s == 6.0
    assert [(s.name, s.start_s, s.end_s) for s in run.trace.of(stream="copy")] == [("copy d2h", 2.0, 6.0)]


@pytest.mark.parametrize(("kernel_s", "expected"), [(5.0, 1.0 + 10 * 5.0), (0.25, 10 * 1.0 + 0.25)])
def test_short_kernels_are_bound_by_their_launches(kernel_s, expected):
    """N kernels of k seconds, each launched in h: h + n k when k > h, n h + k when k < h."""
    code = CodeWriter()
    for _ in range(10):
        code.launch("k")

    assert simulate(alone(code), SimpleCosts(lambda _: kernel_s, launch_s=1.0)).step_s == pytest.approx(expected)


def test_a_synchronisation_makes_the_host_wait():
    code = CodeWriter()
    code.launch("a")
    code.synchronize("compute")
    code.host_work("log", 1.0)
    code.launch("a")

    assert simulate(alone(code), seconds(a=3.0)).step_s == 7.0


def test_a_collective_starts_with_its_last_rank_and_the_wait_is_visible():
    codes = []
    for rank in range(3):
        code = CodeWriter()
        for _ in range(rank + 1):
            code.launch("a")
        code.after("comm", "compute")
        code.collective("all_reduce", "world", 8)
        codes.append(code.code(f"r{rank}", [rank]))

    run = simulate(Program(codes=tuple(codes), groups={"world": ((0, 1, 2),)}), seconds(a=1.0, all_reduce=0.5))

    assert run.step_s == 3.5
    assert {(s.rank, s.duration_s) for s in run.trace.of(category="wait")} == {(0, 2.0), (1, 1.0)}
    assert {(s.rank, s.start_s, s.end_s) for s in run.trace.of(category="communication")} == {
        (rank, 3.0, 3.5) for rank in range(3)
    }


def test_a_message_waits_for_both_ends_and_draws_an_arrow():
    first, second = CodeWriter(), CodeWriter()
    first.launch("a")
    first.after("comm", "compute")
    first.send("pair", 1, 8)
    second.recv("pair", 0, 8)
    second.after("compute", "comm")
    second.launch("a")
    program = Program(codes=(first.code("a", [0]), second.code("b", [1])), groups={"pair": ((0, 1),)})

    run = simulate(program, seconds(a=2.0, message=1.0))

    assert run.step_s == 5.0
    (flow,) = run.trace.flows
    assert (flow.rank, flow.to_rank, flow.start_s, flow.end_s) == (0, 1, 2.0, 3.0)


# --- contention -------------------------------------------------------------------------------------------------------


def test_a_kernel_slows_down_while_a_collective_holds_sms():
    """100 s of work on 100 SMs; for 40 s another kernel holds 25 of them: 40 s at 3/4 speed, then full speed."""
    code = CodeWriter()
    code.launch("gemm")
    code.collective("all_gather", "world", 8)

    def duration(instruction):
        return Cost(seconds=100.0, sms=100) if isinstance(instruction, Launch) else Cost(seconds=40.0, sms=25)

    program = Program(codes=(code.code("x", [0, 1]),), groups={"world": ((0, 1),)})
    run = simulate(program, SimpleCosts(duration, gpu=GpuLimits(sms=100)))

    assert next(run.trace.of(category="communication")).end_s == 40.0
    assert run.step_s == pytest.approx(40 + (100 - 0.75 * 40))


def test_a_kernel_that_needs_few_sms_does_not_slow_down():
    code = CodeWriter()
    code.launch("small")
    code.collective("all_gather", "world", 8)

    def duration(instruction):
        return Cost(seconds=10.0, sms=50 if isinstance(instruction, Launch) else 25)

    program = Program(codes=(code.code("x", [0, 1]),), groups={"world": ((0, 1),)})

    assert simulate(program, SimpleCosts(duration, gpu=GpuLimits(sms=100))).step_s == 10.0


def test_memory_bandwidth_is_shared_max_min():
    """Demands 80 and 40 of 90: they get 50 and 40. The first has 10 s - 6.25 s x 1 left after 10 s at 5/8 speed."""
    code = CodeWriter()
    code.launch("copy kernel")
    code.launch("other", stream="side")

    def duration(instruction):
        return Cost(seconds=10.0, hbm_bytes_per_s=80.0 if instruction.name == "copy kernel" else 40.0)

    run = simulate(alone(code), SimpleCosts(duration, gpu=GpuLimits(hbm_bytes_per_s=90.0)))

    assert next(run.trace.of(stream="side")).end_s == pytest.approx(10.0)
    assert run.step_s == pytest.approx(10.0 + (10.0 - 6.25))


class OnePort(SimpleCosts):
    """All messages cross one link of 100 bytes/s."""

    def routes(self, ranks):
        return (LinkUse(link="port"),) if len(ranks) > 1 else ()

    def link_bytes_per_s(self, link):
        return 100.0


@pytest.mark.parametrize("folded", [True, False])
def test_messages_share_a_port(folded):
    """Three at a time through one port take three times as long; with folding they are one message that counts
    thrice.
    """
    a, b = CodeWriter(), CodeWriter()
    a.send("pair", 1, 8)
    b.recv("pair", 0, 8)
    groups = {"pair": ((0, 3), (1, 4), (2, 5))}
    program = Program(codes=(a.code("a", [0, 1, 2]), b.code("b", [3, 4, 5])), groups=groups)

    run = simulate(program, OnePort(lambda _: Cost(seconds=2.0, link_bytes_per_s=100.0)), folded=folded)

    assert run.step_s == pytest.approx(6.0)
    assert len(run.folding.classes) == (2 if folded else 6)
    (port,) = run.trace.counters
    assert port.samples[0][1] == pytest.approx(100.0)
    assert port.samples[-1][1] == 0.0


def test_a_message_that_starts_later_takes_half_of_the_port_from_then_on():
    """0-1 from time 0, 2-3 from time 1, 4 s each alone: 1 + 3/0.5 = 7 for the first, then 1 s alone for the second."""
    codes = []
    for rank in range(4):
        code = CodeWriter()
        if rank >= 2:
            code.launch("head start")
            code.after("comm", "compute")
        (code.recv if rank % 2 else code.send)("pair", 1 - rank % 2, 8)
        codes.append(code.code(f"r{rank}", [rank]))
    program = Program(codes=tuple(codes), groups={"pair": ((0, 1), (2, 3))})

    def duration(instruction):
        return 1.0 if isinstance(instruction, Launch) else Cost(seconds=4.0, link_bytes_per_s=100.0)

    run = simulate(program, OnePort(duration))

    ends = {span.rank: span.end_s for span in run.trace.of(category="communication")}
    assert ends[0] == pytest.approx(7.0)
    assert ends[2] == pytest.approx(8.0)


@pytest.mark.parametrize("folded", [True, False])
def test_copies_of_two_gpus_share_their_way_to_the_host(folded):
    code = CodeWriter()
    code.copy(8, "h2d")
    program = Program(codes=(code.code("x", [0, 1, 2, 3]),))

    class Switches(SimpleCosts):
        def routes(self, ranks):
            return (LinkUse(link=("pcie", ranks[0] // 2)),)

        def link_bytes_per_s(self, link):
            return 100.0

    run = simulate(program, Switches(lambda _: Cost(seconds=3.0, link_bytes_per_s=80.0)), folded=folded)

    assert run.step_s == pytest.approx(3.0 * 160 / 100)
    assert len(run.folding.classes) == (1 if folded else 4)


# --- memory, ends, sameness -------------------------------------------------------------------------------------------


def test_events_tell_when_they_happened():
    code = CodeWriter()
    code.launch("a")
    first = code.record("compute")
    code.launch("a")
    second = code.record("compute")

    run = simulate(alone(code), seconds(a=1.0))

    assert run.step_s == 2.0
    assert run.events_s[0] == {first: 1.0, second: 2.0}


def test_a_program_that_cannot_end_says_who_waits_for_whom():
    a, b = CodeWriter(), CodeWriter()
    a.collective("all_reduce", "x", 8)
    a.collective("all_reduce", "y", 8)
    b.collective("all_reduce", "y", 8)
    b.collective("all_reduce", "x", 8)
    groups = {"x": ((0, 1),), "y": ((0, 1),)}

    with pytest.raises(PlannerError, match=r"rank 0 comm \(all_reduce x\) waits for rank 1 comm \(all_reduce y\)"):
        simulate(Program(codes=(a.code("a", [0]), b.code("b", [1])), groups=groups), seconds(all_reduce=1.0))


def test_receives_that_take_every_sm_starve_the_kernel_they_wait_for():
    """As on a real GPU: the partner's message comes only after ours, which needs a kernel that finds no SM."""
    codes = []
    for rank in range(2):
        code = CodeWriter()
        code.recv("pair", 1 - rank, 8, stream="in")
        code.launch("a")
        code.after("out", "compute")
        code.send("pair", 1 - rank, 8, stream="out")
        codes.append(code.code(f"r{rank}", [rank]))
    program = Program(codes=tuple(codes), groups={"pair": ((0, 1),)})

    def run(sms):
        return simulate(program, SimpleCosts(lambda _: Cost(seconds=1.0, sms=sms), gpu=GpuLimits(sms=8)))

    assert run(4).step_s == 2.0
    with pytest.raises(PlannerError, match="hold every SM of rank 0"):
        run(8)


def test_without_spans_the_times_are_the_same():
    code = CodeWriter()
    code.launch("a")
    costs = seconds(a=1.0)

    bare = simulate(alone(code), costs, spans=False)

    assert (bare.step_s, bare.trace.spans, bare.trace.counters) == (1.0, (), ())
    assert bare.events_s == simulate(alone(code), costs).events_s


@pytest.mark.parametrize("copy_first", [True, False])
def test_a_copy_takes_its_share_of_what_a_transfer_leaves(copy_first):
    """A kernel of 10 s next to a transfer that holds half of the SMs and a copy that takes 0.7 of the rest for 10 s."""
    env = simpy.Environment()
    contention = Contention(env)
    contention.add_gpu(0, 100.0)
    kernel = contention.start(Activity(10.0, gpu=0, sms=100.0))
    if not copy_first:
        contention.hold(0, 50.0)
    env.timeout(10.0).callbacks.append(contention.take(0, 0.7))
    if copy_first:
        contention.hold(0, 50.0)

    env.run(until=kernel)

    assert env.now == pytest.approx(10.0 + (10.0 - 10.0 * 0.5 * 0.3) / 0.5)
