// The kernels for avx512. Compiled with this set enabled for this file alone (setup.py), and called only where the processor has it.
#define OARLOCK_ISA isa_avx512
#define OARLOCK_NAME "avx512"
#define OARLOCK_LANES 16
#include "table.inl"
