"""The light module, which the entry point names: what device this package brings. Imported by every command: no torch here."""

from oarlock.backend_api import Claims, DeviceSpec, ProbeResult, hookimpl

DTYPES = ("float32", "bfloat16")  # preferred first
BLOCK_SIZES = (16, 32)


def probe() -> ProbeResult:
    """Whether the device is here, in less than 50 ms and without raising: look into /dev or /sys, or ask the driver by ctypes."""
    claims = Claims(dtypes=DTYPES, block_sizes=BLOCK_SIZES, host_is_device=True, default_swap_bytes=0)
    return ProbeResult("available", "CPU tensors in place of a chip", claims=claims)


@hookimpl
def devices() -> list[DeviceSpec]:
    return [
        DeviceSpec(
            name="template",
            probe=probe,
            factory="oarlock_template.device:TemplateDevice",
            distribution="oarlock-template-backend",
            priority=-1,  # an accelerator: 10 or more; below 0: taken only by its name
            torch_install="pip install 'torch>=2.11'",
        )
    ]
