"""The conformance kit: does a device compute what core means? `oarlock conformance --device NAME`, or under pytest.

Owns: the levels (0 contract, 1 device, 2 ops, 3 attention and KV, 4 runner, 5 serve), their cases, limits and report.
Reads: `plugins`, `runtime`, `backend_api`.
Never: imports torch from this module (the pytest plugin loads it in every test run); trusts a device to check itself.

What is tested is what core would choose for the device: its own implementation where it offers one that is supported,
the reference on the device elsewhere. The oracle is the reference on the host in float64.
"""

from __future__ import annotations

LEVELS = ("contract", "device", "ops", "attention", "runner", "serve")

__all__ = ["LEVELS"]
