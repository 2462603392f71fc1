// Linear over a plain weight [N][K]. A block of MR x 4 dot products runs along K in vectors; lanes are added at the end.
//
// Loading: 4 rows of w stream once through the registers for MR rows of x. At few rows it is bound by reading w; four streams
// of consecutive rows keep the hardware prefetcher busy.
#include "kernels.h"
#include "vec.h"

namespace OARLOCK_ISA {
namespace {

constexpr int kRows = W == 16 ? 6 : 2;  // rows of x in one block: MR * 4 accumulators must fit the registers

template <class T> INLINE vi load_units_some(const T* p, int64_t n) {
  T part[W * per_unit<T>] = {};
  memcpy(part, p, n * sizeof(T));
  return load_units(part);
}

template <class T, int MR> void dot_block(const T* x, int64_t ldx, const T* const w[4], int64_t K, float* out, int64_t ldo) {
  constexpr int64_t step = W * per_unit<T>;
  vf acc[MR][4] = {};
  int64_t k = 0;
  for (; k + step <= K; k += step) {
    vi wv[4];
    for (int j = 0; j < 4; ++j) wv[j] = load_units(w[j] + k);
    for (int i = 0; i < MR; ++i) {
      vi xv = load_units(x + i * ldx + k);
      for (int j = 0; j < 4; ++j) acc[i][j] = dot(T{}, acc[i][j], xv, wv[j]);
    }
  }
  if (k < K) {
    vi wv[4];
    for (int j = 0; j < 4; ++j) wv[j] = load_units_some(w[j] + k, K - k);
    for (int i = 0; i < MR; ++i) {
      vi xv = load_units_some(x + i * ldx + k, K - k);
      for (int j = 0; j < 4; ++j) acc[i][j] = dot(T{}, acc[i][j], xv, wv[j]);
    }
  }
  for (int i = 0; i < MR; ++i) sum4(acc[i], out + i * ldo);
}

template <class T, int MR> void dot_rows(int rows, const T* x, int64_t ldx, const T* const w[4], int64_t K, float* out, int64_t ldo) {
  if constexpr (MR > 1) {
    if (rows < MR) return dot_rows<T, MR - 1>(rows, x, ldx, w, K, out, ldo);
  }
  dot_block<T, MR>(x, ldx, w, K, out, ldo);
}

constexpr int64_t kPanel = 32;  // outputs of a row that are rounded and stored together

template <class T> void store_panel(const float* from, const T* bias, T* out, int64_t n) {
  for (int64_t i = 0; i < n; i += W) {
    int64_t left = n - i < W ? n - i : W;
    vf v = load(from + i);
    if (bias) v = v + load_some(bias + i, left);
    if (left == W) store(out + i, v); else store_some(out + i, v, left);
  }
}

template <class T> void linear_typed(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  const T *x = static_cast<const T*>(a.x), *w = static_cast<const T*>(a.w), *bias = static_cast<const T*>(a.bias);
  T* out = static_cast<T*>(a.out);
  int64_t tiles = (m1 - m0 + kRows - 1) / kRows, tile = tiles ? (m1 - m0 + tiles - 1) / tiles : 1;
  float panel[kRows * kPanel];
  for (int64_t m = m0; m < m1; m += tile) {
    int rows = static_cast<int>(m1 - m < tile ? m1 - m : tile);
    for (int64_t p = n0; p < n1; p += kPanel) {
      int64_t outputs = n1 - p < kPanel ? n1 - p : kPanel;
      for (int64_t n = 0; n < outputs; n += 4) {
        const T* rows_of_w[4];
        for (int j = 0; j < 4; ++j) {
          int64_t r = n + j < outputs ? p + n + j : n1 - 1;  // past the end: any row, the product is not stored
          rows_of_w[j] = w + r * a.ldw;
        }
        dot_rows<T, kRows>(rows, x + m * a.ldx, a.ldx, rows_of_w, a.K, panel + n, kPanel);
      }
      for (int i = 0; i < rows; ++i) store_panel(panel + i * kPanel, bias ? bias + p : nullptr, out + (m + i) * a.ldo + p, outputs);
    }
  }
}

void linear(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  if (a.dtype == Dtype::bf16) linear_typed<bf16>(a, m0, m1, n0, n1); else linear_typed<float>(a, m0, m1, n0, n1);
}

}  // namespace
}  // namespace OARLOCK_ISA
