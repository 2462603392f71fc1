"""The records of a model family, from where plugins import them too.

Owns: nothing.
Reads: `backend_api.runtime.model`.
Never: holds a weight.
"""

from oarlock.backend_api.runtime.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec, WeightSpec

__all__ = ["AttentionSpec", "LayerSpec", "MlpSpec", "ModelSpec", "NormSpec", "RopeSpec", "WeightSpec"]
