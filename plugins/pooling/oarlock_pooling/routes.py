"""Every route of this plugin.

Owns: the list.
Reads: `oarlock.backend_api`.
Never: answers a request itself.
"""

from __future__ import annotations

from oarlock.backend_api import RouteServer

from oarlock_pooling.classes import Classes
from oarlock_pooling.embeddings import Embeddings
from oarlock_pooling.scores import Scores


def add(server: RouteServer) -> None:
    """Add them."""
    for routes in (Embeddings(server), Scores(server), Classes(server)):
        routes.add()
