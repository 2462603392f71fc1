// Linears of bfloat16 rows over weights of 4 bits in products of whole numbers (AVX-512 VNNI); everything else is another table's.
//
// Each row is rounded to 8 bits, 32 columns with one scale: the largest of them over 127. Sums of 32 products of codes are exact; then float32
// adds them up, times the scales of the weight and of the row. The rounding costs an error of 2e-5 to 3e-5 (NMSE, normal numbers), 2e-4 where
// one of 32 numbers hides the others; 4 bits cost the weight itself 5e-3. The order depends on nothing but the width, so a row's bits
// do not depend on the others here either.
#define OARLOCK_ISA isa_vnni
#define OARLOCK_NAME "avx512_vnni"
#define OARLOCK_LANES 16
#include <limits>

#include "columns.inl"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx512vnni")
#endif

namespace isa_vnni {
namespace {

constexpr int kRows = 12;
constexpr int64_t kAheadBytes = 4096, kScalesAhead = 8;  // groups
constexpr int columns_of(int rows) { return rows <= 5 ? 4 : 2; }  // side by side: as many as leave registers for x and codes
constexpr int64_t kStep = kPanel * 4;  // bytes of eight columns of a panel

// 32 numbers as codes, in the order in which a unit of a panel holds eight columns, and what belongs to them.
struct ByteBlock {
  alignas(32) uint32_t codes[8];
  float scale, sum;  // sum: of the codes, times the scale
  int32_t of_eight;  // -8 times the sum of the codes
};

ByteBlock to_bytes(const bf16* x, int64_t n) {
  __mmask32 there = n >= 32 ? ~__mmask32(0) : n > 0 ? (__mmask32(1) << n) - 1 : 0;
  __m512i v = _mm512_maskz_loadu_epi16(there, x);
  __m512 low = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(v)), 16);
  __m512 high = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1)), 16);
  uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512((__m512i)low, _mm512_set1_epi32(0x7fffffff)), _mm512_and_si512((__m512i)high, _mm512_set1_epi32(0x7fffffff))));
  ByteBlock block = {};
  if (bits == 0) return block;
  float largest;
  memcpy(&largest, &bits, 4);
  if (bits >= 0x7f800000) {  // a number that is not finite makes its row not a number
    block.scale = block.sum = std::numeric_limits<float>::quiet_NaN();
    return block;
  }
  // By way of a power of two, so that neither the smallest nor the largest numbers leave what float32 holds.
  __m512 exponent = _mm512_getexp_ps(_mm512_set1_ps(largest)), back = _mm512_sub_ps(_mm512_setzero_ps(), exponent);
  __m512 unit = _mm512_div_ps(_mm512_set1_ps(127.f), _mm512_scalef_ps(_mm512_set1_ps(largest), back));
  __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_scalef_ps(low, back), unit)), b = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_scalef_ps(high, back), unit));
  int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
  __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(a)), _mm512_cvtepi32_epi8(b), 1);
  const __m256i order = _mm256_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  _mm256_store_si256(reinterpret_cast<__m256i*>(block.codes), _mm256_shuffle_epi8(bytes, order));
  block.scale = _mm512_cvtss_f32(_mm512_scalef_ps(_mm512_div_ps(_mm512_scalef_ps(_mm512_set1_ps(largest), back), _mm512_set1_ps(127.f)), exponent));
  block.sum = block.scale * static_cast<float>(sum);
  block.of_eight = -8 * sum;
  return block;
}

// Products of one block of 32 columns.
template <int MR, int NV> INLINE void multiply(const uint32_t* x, const char* const (&at)[NV], __m512i (&acc)[MR][NV]) {
  const __m512i low_bits = _mm512_set1_epi8(15);
  #pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) {
    __m512i w[NV], codes[NV];
    for (int j = 0; j < NV; ++j) w[j] = _mm512_loadu_si512(at[j] + t * kStep), codes[j] = _mm512_and_si512(w[j], low_bits);
    for (int i = 0; i < MR; ++i) {
      __m512i xv = _mm512_set1_epi32(static_cast<int>(x[2 * t * MR + i]));
      for (int j = 0; j < NV; ++j) acc[i][j] = _mm512_dpbusd_epi32(acc[i][j], codes[j], xv);
    }
    for (int j = 0; j < NV; ++j) codes[j] = _mm512_and_si512(_mm512_srli_epi16(w[j], 4), low_bits);
    for (int i = 0; i < MR; ++i) {
      __m512i xv = _mm512_set1_epi32(static_cast<int>(x[(2 * t + 1) * MR + i]));
      for (int j = 0; j < NV; ++j) acc[i][j] = _mm512_dpbusd_epi32(acc[i][j], codes[j], xv);
    }
  }
}

