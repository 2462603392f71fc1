"""`CudaGraphRunner`: core's capture and replay over CUDA graphs.

Owns: nothing.
Reads: `oarlock.backend_api`, `vendor`.
Never: names a torch.cuda call (`vendor` does).
"""

from __future__ import annotations

import contextlib
from typing import Any

from oarlock.backend_api.runtime import CaptureRunner

from oarlock_cuda import vendor


class CudaGraphRunner(CaptureRunner):
    """CUDA graphs."""

    def new_graph(self) -> Any:
        return vendor.new_graph()

    def new_pool(self) -> Any:
        return vendor.graph_pool()

    def recording(self, graph: Any, pool: Any) -> contextlib.AbstractContextManager[Any]:
        return vendor.capture(graph, pool)
