"""What a configuration asks of a device: refused where the device cannot, said where the device already does so.

Owns: `check_device`, `check_claims`, `notes_for`.
Reads: `config.sections`, declared capabilities and claims.
Never: knows a device by name; changes the configuration.
"""

from __future__ import annotations

from oarlock.backend_api.capabilities import Capabilities, Claims
from oarlock.config.sections import DeviceConfig, EngineConfig
from oarlock.errors import UnsupportedByBackend


def check_claims(claims: Claims | None, config: EngineConfig, device: str) -> None:
    """`check_device` by what the probe claims, before a process is started or a heavy module imported. What it does not claim is left to that.

    Raises:
        UnsupportedByBackend: as `check_device`; also a KV cache that is larger than the whole device, and more ranks than devices.
    """
    if claims is None:
        return
    cache, model = config.cache, config.model
    dtypes = claims.dtypes or (model.dtype,)
    sizes = claims.block_sizes or (cache.block_size or 0,)
    known = Capabilities(
        dtypes=dtypes, block_sizes=sizes, kv_dtypes=(cache.kv_cache_dtype,), host_is_device=claims.host_is_device,
        default_swap_bytes=claims.default_swap_bytes,
    )  # fmt: skip
    check_device(known, config, device)
    ranks = config.parallel.tensor_parallel_size
    if claims.num_devices is not None and ranks > claims.num_devices:
        raise UnsupportedByBackend(f"--tensor-parallel-size {ranks}: devices of {device} here: {claims.num_devices}; take no more")
    wanted = cache.kv_cache_bytes or 0
    if claims.memory_bytes is not None and wanted > claims.memory_bytes:
        text = f"--kv-cache-memory {wanted / 2**30:.2f} GiB: {device} has {claims.memory_bytes / 2**30:.2f} GiB in all"
        raise UnsupportedByBackend(f"{text}; ask for less")


def check_device(capabilities: Capabilities, config: EngineConfig, device: str) -> None:
    """Compare what was asked for with what the device declares. `device` is its description, for messages.

    Raises:
        UnsupportedByBackend: the flag, the value, and what the device offers instead.
    """
    cache, scheduler = config.cache, config.scheduler
    if cache.block_size is not None and cache.block_size not in capabilities.block_sizes:
        raise UnsupportedByBackend(f"--block-size {cache.block_size}: {device} takes {_list(sorted(capabilities.block_sizes))}")
    if config.model.dtype != "auto" and config.model.dtype not in capabilities.dtypes:
        raise UnsupportedByBackend(f"--dtype {config.model.dtype}: {device} computes in {_list(capabilities.dtypes)}")
    if cache.kv_cache_dtype not in ("auto", *capabilities.kv_dtypes):
        raise UnsupportedByBackend(f"--kv-cache-dtype {cache.kv_cache_dtype}: {device} keeps {_list(capabilities.kv_dtypes)}")
    if config.device.enforce_eager and not capabilities.dynamic_shapes:
        raise UnsupportedByBackend(f"--enforce-eager: {device} runs compiled programs of fixed shapes only; leave it out")
    if config.device.threads is not None and not capabilities.host_is_device:
        raise UnsupportedByBackend(f"--threads {config.device.threads}: {device} does not compute on the host's processor; leave it out")
    swap = capabilities.default_swap_bytes if cache.swap_space_bytes is None else cache.swap_space_bytes
    if scheduler.preemption_mode == "swap" and swap == 0:
        raise UnsupportedByBackend(f"--preemption-mode swap: {device} has no swap space by default; give it some with --swap-space GIB")


def notes_for(capabilities: Capabilities, config: EngineConfig, *, custom_all_reduce: bool = False) -> list[str]:
    """One line for every setting that this device meets without doing anything; to be logged once.

    `custom_all_reduce`: an installed plugin offers a communicator of its own here.
    """
    notes = []
    device, standard = config.device, DeviceConfig()
    if device.enforce_eager and capabilities.execution == "eager":
        notes.append("--enforce-eager: already so, this device captures and compiles nothing")
    if device.max_seq_len_to_capture != standard.max_seq_len_to_capture and (capabilities.execution != "capture" or device.enforce_eager):
        notes.append(f"--max-seq-len-to-capture {device.max_seq_len_to_capture}: already so, nothing is captured, so no context is captured beyond it")
    if device.disable_custom_all_reduce and not (custom_all_reduce and config.parallel.tensor_parallel_size > 1):
        notes.append("--disable-custom-all-reduce: already so, there is none here")
    workers = config.parallel.max_parallel_loading_workers
    if workers is not None and workers >= config.parallel.tensor_parallel_size:
        notes.append(f"--max-parallel-loading-workers {workers}: already so, there are {config.parallel.tensor_parallel_size} workers")
    return notes


def _list(values: object) -> str:
    return ", ".join(map(str, values))  # type: ignore[call-overload]