// Rows [m0, m1) in tiles of MR, times NV tile columns from output n on; `next`: the panel that this thread reads after them, or null.
template <bool has_offsets, int MR, int NV> void columns(const CodesArgs& c, const LinearArgs& a, int64_t m0, int64_t m1, int64_t n, int64_t n1, const char* next) {
  const char* panels = static_cast<const char*>(c.panels);
  int64_t panel_bytes = c.width / 8 * kStep, wide = a.gate ? NV * 8 : NV * 16, outputs = n1 - n < wide ? n1 - n : wide;
  if (n + wide < n1) next = panels + (n + wide) / kPanel * panel_bytes;
  for (int64_t m = m0; m < m1; m += MR) {
    const uint32_t* x = static_cast<const uint32_t*>(a.x) + m * c.width / 32 * kByteBlock;
    const char* at[NV];
    int64_t table[NV], g = 0, group_end = 0;
    for (int j = 0; j < NV; ++j) {
      int64_t column = column_of<NV>(a, n, j);
      at[j] = panels + column / 2 * panel_bytes + column % 2 * 64;
      table[j] = column / 2 * c.groups * kPanel + column % 2 * 16;
    }
    // The first tile waits for memory, and asks for its own lines; the second asks for the next panel's.
    bool asks_next = m == m0 + MR && next;
    alignas(64) float sums[MR * NV * 16] = {};
    vf scale[NV], offset[NV];
    for (int64_t k = 0; k < c.width; k += 32, x += MR * kByteBlock) {
      if (k == group_end) {
        for (int j = 0; j < NV; ++j) {
          scale[j] = numbers_at(c.scales, c.is_half, table[j] + g * kPanel);
          if constexpr (has_offsets) offset[j] = c.offsets ? numbers_at(c.offsets, c.is_half, table[j] + g * kPanel) : scale[j] * splat(-c.zero);
        }
        group_end = c.ends[g++];
      }
      if (m == m0) {
        int64_t ahead = k / 8 * kStep + kAheadBytes < panel_bytes ? kAheadBytes : kAheadBytes + panel_bytes * ((NV + 1) / 2 - 1);
        for (int j = 0; j < NV; ++j)
          for (int t = 0; t < 4; ++t) __builtin_prefetch(at[j] + ahead + t * kStep);
      } else if (asks_next) {
        for (int t = 0; t < 8; ++t) __builtin_prefetch(next + k / 8 * kStep + t * 64, 0, 2);
      }
      __m512i acc[MR][NV];
      for (int i = 0; i < MR; ++i)
        for (int j = 0; j < NV; ++j) acc[i][j] = has_offsets ? _mm512_setzero_si512() : _mm512_set1_epi32(static_cast<int>(x[10 * MR + i]));
      multiply<MR, NV>(x, at, acc);
      const float* of_rows = reinterpret_cast<const float*>(x);
      for (int i = 0; i < MR; ++i)
        for (int j = 0; j < NV; ++j) {
          float* sum = sums + (i * NV + j) * 16;
          vf total = fma((vf)_mm512_cvtepi32_ps(acc[i][j]) * scale[j], splat(of_rows[8 * MR + i]), load(sum));
          if constexpr (has_offsets) total = fma(offset[j], splat(of_rows[9 * MR + i]), total);
          store(sum, total);
        }
      for (int j = 0; j < NV; ++j) at[j] += 4 * kStep;
    }
    int64_t rows = m1 - m < MR ? m1 - m : MR;
    for (int64_t i = 0; i < rows; ++i) {
      vf row[NV];
      for (int j = 0; j < NV; ++j) row[j] = load(sums + (i * NV + j) * 16);
      put(a, row, m + i, n, outputs);
    }
  }
}

template <bool has_offsets, int MR = kRows> void rows_of(const CodesArgs& c, const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1, const char* next) {
  if constexpr (MR > 1) {
    if (a.tile < MR) return rows_of<has_offsets, MR - 1>(c, a, m0, m1, n0, n1, next);
  }
  if (a.gate) return cut<MR <= 5 ? 2 : 1, 16>(n0, n1, [&]<int gates>(int64_t n) { columns<has_offsets, MR, 2 * gates>(c, a, m0, m1, n, n1, next); });
  cut<columns_of(MR), 16>(n0, n1, [&]<int NV>(int64_t n) { columns<has_offsets, MR, NV>(c, a, m0, m1, n, n1, next); });
}

}  // namespace

// One tile of x: for each 32 columns [8 units of four codes][tile], [tile] scales, [tile] sums, [tile] of_eight.
void pack_byte_rows(const bf16* x, int64_t ldx, int64_t rows, int64_t tile, int64_t K, int64_t width, uint32_t* out) {
  for (int64_t k = 0; k < width; k += 32, out += tile * kByteBlock)
    for (int64_t r = 0; r < tile; ++r) {
      ByteBlock block = {};
      if (r < rows) block = to_bytes(x + r * ldx + k, K - k);
      for (int u = 0; u < 8; ++u) out[u * tile + r] = block.codes[u];
      memcpy(out + 8 * tile + r, &block.scale, 4);
      memcpy(out + 9 * tile + r, &block.sum, 4);
      memcpy(out + 10 * tile + r, &block.of_eight, 4);
    }
}

void byte_codes(const CodesArgs& c, const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1, const void* next) {
  const char* after = static_cast<const char*>(next);
  if (c.offsets || c.zero != 8) rows_of<true>(c, a, m0, m1, n0, n1, after); else rows_of<false>(c, a, m0, m1, n0, n1, after);
}

}  // namespace isa_vnni

#ifdef __clang__
#pragma clang attribute pop
#endif
