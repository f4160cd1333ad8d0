"""How things are timed.

GPU time comes from CUDA graphs: one graph calls the function once on each of several input sets, so
that a replay touches several times the L2 cache and no launch waits for the host. Replays are
queued with events between them. `triton.testing.do_bench` was not used: it clears the cache by
writing to it, and the first kernels then pay for evicting dirty lines.

What is compared is interleaved: every repeat times all functions, each time from another one on.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

REPEATS = 3
# "Not slower than X": the median of the repeats' ratios, or the difference of the medians.
RATIO_LIMIT = 1.02
DIFFERENCE_LIMIT_US = 0.1

CPU_SPAN = 128 << 20  # bytes that CPU calls rotate over
CPU_BURST_S = 5e-4


@dataclass(frozen=True)
class Timing:
    """Microseconds per call."""

    us: float  # median of the repeats
    p20: float
    p80: float
    repeats: tuple[float, ...]  # the median of each
    how: str  # "graph" or "cpu"
    sets: int  # input sets that the calls rotate over
    samples: int


def ratio(ours: Timing, other: Timing) -> float:
    """Of times, repeat by repeat: below 1 where ours is faster."""
    return statistics.median(a / b for a, b in zip(ours.repeats, other.repeats))


def not_slower(ours: Timing, other: Timing) -> bool:
    return ratio(ours, other) <= RATIO_LIMIT or ours.us - other.us <= DIFFERENCE_LIMIT_US


def count_sets(num_bytes: int, span: int, least: int, most: int) -> int:
    """Input sets of `num_bytes` that together touch `span` bytes, within limits."""
    return max(least, min(most, math.ceil(span / max(num_bytes, 1))))


def gpu_span() -> int:
    return 5 * torch.cuda.get_device_properties().L2_cache_size


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    """One for all graphs: autograd computes gradients on the stream of their forward, so what is to be
    captured without it has to run it there."""
    return torch.cuda.Stream()


@contextlib.contextmanager
def on_capture_stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    stream = capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


class GraphTimer:
    """One call per input set, captured once. Outputs live as long as the graph, so that every call
    writes memory of its own."""

    how = "graph"

    def __init__(self, function: Callable, input_sets: Sequence[tuple]):
        self.sets = len(input_sets)
        self.input_sets = input_sets  # which the graph reads at every replay
        with on_capture_stream(torch.device("cuda")):
            for inputs in (input_sets[0], input_sets[-1]):
                function(*inputs)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(
            self.graph, stream=capture_stream(), capture_error_mode="thread_local"
        )
        with capture:
            self.outputs = [function(*inputs) for inputs in input_sets]

    def sample(self, budget_ms: float) -> list[float]:
        per_pass_ms = self._pass_times(1)[0]
        count = int(max(5, min(60, budget_ms / max(per_pass_ms, 1e-3))))
        return [ms * 1e3 / self.sets for ms in self._pass_times(count)]

    def _pass_times(self, count: int) -> list[float]:
        """Milliseconds of each of `count` replays, queued without a wait after one more that gives
        the host a head start."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        self.graph.replay()
        events[0].record()
        for event in events[1:]:
            self.graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in zip(events, events[1:])]


class CpuTimer:
    """Bursts of calls: the first of a few microseconds mostly waits for code that what ran before it
    has driven out of the caches. Timers that share input sets start at different ones: the first to
    read a set would otherwise bring it into the cache for the others."""

    how = "cpu"

    def __init__(self, function: Callable, input_sets: Sequence[tuple], start: int = 0):
        self.sets = len(input_sets)
        self.function, self.input_sets, self.next = function, input_sets, start

    def sample(self, budget_ms: float) -> list[float]:
        """The mean of one burst, whatever the budget."""
        calls, elapsed, start = 0, 0.0, time.perf_counter()
        while calls == 0 or elapsed < CPU_BURST_S:
            self.function(*self.input_sets[self.next % self.sets])
            self.next += 1
            calls += 1
            elapsed = time.perf_counter() - start
        return [elapsed / calls * 1e6]


def interleave(
    timers: Mapping[str, GraphTimer | CpuTimer], *, budget_ms: float = 20, slices: int = 1
) -> dict[str, Timing]:
    """`budget_ms` is per timer and slice; a repeat is `slices` rounds over all timers."""
    medians: dict[str, list[float]] = {name: [] for name in timers}
    everything: dict[str, list[float]] = {name: [] for name in timers}
    order = list(timers)
    for _ in range(REPEATS):
        samples: dict[str, list[float]] = {name: [] for name in timers}
        for _ in range(slices):
            for name in order:
                samples[name] += timers[name].sample(budget_ms)
            order = order[1:] + order[:1]
        for name, values in samples.items():
            medians[name].append(statistics.median(values))
            everything[name] += values
    result = {}
    for name, timer in timers.items():
        p20, p80 = percentiles(everything[name])
        result[name] = Timing(
            us=statistics.median(medians[name]),
            p20=p20,
            p80=p80,
            repeats=tuple(medians[name]),
            how=timer.how,
            sets=timer.sets,
            samples=len(everything[name]),
        )
    return result


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The 20th and the 80th."""
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return fifths[0], fifths[3]


def host_times(functions: Mapping[str, tuple[Callable, tuple]]) -> dict[str, float]:
    """Microseconds the host spends in an eager CUDA call: median of interleaved bursts, each short
    enough for the launch queue to take without waiting for the GPU."""
    bursts, calls = 30, 50  # the queue holds about a thousand launches
    times: dict[str, list[float]] = {name: [] for name in functions}
    for burst in range(bursts + 1):
        for name, (function, inputs) in functions.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function(*inputs)
            if burst:  # the first one warms up
                times[name].append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in times.items()}
