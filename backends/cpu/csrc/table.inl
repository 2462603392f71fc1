// The table of one instruction set. The including file has named the set; see vec.h.
#include "attention.inl"
#include "linear.inl"
#include "rows.inl"
#include "sampling.inl"

namespace OARLOCK_ISA {
namespace {

void packed(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  if (a.dtype == Dtype::bf16) packed_typed<bf16>(a, m0, m1, n0, n1); else packed_typed<float>(a, m0, m1, n0, n1);
}

void plain(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  if (a.dtype == Dtype::bf16) plain_typed<bf16>(a, m0, m1, n0, n1); else plain_typed<float>(a, m0, m1, n0, n1);
}

}  // namespace

extern const Kernels table;
const Kernels table = {
    OARLOCK_NAME, plain, packed, false, widen, attend, merge, rms_norm, layer_norm, rotary, activation, combine, argmax, gumbel, sum_exp, at_least,
};

}  // namespace OARLOCK_ISA
