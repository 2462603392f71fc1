// Linear over packed weights (the usual case) and over plain ones. Layouts and orders of summation: kernels.h.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace OARLOCK_ISA {
namespace {

// Rounds and stores n sums of one row, with the bias.
template <class B, class T> void store_sums(const float* from, const B* bias, T* out, int64_t n) {
  for (int64_t i = 0; i < n; i += W) {
    int64_t left = n - i < W ? n - i : W;
    vf v = load(from + i);
    if (bias) v = v + load_some(bias + i, left);
    if (left == W) store(out + i, v); else store_some(out + i, v, left);
  }
}

// Outputs [n, n + count) of row m.
template <class T> void store_row(const LinearArgs& a, const float* from, int64_t m, int64_t n, int64_t count) {
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + n : nullptr;
  int64_t at = m * a.ldo + n;
  if (a.out_f32) store_sums(from, bias, static_cast<float*>(a.out) + at, count); else store_sums(from, bias, static_cast<T*>(a.out) + at, count);
}

// The same, of whatever dtype.
INLINE void store_numbers(const LinearArgs& a, const float* from, int64_t m, int64_t n, int64_t count) {
  if (a.dtype == Dtype::bf16) store_row<bf16>(a, from, m, n, count); else store_row<float>(a, from, m, n, count);
}

// ---- packed ---------------------------------------------------------------------------------------------------------
//
// A tile of MR rows of x times NT tile columns (16 outputs each) keeps MR * NT * 16 sums in registers and walks K once: x is broadcast,
// w streams from memory in the order in which it lies there. Few rows leave registers free: then more columns hide the latency.

constexpr int kVectors = 16 / W;                     // of a tile's 16 outputs
constexpr int kPackedRows = W == 16 ? 12 : W == 8 ? 6 : 2;
constexpr int kTiles = W == 16 ? 2 : 1;              // NT at many rows

constexpr int64_t kAhead = 2048;                     // units

template <class T, int p, int MR, int NV> INLINE void packed_step_(const float* x, const vi (&w)[NV], vf (&acc)[MR][NV]) {
  vf wp[NV];
  for (int j = 0; j < NV; ++j) wp[j] = part<p>(T{}, w[j]);
  for (int i = 0; i < MR; ++i) {
    vf xv = splat(x[p * MR + i]);
    for (int j = 0; j < NV; ++j) acc[i][j] = fma(xv, wp[j], acc[i][j]);
  }
}

// tiles[j]: where tile column j begins; consecutive depths of a column lie 2 tiles apart. `Ahead`: w comes from memory, ask early.
// PERF: 8 KiB ahead brings 8 rows x 576 x 49152 in bfloat16 from 10.6 to 3.5 ms on one thread of a 4th generation Xeon.
template <class T, int MR, int NT, bool Ahead> void packed_block(const float* x, const uint32_t* const (&tiles)[NT], int64_t depth, float* out) {
  constexpr int NV = NT * kVectors;
  vf acc[MR][NV] = {};
  for (int64_t k = 0; k < depth; ++k) {
    for (int r = 0; r < 16; ++r, x += per_unit<T> * MR) {
      vi w[NV];
      for (int j = 0; j < NV; ++j) {
        const uint32_t* at = tiles[j / kVectors] + k * 2 * kTileUnits + r * 16 + j % kVectors * W;
        if (Ahead) __builtin_prefetch(at + kAhead);
        w[j] = load_units(at);
      }
      packed_step_<T, 0>(x, w, acc);
      if constexpr (per_unit<T> == 2) packed_step_<T, 1>(x, w, acc);
    }
  }
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < NV; ++j) store(out + i * NT * 16 + j * W, acc[i][j]);
}

// Rows [m0, m1) in tiles of MR, times NT tile columns from output n on. `Ahead`: for the first tile; the others find w in the cache.
template <class T, int MR, int NT> void packed_column(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n, int64_t n1) {
  int64_t step = packed_step(a.dtype), depth = (a.K + step - 1) / step;
  const uint32_t* tiles[NT];
  for (int j = 0; j < NT; ++j) {
    int64_t column = n / 16 + j;
    tiles[j] = static_cast<const uint32_t*>(a.w) + (column / 2 * depth * 2 + column % 2) * kTileUnits;
  }
  alignas(64) float sums[MR * NT * 16];
  int64_t outputs = n1 - n < NT * 16 ? n1 - n : NT * 16;
  for (int64_t m = m0; m < m1; m += MR) {
    const float* x = static_cast<const float*>(a.x) + m * depth * step;
    if (m == m0) packed_block<T, MR, NT, true>(x, tiles, depth, sums); else packed_block<T, MR, NT, false>(x, tiles, depth, sums);
    int64_t rows = m1 - m < MR ? m1 - m : MR;
    for (int64_t i = 0; i < rows; ++i) store_row<T>(a, sums + i * NT * 16, m + i, n, outputs);
  }
}

template <class T, int MR> void packed_panels(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  constexpr int few = kPackedRows / 3 ? kPackedRows / 3 : 1;
  int64_t n = n0;
  if constexpr (MR <= few)  // few rows leave registers free
    for (; n + 32 * kTiles <= n1; n += 32 * kTiles) packed_column<T, MR, 2 * kTiles>(a, m0, m1, n, n1);
  for (; n < n1; n += 16 * kTiles) packed_column<T, MR, kTiles>(a, m0, m1, n, n1);
}

