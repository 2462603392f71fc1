"""Every route of this plugin.

Owns: the list.
Reads: `oarlock.backend_api`.
Never: answers a request itself.
"""

from __future__ import annotations

from oarlock.backend_api import RouteServer

from oarlock_pooling.embeddings import Embeddings


def add(server: RouteServer) -> None:
    """Add them."""
    Embeddings(server).add()
