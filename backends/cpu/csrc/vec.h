// Vectors of one instruction set. Included by each isa_*.cpp after it has defined
//   OARLOCK_ISA    the namespace of this set's kernels
//   OARLOCK_LANES  32-bit lanes of a vector
// GCC's and Clang's vector types carry the arithmetic; intrinsics only where those have no word for it.
#pragma once
#include <cstdint>
#include <cstring>

#include "bf16.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

namespace OARLOCK_ISA {

constexpr int W = OARLOCK_LANES;
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

INLINE vf splat(float x) { return x - vf{}; }
INLINE vi splat(int32_t x) { return x - vi{}; }
INLINE vf as_float(vi x) { return (vf)x; }
INLINE vi as_int(vf x) { return (vi)x; }

INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vi load_units(const void* p) {
  vi v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE int32_t load_unit(const void* p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
  uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

// ---- what differs between instruction sets -------------------------------------------------------------------------

#if OARLOCK_LANES == 16
INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf load(const bf16* p) {
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
}
#elif OARLOCK_LANES == 8
INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf load(const bf16* p) {
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
}
#else
INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf max(vf a, vf b) { return a > b ? a : b; }
INLINE vf load(const bf16* p) {
  vh h;
  memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
}
#endif

// Rounds to nearest even; NaN stays NaN.
INLINE void store(bf16* p, vf v) {
  vu u = (vu)v;
  vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  vu quiet = (u >> 16) | 0x40;
  vh h = __builtin_convertvector((vu)(v == v ? (vi)rounded : (vi)quiet), vh);
  memcpy(p, &h, sizeof h);
}

// Number p of each unit. A bfloat16 becomes a float32 by a shift or a mask: so products are full float32 products, which on
// most processors run at twice the rate of the bfloat16 dot product instruction (83 against 160 GFLOP/s a core, Xeon 4th generation).
template <int p> INLINE vf part(float, vi units) { return (vf)units; }
template <int p> INLINE vf part(bf16, vi units) { return p == 0 ? (vf)(units << 16) : (vf)(units & (int32_t)0xffff0000); }

// Two half vectors side by side.
INLINE vi join_units(const void* low, const void* high) {
#if OARLOCK_LANES == 16
  __m256i a = _mm256_loadu_si256(static_cast<const __m256i*>(low)), b = _mm256_loadu_si256(static_cast<const __m256i*>(high));
  return (vi)_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
#else
  uint32_t both[W];
  memcpy(both, low, W * 2);
  memcpy(both + W / 2, high, W * 2);
  vi v;
  memcpy(&v, both, sizeof v);
  return v;
#endif
}

// ---- the same for all ----------------------------------------------------------------------------------------------

// The first n lanes; zeros after them.
template <class T> INLINE vf load_some(const T* p, int64_t n) {
  T part[W] = {};
  memcpy(part, p, n * sizeof(T));
  return load(part);
}
template <class T> INLINE void store_some(T* p, vf v, int64_t n) {
  T part[W];
  store(part, v);
  memcpy(p, part, n * sizeof(T));
}
template <class T> INLINE T narrow(float x) {
  T part[W];
  store(part, splat(x));
  return part[0];
}

// Sums of the lanes of four vectors, halves first, always in the same order: into out[0..3].
#if defined(__x86_64__)
#if OARLOCK_LANES == 16
INLINE __m128 quarter(vf v) {
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#elif OARLOCK_LANES == 8
INLINE __m128 quarter(vf v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); }
#else
INLINE __m128 quarter(vf v) { return v; }
#endif
INLINE void sum4(const vf* v, float* out) {
  __m128 a = quarter(v[0]), b = quarter(v[1]), c = quarter(v[2]), d = quarter(v[3]);
  __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
  __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
}
#else
INLINE void sum4(const vf* v, float* out) {
  for (int i = 0; i < 4; ++i) {
    float x[W];
    store(x, v[i]);
    for (int half = W / 2; half; half /= 2)
      for (int j = 0; j < half; ++j) x[j] += x[j + half];
    out[i] = x[0];
  }
}
#endif
INLINE float sum(vf v) {
  const vf four[4] = {v, v, v, v};
  float out[4];
  sum4(four, out);
  return out[0];
}
INLINE float largest(vf v) {
  float x[W];
  store(x, v);
  float best = x[0];
  for (int i = 1; i < W; ++i) best = x[i] > best ? x[i] : best;
  return best;
}
INLINE vi lane_numbers() {
  vi v;
  for (int i = 0; i < W; ++i) v[i] = i;
  return v;
}
INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }

}  // namespace OARLOCK_ISA
