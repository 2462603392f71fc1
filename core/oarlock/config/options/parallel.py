"""Option table: device, parallelism, executors.

Owns: these rows.
Reads: `config.option`.
Never: holds logic beyond a value's mapping.
"""

from __future__ import annotations

from functools import partial

from oarlock.config.option import Option

_device = partial(Option, group="Device")
_parallel = partial(Option, group="Parallelism")
_ray = partial(_parallel, fate="refused", feature="Ray executor", remedy="use --distributed-executor-backend mp")
_pool = partial(_parallel, fate="refused", feature="tokenizer pool", remedy="leave it out: the tokenizer runs in the server's process")

OPTIONS: tuple[Option, ...] = (
    _device("device", "str", "auto", "Device by name (oarlock devices lists them); auto: the best one that is here.", "device.device"),
    _device("enforce-eager", "bool", False, "Capture and compile nothing.", "device.enforce_eager"),
    _device(
        "max-seq-len-to-capture", "int", 8192, "Longest context that captured graphs serve; longer ones run eagerly.",
        "device.max_seq_len_to_capture", low=1,
    ),
    _device(
        "max-context-len-to-capture", "int", None, "Older name of --max-seq-len-to-capture.", "device.max_seq_len_to_capture", low=1,
        fate="obsolete", instead="max-seq-len-to-capture",
    ),
    _device("disable-custom-all-reduce", "bool", False, "Use the collective library's all-reduce only.", "device.disable_custom_all_reduce"),
    _device("threads", "int", None, "Compute threads of a host device. Unset: from the CPUs that this process may use.", "device.threads", low=1),
    _parallel("tensor-parallel-size", "int", 1, "Devices that share each layer.", "parallel.tensor_parallel_size", aliases=("tp",), low=1),
    _parallel(
        "pipeline-parallel-size", "int", 1, "Groups of devices that share the layers.", "parallel.pipeline_parallel_size", aliases=("pp",), low=1,
        built=(1,), feature="pipeline parallelism", remedy="use --tensor-parallel-size",
    ),
    _parallel(
        "distributed-executor-backend", "str", None, "mp: worker processes; inline: the worker runs in the engine. Unset: mp for several devices.",
        "parallel.executor", choices=("ray", "mp", "inline"), built=("mp", "inline"), feature="Ray executor", remedy="use mp",
        store=lambda value: value or "auto", extended_by="executor",
    ),
    _ray("worker-use-ray", "bool", False, "Older spelling of --distributed-executor-backend ray."),
    _ray("engine-use-ray", "bool", False, "Run the engine as a Ray actor.", remedy="leave it out: the engine has a process of its own"),
    _ray("ray-workers-use-nsight", "bool", False, "Profile Ray workers with Nsight.", remedy="leave it out"),
    _parallel(
        "max-parallel-loading-workers", "int", None, "Workers that load weights at the same time, to limit host memory. Unset: all.",
        "parallel.max_parallel_loading_workers", low=1,
    ),
    _pool("tokenizer-pool-size", "int", 0, "Tokenizers beside the server's own.", low=0),
    _pool("tokenizer-pool-type", "str", "ray", "What runs the tokenizer pool."),
    _pool("tokenizer-pool-extra-config", "object", None, "JSON object for the tokenizer pool."),
)  # fmt: skip
