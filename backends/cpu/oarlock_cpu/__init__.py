"""The cpu backend: the host's own processor as an Oarlock device.

Owns: nothing; the entry point names `oarlock_cpu.plugin`.
Reads: nothing.
Never: imports torch (only `device`, `attention`, `ops` do, in a worker).
"""

__version__ = "0.1.0"
