// Linears of bfloat16 rows over weights of 4 and 8 bits in products of whole numbers (AVX-512 VNNI); everything else is another table's.
//
// Each row is rounded to 8 bits, 32 columns with one scale: the largest of them over 127. Sums of 32 products of codes are exact; then float32
// adds them up, times the scales of the weight and of the row. The rounding costs an error of 2e-5 to 3e-5 (NMSE, normal numbers), 2e-4 where
// one of 32 numbers hides the others; rounding the weight to 8 bits costs as much, to 4 bits 5e-3. The order depends on nothing but the
// width, so a row's bits do not depend on the others here either.
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
constexpr int64_t kStep = kPanel * 4;  // bytes of a panel's columns that are loaded together: eight of 4 bits, four of 8
constexpr int middle_of(int bits) { return bits == 4 ? 8 : 128; }  // taken from a weight's code; it is there already where those have signs

// 32 numbers as codes, in the order in which a unit of a panel holds columns, and what belongs to them.
struct ByteBlock {
  alignas(32) uint32_t codes[8];
  float scale, sum;  // sum: of the codes, times the scale
  int32_t start;     // what the middles of the weight's codes add to the products, taken away
};

ByteBlock to_bytes(const ByteRows& rows, const bf16* x, int64_t n) {
  __mmask32 there = n >= 32 ? ~__mmask32(0) : n > 0 ? (__mmask32(1) << n) - 1 : 0;
  __m512i v = _mm512_maskz_loadu_epi16(there, x);
  __m512 low = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(v)), 16);
  __m512 high = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1)), 16);
  uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512((__m512i)low, _mm512_set1_epi32(0x7fffffff)), _mm512_and_si512((__m512i)high, _mm512_set1_epi32(0x7fffffff))));
  ByteBlock block = {};
  if (bits == 0) return block;
  float largest = 127;
  if (!rows.is_whole) memcpy(&largest, &bits, 4);
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
  const __m256i of_4_bits = _mm256_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  _mm256_store_si256(reinterpret_cast<__m256i*>(block.codes), rows.bits == 4 ? _mm256_shuffle_epi8(bytes, of_4_bits) : bytes);
  block.scale = _mm512_cvtss_f32(_mm512_scalef_ps(_mm512_div_ps(_mm512_scalef_ps(_mm512_set1_ps(largest), back), _mm512_set1_ps(127.f)), exponent));
  block.sum = block.scale * static_cast<float>(sum);
  block.start = -middle_of(rows.bits) * sum;
  return block;
}

template <int MR, int NV> INLINE void add_unit(const uint32_t* x, const __m512i (&codes)[NV], __m512i (&acc)[MR][NV]) {
  for (int i = 0; i < MR; ++i) {
    __m512i xv = _mm512_set1_epi32(static_cast<int>(x[i]));
    for (int j = 0; j < NV; ++j) acc[i][j] = _mm512_dpbusd_epi32(acc[i][j], codes[j], xv);
  }
}

// Products of one block of 32 columns.
template <int bits, int MR, int NV> INLINE void multiply(const uint32_t* x, const char* const (&at)[NV], __m512i (&acc)[MR][NV]) {
  const __m512i mask = _mm512_set1_epi8(bits == 4 ? 15 : -128);  // of the lower codes, or of signs
  #pragma GCC unroll 8
  for (int t = 0; t < bits; ++t) {
    __m512i w[NV], codes[NV];
    for (int j = 0; j < NV; ++j) w[j] = _mm512_loadu_si512(at[j] + t * kStep), codes[j] = bits == 4 ? _mm512_and_si512(w[j], mask) : _mm512_xor_si512(w[j], mask);
    add_unit(x + (bits == 4 ? 2 * t : t) * MR, codes, acc);
    if constexpr (bits == 4) {
      for (int j = 0; j < NV; ++j) codes[j] = _mm512_and_si512(_mm512_srli_epi16(w[j], 4), mask);
      add_unit(x + (2 * t + 1) * MR, codes, acc);
    }
  }
}

