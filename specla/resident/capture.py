"""CUDA graphs of one engine. They take turns, so all of them share their memory."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Captures:
    """Makes graphs on a device; `count` of them so far. Elsewhere, under the interpreter, work is done as it is."""

    def __init__(self, device: torch.device):
        self.device, self.count = device, 0
        if device.type == "cuda":
            self._stream, self._memory = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None], warm_up: Callable[[], None]) -> Callable[[], None]:
        """`work` as one launch. What it leaves must lie in tensors that were there before.

        warm_up: compiles what the capture wants compiled; of the same shapes, on nothing that matters.
        """
        self.count += 1
        if self.device.type != "cuda":
            return work
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                warm_up()
                self._stream.synchronize()
                # what other threads do meanwhile, a loader that pins memory say, is no part of it
                with torch.cuda.graph(
                    graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
                ):
                    work()
        finally:
            current.wait_stream(self._stream)
        return graph.replay
