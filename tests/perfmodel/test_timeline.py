import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.step import COMMON_DEVIATION, combine
from perfmodel.timeline import COMPUTE, HOST, SLOWER_DEVIATION, Op, schedule


def op(name, stream, us, *after, low=None, high=None, **more):
    return Op(name, stream, us, us if low is None else low, us if high is None else high, after, **more)


def test_a_small_step_by_hand():
    """Forward 10, exchange 4 that the second layer needs, its backward overlapped by a reduction of 9.

    compute: a 0-10, (waits for x) b 14-20, c 20-25, then waits for r to end at 29, step 29-31
    network: x 10-14, r 20-29
    """
    timeline = schedule(
        [
            op("a", COMPUTE, 10),
            op("x", "network", 4, "a"),
            op("b", COMPUTE, 6, "x"),
            op("r", "network", 9, "b"),
            op("c", COMPUTE, 5),
            op("step", COMPUTE, 2, "r", kind="optimizer"),
        ]
    )
    assert timeline.starts == (0, 10, 14, 20, 20, 29)
    assert timeline.total_us == 31
    assert [timeline.ops[i].name for i in timeline.critical_path] == ["a", "x", "b", "r", "step"]
    assert timeline.exposed_us == 4 + 4  # x alone from 10 to 14, r alone from 25 to 29
    assert timeline.busy_us(COMPUTE) == 23 and timeline.busy_us("network") == 13
    assert timeline.streams == (COMPUTE, "network")
    assert timeline.sum_us() == {"compute": 34, "optimizer": 2}
    assert timeline.sum_us("stream", timeline.critical_path) == {COMPUTE: 18, "network": 13}


def test_what_runs_at_once_slows_each_other():
    """r takes 6 alone and three times as long beside a kernel, which takes twice as long beside it.

    compute: a 0-4, b from 4: at half its pace until r ends, having done 9 of its 10 by 22, then 22-23, c 23-24
    network: r 4-22
    """
    ops = [op("a", COMPUTE, 4), op("r", "network", 6, "a"), op("b", COMPUTE, 10), op("c", COMPUTE, 1)]
    timeline = schedule(ops, lambda kernel, other: (2.0, 3.0))
    assert timeline.starts == (0, 4, 4, 23) and timeline.ends == (4, 22, 23, 24)
    assert timeline.slowed_us == 9 and timeline.busy_us("network") == 18 and timeline.exposed_us == 0
    assert timeline.sum_us() == {"compute": 42}
    assert schedule(ops, lambda kernel, other: (1.0, 1.0)) == schedule(ops)


def test_beside_several_a_kernel_goes_as_slowly_as_beside_the_worst():
    ops = [op("k", COMPUTE, 10), op("x", "nvlink", 100), op("y", "network", 100)]
    timeline = schedule(ops, lambda kernel, other: (2.0, 1.0) if other.name == "x" else (4.0, 1.5))
    assert timeline.ends[0] == 40 and timeline.ends[1] == 100
    # While the kernel runs, y goes on at two thirds of its pace.
    assert timeline.ends[2] == pytest.approx(40 + 100 - 40 / 1.5)


def test_a_host_slows_nothing_and_is_no_communication():
    """It launches for 30 us; a kernel of 10 runs, 20 beside a collective that slows it, and one of 5 is exposed."""
    host = Op("launches", HOST, 30, 30, 30)
    ops = [host, op("a", COMPUTE, 10), op("r", "net", 40), op("s", "net", 5)]
    made = schedule(ops[:2], lambda own, other: (2.0, 2.0))
    assert made.ends == (30, 10) and made.total_us == 30 and made.exposed_us == made.slowed_us == 0
    assert [made.ops[i].name for i in made.critical_path] == ["launches"]
    made = schedule(ops, lambda own, other: (2.0, 1.0))
    assert made.ends == (30, 20, 40, 45) and made.exposed_us == 25 and made.slowed_us == 10


def test_a_slowed_total_is_less_sure():
    ops = [op("r", "network", 100), op("k", COMPUTE, 100)]
    alone, slowed = (schedule(ops, slower).interval() for slower in (None, lambda kernel, other: (2.0, 1.0)))
    total = schedule(ops, lambda kernel, other: (2.0, 1.0)).total_us
    assert total == 150 and slowed[1] - total > 1.645 * 0.95 * SLOWER_DEVIATION * 50 > 2 * (alone[1] - 100)


