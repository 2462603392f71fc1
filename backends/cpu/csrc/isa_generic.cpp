// The kernels for any processor: four lanes, which compilers map to SSE2 or NEON.
#define OARLOCK_ISA isa_generic
#define OARLOCK_NAME "generic"
#define OARLOCK_LANES 4
#include "table.inl"
