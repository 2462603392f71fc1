"""The entry point: which checkpoints this package reads. Light: no torch.

Owns: the record of the method.
Reads: `oarlock.backend_api`.
Never: imports the reader.
"""

from __future__ import annotations

from typing import Any

from oarlock.backend_api import QuantizationMethod, hookimpl


def recognises(settings: dict[str, Any]) -> bool:
    """By name, or by the keys of quant_config.json, which older tools wrote without one."""
    return settings.get("quant_method") == "awq" or ("quant_method" not in settings and "w_bit" in settings)


@hookimpl
def quantization() -> list[QuantizationMethod]:
    """One method; its weights are computed by core's int4 ops, or a device's."""
    return [QuantizationMethod(name="awq", factory="oarlock_awq.reader:Awq", recognises=recognises)]
