"""The torch half of core: models, the one model runner, the sampler, the worker. Names no device.

Owns: everything that touches tensors.
Reads: `messages`, `shapes`, `kv_spec`, `model_summary`, `sampling_params`, `config`, `errors`, `backend_api`.
Never: is imported by the control plane (executors load `oarlock.runtime.worker` by dotted path).
"""
