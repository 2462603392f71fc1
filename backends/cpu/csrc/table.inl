// The table of one instruction set. The including file has named the set; see vec.h.
#include "attention.inl"
#include "linear.inl"
#include "rows.inl"
#include "sampling.inl"

namespace OARLOCK_ISA {

extern const Kernels table;
const Kernels table = {
    OARLOCK_NAME, plain, packed, widen, attend, merge, rms_norm, layer_norm, rotary, activation, combine, argmax, gumbel, sum_exp, at_least,
};

}  // namespace OARLOCK_ISA
