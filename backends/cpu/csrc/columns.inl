// What linears that walk tile columns of 16 outputs share (isa_fp16.cpp, isa_vnni.cpp): which columns, and where their sums go.
#include "linear.inl"
#include "vmath.h"

namespace OARLOCK_ISA {
namespace {

INLINE vf numbers_at(const void* table, bool is_half, int64_t at) {
  if (!is_half) return load(static_cast<const float*>(table) + at);
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(table) + at)));
}

// Outputs [n, n + count) of row m, with the bias, rounded once.
template <int NV> INLINE void put_row(const LinearArgs& a, const vf (&row)[NV], int64_t m, int64_t n, int64_t count) {
  if (count == NV * 16 && !a.bias) {
    for (int j = 0; j < NV; ++j) {
      int64_t at = m * a.ldo + n + j * 16;
      if (a.out_f32) store(static_cast<float*>(a.out) + at, row[j]); else store(static_cast<bf16*>(a.out) + at, row[j]);
    }
    return;
  }
  alignas(64) float numbers[NV * 16];
  for (int j = 0; j < NV; ++j) store(numbers + j * 16, row[j]);
  store_row<bf16>(a, numbers, m, n, count);
}

INLINE vf rounded(vf v) {
  bf16 numbers[16];
  store(numbers, v);
  return load(numbers);
}

INLINE vf activated(Act act, vf v) {
  switch (act) {
    case Act::relu: return relu(v);
    case Act::gelu: return gelu(v);
    case Act::gelu_tanh: return gelu_tanh(v);
    case Act::silu: return silu(v);
  }
  return v;
}

// The tile column of w that is j of those from output n on: gates come before what they are multiplied with.
template <int NV> INLINE int64_t column_of(const LinearArgs& a, int64_t n, int j) {
  return a.gate && j >= NV / 2 ? (n + a.gate) / 16 + j - NV / 2 : n / 16 + j;
}

template <int NV> INLINE void put(const LinearArgs& a, const vf (&row)[NV], int64_t m, int64_t n, int64_t count) {
  if constexpr (NV % 2 == 0) {
    if (a.gate) {
      for (int j = 0; j < NV / 2; ++j) store(static_cast<bf16*>(a.out) + m * a.ldo + n + j * 16, activated(a.act, rounded(row[j])) * rounded(row[j + NV / 2]));
      return;
    }
  }
  put_row(a, row, m, n, count);
}

// As wide as can be, from output n0 on: calls f.operator()<NV>(n).
template <int widest, int64_t outputs, class F> INLINE void cut(int64_t n0, int64_t n1, const F& f) {
  int64_t n = n0, end = (n1 + outputs - 1) / outputs * outputs;
  for (; n + outputs * widest <= end; n += outputs * widest) f.template operator()<widest>(n);
  if constexpr (widest > 2)
    for (; n + outputs * 2 <= end; n += outputs * 2) f.template operator()<2>(n);
  for (; n < end; n += outputs) f.template operator()<1>(n);
}

}  // namespace
}  // namespace OARLOCK_ISA
