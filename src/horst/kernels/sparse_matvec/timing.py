"""Seconds of a call on a GPU as a model's decoding sees them: in a graph, with weights that no cache holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def copies_beyond_cache(nbytes: int, device: torch.device, most: int = 128) -> int:
    """How many copies of a weight of ``nbytes`` are more than twice what the device's cache holds, at most ``most``."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(most, -(-2 * cache // max(nbytes, 1))))


def graph_seconds(calls: Sequence[Callable[[], object]], *, launches: int = 32, rounds: int = 9) -> float:
    """Seconds per call: the median over replays of one graph that holds the calls in turns.

    Args:
        calls: Functions that do the same on different copies of a weight. They are captured in a CUDA graph, so the
            host's own time is not counted.
        launches: Least number of calls per graph.
        rounds: Replays that are timed.
    """
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    turns = -(-launches // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / (turns * len(calls)))
    return statistics.median(times)
