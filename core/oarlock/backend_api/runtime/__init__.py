"""The torch half of the plugin surface: base classes, op registry, graph runners, communicators.

Owns: what a backend's heavy module imports.
Reads: `backend_api`.
Never: imports `oarlock.runtime`.
"""

from oarlock.backend_api.runtime.attention import Attention, AttentionParams, HeadSteps
from oarlock.backend_api.runtime.capture import CaptureRunner
from oarlock.backend_api.runtime.communicator import Communicator, DistributedCommunicator, IdentityCommunicator
from oarlock.backend_api.runtime.device import Device, decode_buckets, few_buckets
from oarlock.backend_api.runtime.graph import EagerRunner, GraphRunner, PureProgram
from oarlock.backend_api.runtime.memory import MemoryProfiler
from oarlock.backend_api.runtime.ops import Op, Ops, bind_ops, register_op, registry
from oarlock.backend_api.runtime.quantization import LinearFormat, Quantization, QuantizedWeight, StoredTensor

__all__ = [
    "Attention",
    "AttentionParams",
    "CaptureRunner",
    "Communicator",
    "Device",
    "DistributedCommunicator",
    "EagerRunner",
    "GraphRunner",
    "HeadSteps",
    "IdentityCommunicator",
    "LinearFormat",
    "MemoryProfiler",
    "Op",
    "Ops",
    "PureProgram",
    "Quantization",
    "QuantizedWeight",
    "StoredTensor",
    "bind_ops",
    "decode_buckets",
    "few_buckets",
    "register_op",
    "registry",
]