template <class T, int MR = kPackedRows> void packed_typed(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  if constexpr (MR > 1) {
    if (a.tile < MR) return packed_typed<T, MR - 1>(a, m0, m1, n0, n1);
  }
  packed_panels<T, MR>(a, m0, m1, n0, n1);
}

template <class T> void pack_rows_typed(const T* x, int64_t ldx, int64_t rows, int64_t tile, int64_t K, int64_t width, float* out) {
  alignas(64) float part[kPackedRows][W];
  for (int64_t k = 0; k < width; k += W) {
    int64_t n = K - k < W ? K - k : W, lanes = width - k < W ? width - k : W;
    for (int64_t r = 0; r < rows; ++r) store(part[r], n == W ? load(x + r * ldx + k) : n > 0 ? load_some(x + r * ldx + k, n) : vf{});
    for (int64_t j = 0; j < lanes; ++j, out += tile) {
      for (int64_t r = 0; r < rows; ++r) out[r] = part[r][j];
      for (int64_t r = rows; r < tile; ++r) out[r] = 0.f;
    }
  }
}

// ---- plain ----------------------------------------------------------------------------------------------------------
//
// A block of MR x 4 dot products runs along K in vectors; lanes are added at the end. It reads more per product than the packed
// kernel, so it is slower at many rows, but needs no second copy of a weight.

constexpr int kPlainRows = W == 16 ? 6 : 2;

template <class T, int MR> INLINE void plain_step(const vi (&x)[MR], const vi (&w)[4], vf (&acc)[MR][4]) {
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < 4; ++j) {
      acc[i][j] = fma(part<0>(T{}, x[i]), part<0>(T{}, w[j]), acc[i][j]);
      if constexpr (per_unit<T> == 2) acc[i][j] = fma(part<1>(T{}, x[i]), part<1>(T{}, w[j]), acc[i][j]);
    }
}

template <class T> INLINE vi load_units_some(const T* p, int64_t n) {
  T some[W * per_unit<T>] = {};
  memcpy(some, p, n * sizeof(T));
  return load_units(some);
}

// The four rows after these, `ahead` numbers on, are asked for meanwhile; 0: they are in the cache.
template <class T, int MR> void plain_block(const T* x, int64_t ldx, const T* const w[4], int64_t ahead, int64_t K, float* out, int64_t ldo) {
  constexpr int64_t step = W * per_unit<T>;
  vf acc[MR][4] = {};
  vi xv[MR], wv[4];
  int64_t k = 0;
  for (; k + step <= K; k += step) {
    for (int j = 0; j < 4; ++j) {
      if (ahead) __builtin_prefetch(w[j] + k + ahead);
      wv[j] = load_units(w[j] + k);
    }
    for (int i = 0; i < MR; ++i) xv[i] = load_units(x + i * ldx + k);
    plain_step<T>(xv, wv, acc);
  }
  if (k < K) {
    for (int j = 0; j < 4; ++j) wv[j] = load_units_some(w[j] + k, K - k);
    for (int i = 0; i < MR; ++i) xv[i] = load_units_some(x + i * ldx + k, K - k);
    plain_step<T>(xv, wv, acc);
  }
  for (int i = 0; i < MR; ++i) sum4(acc[i], out + i * ldo);
}

template <class T, int MR> void plain_rows(int rows, const T* x, int64_t ldx, const T* const w[4], int64_t ahead, int64_t K, float* out, int64_t ldo) {
  if constexpr (MR > 1) {
    if (rows < MR) return plain_rows<T, MR - 1>(rows, x, ldx, w, ahead, K, out, ldo);
  }
  plain_block<T, MR>(x, ldx, w, ahead, K, out, ldo);
}

template <class T> void plain_typed(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  const T *x = static_cast<const T*>(a.x), *w = static_cast<const T*>(a.w);
  int64_t count = (m1 - m0 + kPlainRows - 1) / kPlainRows, tile = count ? (m1 - m0 + count - 1) / count : 1;
  alignas(64) float sums[kPlainRows * kPanel];
  for (int64_t p = n0; p < n1; p += kPanel) {
    int64_t outputs = n1 - p < kPanel ? n1 - p : kPanel;
    for (int64_t m = m0; m < m1; m += tile) {
      int rows = static_cast<int>(m1 - m < tile ? m1 - m : tile);
      for (int64_t n = 0; n < outputs; n += 4) {
        const T* four[4];
        for (int j = 0; j < 4; ++j) four[j] = w + (n + j < outputs ? p + n + j : n1 - 1) * a.ldw;  // past the end: not stored
        plain_rows<T, kPlainRows>(rows, x + m * a.ldx, a.ldx, four, m == m0 ? 4 * a.ldw : 0, a.K, sums + n, kPanel);
      }
      for (int i = 0; i < rows; ++i) store_row<T>(a, sums + i * kPanel, m + i, p, outputs);
    }
  }
}

}  // namespace
}  // namespace OARLOCK_ISA
