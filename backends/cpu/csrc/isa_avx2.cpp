// The kernels for avx2. Compiled with this set enabled for this file alone (setup.py), and called only where the processor has it.
#define OARLOCK_ISA isa_avx2
#define OARLOCK_NAME "avx2"
#define OARLOCK_LANES 8
#include "table.inl"