// Rows [m0, m1) in tiles of MR, times NV tile columns from output n on; `next`: the panel that this thread reads after them, or null.
template <int bits, bool has_offsets, int MR, int NV> void columns(const CodesArgs& c, const LinearArgs& a, int64_t m0, int64_t m1, int64_t n, int64_t n1, const char* next) {
  const char* panels = static_cast<const char*>(c.panels);
  constexpr int64_t block_bytes = bits * kStep;  // of 32 columns of a panel
  int64_t panel_bytes = c.width / 32 * block_bytes, wide = a.gate ? NV * 8 : NV * 16, outputs = n1 - n < wide ? n1 - n : wide;
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
          if constexpr (has_offsets) {
            offset[j] = c.offsets ? numbers_at(c.offsets, c.is_half, table[j] + g * kPanel) : scale[j] * splat(-c.zero);
            if (bits == 4) offset[j] = fma(scale[j], splat(8.f), offset[j]);
          }
        }
        group_end = c.ends[g++];
      }
      if (m == m0) {
        int64_t ahead = k / 32 * block_bytes + kAheadBytes < panel_bytes ? kAheadBytes : kAheadBytes + panel_bytes * ((NV + 1) / 2 - 1);
        for (int j = 0; j < NV; ++j)
          for (int t = 0; t < bits; ++t) __builtin_prefetch(at[j] + ahead + t * kStep);
      } else if (asks_next) {
        for (int t = 0; t < 2 * bits; ++t) __builtin_prefetch(next + k / 32 * block_bytes + t * 64, 0, 2);
      }
      __m512i acc[MR][NV];
      for (int i = 0; i < MR; ++i)
        for (int j = 0; j < NV; ++j) acc[i][j] = _mm512_set1_epi32(static_cast<int>(x[10 * MR + i]));
      multiply<bits, MR, NV>(x, at, acc);
      const float* of_rows = reinterpret_cast<const float*>(x);
      for (int i = 0; i < MR; ++i)
        for (int j = 0; j < NV; ++j) {
          float* sum = sums + (i * NV + j) * 16;
          vf total = fma((vf)_mm512_cvtepi32_ps(acc[i][j]) * scale[j], splat(of_rows[8 * MR + i]), load(sum));
          if constexpr (has_offsets) total = fma(offset[j], splat(of_rows[9 * MR + i]), total);
          store(sum, total);
        }
      for (int j = 0; j < NV; ++j) at[j] += block_bytes;
    }
    int64_t rows = m1 - m < MR ? m1 - m : MR;
    for (int64_t i = 0; i < rows; ++i) {
      vf row[NV];
      for (int j = 0; j < NV; ++j) row[j] = load(sums + (i * NV + j) * 16);
      put(a, row, m + i, n, outputs);
    }
  }
}

template <int bits, bool has_offsets, int MR = kRows> void rows_of(const CodesArgs& c, const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1, const char* next) {
  if constexpr (MR > 1) {
    if (a.tile < MR) return rows_of<bits, has_offsets, MR - 1>(c, a, m0, m1, n0, n1, next);
  }
  if (a.gate) return cut<MR <= 5 ? 2 : 1, 16>(n0, n1, [&]<int gates>(int64_t n) { columns<bits, has_offsets, MR, 2 * gates>(c, a, m0, m1, n, n1, next); });
  cut<columns_of(MR), 16>(n0, n1, [&]<int NV>(int64_t n) { columns<bits, has_offsets, MR, NV>(c, a, m0, m1, n, n1, next); });
}

}  // namespace

// One tile of x: for each 32 columns [8 units of four codes][tile], and of [tile] rows scales, sums and starts.
void pack_byte_rows(const ByteRows& form, const bf16* x, int64_t ldx, int64_t rows, int64_t tile, int64_t K, int64_t width, uint32_t* out) {
  for (int64_t k = 0; k < width; k += 32, out += tile * kByteBlock)
    for (int64_t r = 0; r < tile; ++r) {
      ByteBlock block = {};
      if (r < rows) block = to_bytes(form, x + r * ldx + k, K - k);
      for (int u = 0; u < 8; ++u) out[u * tile + r] = block.codes[u];
      memcpy(out + 8 * tile + r, &block.scale, 4);
      memcpy(out + 9 * tile + r, &block.sum, 4);
      memcpy(out + 10 * tile + r, &block.start, 4);
    }
}

void byte_codes(const CodesArgs& c, const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1, const void* next) {
  const char* after = static_cast<const char*>(next);
  bool offsets = c.offsets || c.zero != (c.bits == 4 ? 8 : 0);
  if (c.bits == 4 && offsets) rows_of<4, true>(c, a, m0, m1, n0, n1, after);
  else if (c.bits == 4) rows_of<4, false>(c, a, m0, m1, n0, n1, after);
  else if (offsets) rows_of<8, true>(c, a, m0, m1, n0, n1, after);
  else rows_of<8, false>(c, a, m0, m1, n0, n1, after);
}

}  // namespace isa_vnni

#ifdef __clang__
#pragma clang attribute pop
#endif