def test_spans_join_what_is_alike_and_adjacent():
    ops = [op("a", COMPUTE, 5, kind="f"), op("b", COMPUTE, 5, kind="f"), op("r", "network", 30, "b", kind="r")]
    ops += [op("c", COMPUTE, 5, kind="g"), op("d", COMPUTE, 5, "r", kind="g")]
    spans = schedule(ops).spans(lambda entry: entry.kind)
    assert spans == {COMPUTE: [(0, 10, "f"), (10, 15, "g"), (40, 45, "g")], "network": [(10, 40, "r")]}


def test_two_fabrics_run_side_by_side():
    timeline = schedule([op("x", "nvlink", 7), op("y", "network", 5), op("z", COMPUTE, 3, "x", "y")])
    assert timeline.starts == (0, 0, 7) and timeline.total_us == 10
    assert timeline.exposed_us == 7
    assert timeline.streams == (COMPUTE, "nvlink", "network")


def test_a_stream_keeps_its_order_even_if_a_later_operation_could_run():
    timeline = schedule([op("a", COMPUTE, 10), op("r1", "network", 1, "a"), op("r2", "network", 1)])
    assert timeline.starts == (0, 10, 11)


def test_nothing_takes_no_time():
    timeline = schedule([])
    assert (timeline.total_us, timeline.exposed_us, timeline.critical_path, timeline.interval()) == (0, 0, (), (0, 0))


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([op("a", "s", 1), op("a", "s", 1)], "'a' is listed twice"),
        ([op("a", "s", 1, "b"), op("b", "s", 1)], "'a' waits for 'b', which is not listed before it"),
        ([op("a", "s", -1)], "'a' takes -1 us"),
        ([op("a", "s", float("nan"))], "'a' takes nan us"),
        ([op("a", "s", float("inf"))], "'a' takes inf us"),
        ([op("a", "s", 1, low=2, high=3)], r"'a' takes 1 us \[2, 3\]; give 0 <= low <= us <= high"),
    ],
)
def test_what_cannot_be_scheduled_is_named(ops, message):
    with pytest.raises(ValueError, match=message):
        schedule(ops)


@st.composite
def programs(draw):
    count = draw(st.integers(1, 25))
    ops = []
    for i in range(count):
        after = draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        us = draw(st.floats(0, 100, allow_subnormal=False))
        spread = draw(st.floats(0, 0.5))
        stream = draw(st.sampled_from([COMPUTE, "nvlink", "network"]))
        ops.append(Op(str(i), stream, us, us * (1 - spread), us * (1 + spread), tuple(map(str, after))))
    return ops


def union_length(intervals):
    """Length of a union of intervals, by sampling every gap between ends."""
    points = sorted({point for interval in intervals for point in interval})
    middles = [(a, b) for a, b in zip(points, points[1:], strict=False)]
    return sum(b - a for a, b in middles if any(s <= a and b <= e for s, e in intervals))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ops=programs(), own=st.floats(1, 3), other=st.floats(1, 5))
