"""Batches of heads on a GPU, each on a stream of its own. A scan goes through the chunks of a head one after the other, on few
multiprocessors; the rest of the card computes what other batches have in parallel, and what they need travels meanwhile:

    lane 0   receive  chunks  scan ........  results  send
    lane 1            receive  chunks  scan ........  results  send

Earlier lanes have priority, so that their scans begin as soon as they can."""
from __future__ import annotations

import contextlib
import functools

import torch

MOST = 4  # torch has streams of so many priorities


class Lanes(contextlib.AbstractContextManager):
    """Lane i is a context. At the end everything is ordered by the caller's stream again. On a CPU, and with one batch, there are
    no streams."""

    def __init__(self, device: torch.device, count: int):
        self._own, self._streams = None, ()
        if device.type == "cuda" and count > 1:
            self._own, self._streams = torch.cuda.current_stream(device), _streams(device, count)

    def __getitem__(self, i: int):
        if not self._streams:
            return contextlib.nullcontext()
        self._streams[i].wait_stream(self._own)
        return torch.cuda.stream(self._streams[i])

    def __exit__(self, *_):
        for stream in self._streams:
            self._own.wait_stream(stream)
        for stream in self._streams:  # memory of a lane is reused in its order, but the caller's stream may still read it
            stream.wait_stream(self._own)


@functools.cache
def _streams(device: torch.device, count: int) -> tuple:
    return tuple(torch.cuda.Stream(device, priority=i + 1 - MOST) for i in range(count))
