"""The only import for plugins. This half is light: standard library and pluggy. Tensors live in `backend_api.runtime`.

Owns: the public surface and its version.
Reads: nothing else of ours.
Never: imports torch.
"""

from oarlock.backend_api.capabilities import Capabilities, Claims
from oarlock.backend_api.hookspecs import API_VERSION, PROJECT, Hooks, hookimpl, hookspec
from oarlock.backend_api.routes import (
    BytesReply,
    EventReply,
    JsonReply,
    Pooled,
    PoolOptions,
    Route,
    RouteCall,
    RouteError,
    RouteFields,
    RouteServer,
)
from oarlock.backend_api.specs import (
    AttentionSpec,
    CommunicatorSpec,
    ConfigChange,
    ConformanceProfile,
    DeviceSpec,
    Extension,
    GraphRunnerSpec,
    MemoryProfilerSpec,
    OpImpl,
    OptionSpec,
    ProbeResult,
    Problem,
    QuantizationMethod,
    Support,
    always,
)
from oarlock.backend_api.text_parsers import ParserContext, Piece, TextParser

__all__ = [
    "API_VERSION",
    "PROJECT",
    "AttentionSpec",
    "BytesReply",
    "Capabilities",
    "Claims",
    "CommunicatorSpec",
    "ConfigChange",
    "ConformanceProfile",
    "DeviceSpec",
    "EventReply",
    "Extension",
    "GraphRunnerSpec",
    "Hooks",
    "JsonReply",
    "MemoryProfilerSpec",
    "OpImpl",
    "OptionSpec",
    "ParserContext",
    "Piece",
    "PoolOptions",
    "Pooled",
    "ProbeResult",
    "Problem",
    "QuantizationMethod",
    "Route",
    "RouteCall",
    "RouteError",
    "RouteFields",
    "RouteServer",
    "Support",
    "TextParser",
    "always",
    "hookimpl",
    "hookspec",
]