def test_of_any_program_slowed(ops, own, other):
    alone, slowed = schedule(ops), schedule(ops, lambda kernel, beside: (own, other))
    close = 1e-6 * (1 + slowed.total_us)
    for entry, spent in zip(ops, slowed.spent_us, strict=True):
        assert entry.us - close <= spent <= entry.us * (own if entry.stream == COMPUTE else other) + close
    assert all(slowed.ends[i] <= slowed.starts[j] + close for j, waits in enumerate(slowed.waits) for i in waits)
    assert alone.total_us - close <= slowed.total_us <= max(own, other) * alone.total_us + close
    low, high = slowed.interval()
    assert low <= slowed.total_us <= high


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ops=programs())
def test_of_any_program(ops):
    timeline = schedule(ops)
    spans = dict(zip((o.name for o in ops), zip(timeline.starts, timeline.ends, strict=True), strict=True))
    close = 1e-9 * (1 + timeline.total_us)
    # Dependencies hold, and streams run one operation at a time in order.
    for entry in ops:
        assert all(spans[name][1] <= spans[entry.name][0] + close for name in entry.after)
    for stream in timeline.streams:
        own = [spans[o.name] for o in ops if o.stream == stream]
        assert all(first[1] <= second[0] + close for first, second in zip(own, own[1:], strict=False))
        assert timeline.total_us >= timeline.busy_us(stream) - close
    # No chain of dependencies is longer than the whole.
    longest: dict[str, float] = {}
    for entry in ops:
        longest[entry.name] = entry.us + max((longest[name] for name in entry.after), default=0.0)
    assert timeline.total_us >= max(longest.values()) - close
    assert timeline.total_us <= sum(o.us for o in ops) + close
    # Nothing waits without a reason: it starts at 0 or when something that it waits for ends.
    for i, start in enumerate(timeline.starts):
        assert start == 0 or any(timeline.ends[j] == start for j in timeline.waits[i])
    # The critical path is a chain without gaps that spans the whole.
    path = timeline.critical_path
    assert timeline.starts[path[0]] == 0 and timeline.ends[path[-1]] == timeline.total_us
    assert all(timeline.ends[a] == timeline.starts[b] for a, b in zip(path, path[1:], strict=False))
    assert sum(ops[i].us for i in path) == pytest.approx(timeline.total_us)
    # Exposed: where others run and compute does not.
    compute = [spans[o.name] for o in ops if o.stream == COMPUTE]
    everything = [spans[o.name] for o in ops]
    assert timeline.exposed_us == pytest.approx(union_length(everything) - union_length(compute), abs=1e-6)
    assert timeline.exposed_us <= sum(o.us for o in ops if o.stream != COMPUTE) + close


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ops=programs(), slower=st.integers(0, 24))
def test_a_longer_operation_never_shortens_the_step(ops, slower):
    before = schedule(ops).total_us
    i = slower % len(ops)
    ops[i] = Op(ops[i].name, ops[i].stream, ops[i].us + 5, ops[i].low_us, ops[i].high_us + 5, ops[i].after)
    assert schedule(ops).total_us >= before - 1e-9 * (1 + before)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ops=programs())
def test_the_interval_holds_the_total_and_stays_between_the_extremes(ops):
    timeline = schedule(ops)
    low, high = timeline.interval()
    assert 0 <= low <= timeline.total_us <= high
    assert (low, high) == timeline.interval()


def test_on_one_stream_the_interval_is_that_of_a_sum():
    generator = np.random.default_rng(0)
    times = generator.uniform(10, 200, 40)
    lows, highs = times * 0.9, times * 1.1
    ops = [Op(str(i), COMPUTE, *entry) for i, entry in enumerate(zip(times, lows, highs, strict=True))]
    got = schedule(ops).interval(samples=20_000)
    total, low, high = combine(times, lows, highs)
    assert got[0] == pytest.approx(low, rel=0.01) and got[1] == pytest.approx(high, rel=0.01)
    assert total == pytest.approx(times.sum())


def test_what_is_alike_is_off_together():
    ops = [Op(str(i), "network", 100, 80, 120, alike="wire") for i in range(25)]
    low, high = schedule(ops).interval(samples=20_000)
    assert (low, high) == pytest.approx((2000, 3000), rel=0.02)
    apart = [Op(str(i), "network", 100, 80, 120) for i in range(25)]
    low, high = schedule(apart).interval(samples=20_000)
    assert (low, high) == pytest.approx((2400, 2600), rel=0.02)


def test_compute_is_off_together_by_what_kernels_have_in_common():
    low, high = schedule([op("a", COMPUTE, 1000)]).interval(samples=20_000)
    assert (high - low) / 2 == pytest.approx(1000 * 1.645 * COMMON_DEVIATION, rel=0.05)


def test_hidden_communication_does_not_widen_the_interval():
    """A reduction far shorter than what it hides behind may be off by half: the step is not."""
    ops = [op("a", COMPUTE, 10), Op("r", "network", 100, 50, 150, ("a",)), op("b", COMPUTE, 1000)]
    hidden = schedule(ops).interval()
    alone = schedule([ops[0], ops[2]]).interval()
    assert hidden[1] - hidden[0] == pytest.approx(alone[1] - alone[0], rel=0.2)
