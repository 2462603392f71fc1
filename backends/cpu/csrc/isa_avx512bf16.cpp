// The kernels for avx512bf16. Compiled with this set enabled for this file alone (setup.py), and called only where the processor has it.
#define OARLOCK_ISA isa_avx512bf16
#define OARLOCK_NAME "avx512bf16"
#define OARLOCK_LANES 16
#define OARLOCK_BF16
#include "table.inl"
