// The table of one instruction set. The including file has named the set; see vec.h.
#include "attention.inl"
#include "codes.inl"
#include "linear.inl"
#include "rows.inl"
#include "sampling.inl"

namespace OARLOCK_ISA {
namespace {

void packed(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1, const void*) {
  if (a.dtype == Dtype::bf16) packed_typed<bf16>(a, m0, m1, n0, n1); else packed_typed<float>(a, m0, m1, n0, n1);
}

void pack_rows(Dtype d, const void* x, int64_t ldx, int64_t rows, int64_t tile, int64_t K, int64_t width, float* out) {
  if (d == Dtype::bf16) pack_rows_typed(static_cast<const bf16*>(x), ldx, rows, tile, K, width, out);
  else pack_rows_typed(static_cast<const float*>(x), ldx, rows, tile, K, width, out);
}

void codes(const CodesArgs& c, const LinearArgs& a, int64_t n0, int64_t n1) {
  if (c.bits == 4) codes_typed<4>(c, a, n0, n1); else codes_typed<8>(c, a, n0, n1);
}

void unpack(const CodesArgs& c, int64_t panel, bool to_bf16, void* out) {
  if (c.bits == 4) unpack_typed<4>(c, panel, to_bf16, out); else unpack_typed<8>(c, panel, to_bf16, out);
}

void store_sums_of(const LinearArgs& a, const float* sums, int64_t m, int64_t n, int64_t count) { store_numbers(a, sums, m, n, count); }

void plain(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  if (a.dtype == Dtype::bf16) plain_typed<bf16>(a, m0, m1, n0, n1); else plain_typed<float>(a, m0, m1, n0, n1);
}

}  // namespace

extern const Kernels table;
const Kernels table = {
    OARLOCK_NAME, plain, packed, Rows::f32_tiles, kPackedRows, pack_rows, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, kFewRows, codes, unpack, store_sums_of, widen, attend, merge, rms_norm, layer_norm, rotary, activation, combine, argmax, gumbel, sum_exp, at_least,
};

}  // namespace OARLOCK_ISA
