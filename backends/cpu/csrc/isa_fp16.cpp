// Linears of bfloat16 rows in binary16 products, at twice the rate of float32's; everything else is the AVX-512 table's (dispatch.cpp puts
// them together). Processors with tiles (isa_amx.cpp) do without.
//
// What binary16 cannot hold is kept out of its way: each row of x, and each output of a dense w, is multiplied by a power of two that
// brings its largest number to [2^9, 2^10), and to [1/2, 1). A bfloat16 then loses bits only where it is 2^-17 of the largest beside it.
// A lane sums 32 products in binary16, at most 2^15; such runs are added in float32. What a run can lose is 2^-12 of its sum at each addition:
// runs of 64 would be 5 to 7 % faster, at twice the squared error. Codes of 4 or 8 bits become the numbers of such a w. The
// order depends on nothing but K, so a row's bits do not depend on the others here either.
#define OARLOCK_ISA isa_fp16
#define OARLOCK_NAME "avx512_fp16"
#define OARLOCK_LANES 16
#include "columns.inl"

#ifdef OARLOCK_FP16
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512fp16"))), apply_to = function)
#else
#pragma GCC target("avx512fp16")
#endif

namespace isa_fp16 {
namespace {

constexpr int kRows = 12;
constexpr int64_t kDepth = 16;       // units of a tile
constexpr int64_t kRunDepth = 2;     // tiles of a run: 32 products a lane
constexpr int64_t kAheadBytes = 8192, kCodesAheadBytes = 4096;
// Vectors of outputs that are summed side by side: as many as leave registers for x, w and codes.
constexpr int columns_of(int rows) { return rows <= 6 ? 4 : rows <= 8 ? 3 : 2; }
constexpr int code_columns_of(int rows) { return rows <= 5 ? 4 : rows <= 7 ? 3 : 2; }

// e with 2^e * largest in [2^(top - 1), 2^top); 0 for a row of zeros. All exponents are float32, as the instruction that applies them takes them.
float exponent_for(uint32_t largest_bits, int top) {
  int exponent = static_cast<int>(largest_bits >> 7) - 127;  // of a bfloat16 without its sign; subnormals count as the smallest
  return static_cast<float>(largest_bits ? top - 1 - exponent : 0);
}

INLINE vf times_power(vf v, vf exponent) { return (vf)_mm512_scalef_ps((__m512)v, (__m512)exponent); }

// The largest finite magnitude, as the bits of a bfloat16.
uint32_t largest_of(const bf16* x, int64_t n) {
  __m512i best = _mm512_setzero_si512();
  const __m512i magnitude = _mm512_set1_epi16(0x7fff), infinity = _mm512_set1_epi16(0x7f80);
  for (int64_t k = 0; k < n; k += 32) {
    __mmask32 there = n - k < 32 ? (__mmask32(1) << (n - k)) - 1 : ~__mmask32(0);
    __m512i v = _mm512_and_si512(_mm512_maskz_loadu_epi16(there, x + k), magnitude);
    best = _mm512_mask_max_epu16(best, _mm512_cmplt_epu16_mask(v, infinity), best, v);
  }
  alignas(64) uint16_t lanes[32];
  _mm512_store_si512(lanes, best);
  uint32_t found = 0;
  for (uint32_t lane : lanes) found = lane > found ? lane : found;
  return found;
}

// 32 numbers times a power of two, in binary16; zeros past n.
INLINE __m512i to_halves(const bf16* x, int64_t n, vf exponent) {
  __mmask32 there = n >= 32 ? ~__mmask32(0) : n > 0 ? (__mmask32(1) << n) - 1 : 0;
  __m512i v = _mm512_maskz_loadu_epi16(there, x);
  __m512 low = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(v)), 16);
  __m512 high = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1)), 16);
  __m256i a = _mm512_cvtps_ph((__m512)times_power((vf)low, exponent), _MM_FROUND_TO_NEAREST_INT);
  __m256i b = _mm512_cvtps_ph((__m512)times_power((vf)high, exponent), _MM_FROUND_TO_NEAREST_INT);
  return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

// Columns become rows.
INLINE void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  for (int i = 0; i < 8; ++i) {  // quarters of rows 0..3 and 4..7, of 8..11 and 12..15
    int from = i % 4 + i / 4 * 8;
    t[i] = _mm512_shuffle_i32x4(r[from], r[from + 4], 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(r[from], r[from + 4], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
  }
}

}  // namespace

// Row-major outputs [0, outputs) to a panel of halves and 32 exponents, which undo those of the outputs.
void pack_half_panel(const bf16* w, int64_t ldw, int64_t outputs, int64_t K, uint16_t* to) {
  int64_t depth = (K + 31) / 32;
  float* back = reinterpret_cast<float*>(to + depth * 2 * kTileUnits * 2);
  for (int n = 0; n < kPanel; ++n) {
    float exponent = n < outputs ? exponent_for(largest_of(w + n * ldw, K), 0) : 0.f;
    back[n] = -exponent;
    for (int64_t d = 0; d < depth; ++d) {
      alignas(64) uint32_t units[16];
      _mm512_store_si512(units, n < outputs ? to_halves(w + n * ldw + d * 32, K - d * 32, splat(exponent)) : _mm512_setzero_si512());
      for (int u = 0; u < 16; ++u) memcpy(to + (((d * 2 + n / 16) * 16 + u) * 16 + n % 16) * 2, units + u, 4);
    }
  }
}

// One tile of x, [width / 2][tile] units of two numbers and kHalfTileGap units, and the exponent that undoes each row's.
void pack_half_rows(const bf16* x, int64_t ldx, int64_t rows, int64_t tile, int64_t K, int64_t width, uint32_t* out, float* back) {
  constexpr int top = 10;  // 32 products with numbers below 1 fit
  vf exponents[kRows];
  for (int64_t r = 0; r < rows; ++r) {
    float exponent = exponent_for(largest_of(x + r * ldx, K), top);
    exponents[r] = splat(exponent);
    back[r] = -exponent;
  }
  for (int64_t k = 0; k < width; k += 32) {
    __m512i part[16] = {};
    for (int64_t r = 0; r < rows; ++r) part[r] = to_halves(x + r * ldx + k, K - k, exponents[r]);
    if (tile == 1) {
      _mm512_storeu_si512(out, part[0]);
      out += 16;
      continue;
    }
    transpose(part);
    for (int u = 0; u < 16; ++u, out += tile) _mm512_storeu_si512(out, part[u]);  // the next overwrites what is too much
  }
}

namespace {

// Sums of a run, to be read as float32. They go through memory: half a vector is widened on the way from there, while in registers it
// is first moved by the port that multiplies.
template <int MR, int NV> struct Run {
  alignas(64) _Float16 held[MR * NV * 32];
  INLINE_MEMBER explicit Run(const __m512h (&acc)[MR][NV]) {
    #pragma GCC unroll 32
    for (int i = 0; i < MR; ++i)
      #pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) _mm512_store_ph(held + (i * NV + j) * 32, acc[i][j]);
    __asm__ volatile("" ::"r"(held) : "memory");
  }
  INLINE_MEMBER vf half(int i, int h) const { return (vf)_mm512_cvtxph_ps(_mm256_load_ph(held + i * 32 + 16 * h)); }
};

// sums [MR][NV][32] += a run, or are the first.
template <int MR, int NV> INLINE void add_run(const Run<MR, NV>& run, bool is_first, float* sums) {
  if (is_first) {
    for (int i = 0; i < MR * NV; ++i) store(sums + i * 32, run.half(i, 0)), store(sums + i * 32 + 16, run.half(i, 1));
    return;
  }
  #pragma GCC unroll 4
  for (int i = 0; i < MR * NV; ++i) {
    store(sums + i * 32, load(sums + i * 32) + run.half(i, 0));
    store(sums + i * 32 + 16, load(sums + i * 32 + 16) + run.half(i, 1));
  }
}

// 16 outputs' sums, of both numbers of a unit.
INLINE vf sum_of_units(const float* sums) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  __m512 low = (__m512)load(sums), high = (__m512)load(sums + 16);
  return (vf)_mm512_permutex2var_ps(low, even, high) + (vf)_mm512_permutex2var_ps(low, odd, high);
}

// What a block asks memory for while it multiplies: its own columns some way ahead, into the first-level cache, and past their end the next
// ones; or `lines` of the next columns, into the second.
struct Ask {
  bool own;
  int lines;
};

// MR rows times NV tile columns: sums [MR][NV][16 outputs][2 of a unit].
template <int MR, int NV, Ask ask> void block(const uint32_t* x, const char* const (&tiles)[NV], int64_t depth, const char* const (&next)[NV], float* sums) {
  constexpr int64_t kStride = 2 * kTileUnits * 4;  // bytes from one depth of a column to the next
  for (int64_t d0 = 0; d0 < depth; d0 += kRunDepth) {
    int64_t end = d0 + kRunDepth < depth ? d0 + kRunDepth : depth;
    __m512h acc[MR][NV];
    for (int i = 0; i < MR; ++i)
      for (int j = 0; j < NV; ++j) acc[i][j] = _mm512_setzero_ph();
    for (int64_t d = d0; d < end; ++d) {
      int64_t ahead = d * kStride + kAheadBytes;
      bool is_past = ahead >= depth * kStride;
      const char* const* early = is_past ? next : tiles;
      if (is_past) ahead -= depth * kStride;
      for (int u = 0; u < kDepth; ++u) {
        __m512h w[NV];
        for (int j = 0; j < NV; ++j) {
          if (ask.own) __builtin_prefetch(early[j] + ahead + u * 64);
          w[j] = _mm512_loadu_ph(tiles[j] + d * kStride + u * 64);
        }
        for (int i = 0; i < ask.lines; ++i) __builtin_prefetch(next[i] + d * kStride + u * 64, 0, 2);
        for (int i = 0; i < MR; ++i) {
          __m512h xv = (__m512h)_mm512_set1_epi32(static_cast<int>(x[i]));
          for (int j = 0; j < NV; ++j) acc[i][j] = _mm512_fmadd_ph(xv, w[j], acc[i][j]);
        }
        x += MR;
      }
    }
    Run<MR, NV> run(acc);
    add_run(run, d0 == 0, sums);
  }
}

// Rows [m0, m1) in tiles of MR, times NV tile columns from output n on; `next` is what this thread reads after them (null: unknown).
// PERF: the first tile waits for memory, the others do not; that they ask for the next columns meanwhile brings a pass of 33 rows over
// 270 MB of weights from 22.7 to 16.6 ms on two cores of a 4th generation Xeon. Asked into the first level it would be 18.
template <int MR, int NV> void columns(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n, int64_t n1, const void* next) {
  int64_t depth = (a.K + 31) / 32, panel_bytes = (depth * 2 * kTileUnits + kPanel) * 4;
  int64_t wide = a.gate ? NV * 8 : NV * 16, outputs = n1 - n < wide ? n1 - n : wide, count = (m1 - m0 + MR - 1) / MR;
  const char *w = static_cast<const char*>(a.w), *tiles[NV], *after[NV];
  vf back[NV];
  for (int j = 0; j < NV; ++j) {
    int64_t column = column_of<NV>(a, n, j);
    const char* panel = w + column / 2 * panel_bytes;
    tiles[j] = panel + column % 2 * kTileUnits * 4;
    back[j] = load(reinterpret_cast<const float*>(panel + panel_bytes) - kPanel + column % 2 * 16);
    int64_t then = column_of<NV>(a, n + wide, j), beside = column_of<NV>(a, 0, j);  // `next` holds the first of such columns
    if (n + wide < n1) after[j] = w + then / 2 * panel_bytes + then % 2 * kTileUnits * 4;
    else after[j] = next ? static_cast<const char*>(next) + beside / 2 * panel_bytes + beside % 2 * kTileUnits * 4 : nullptr;
  }
  int left = after[0] ? NV : 0;  // columns still to be asked for
  int lines = static_cast<int>(count > 1 ? (NV + count - 2) / (count - 1) : 0);
  alignas(64) float sums[MR * NV * 32] = {};  // read where K is 0
  for (int64_t m = m0; m < m1; m += MR) {
    const uint32_t* x = static_cast<const uint32_t*>(a.x) + m / MR * (depth * kDepth * MR + kHalfTileGap);
    if (m == m0) {
      if (count == 1 && left) block<MR, NV, Ask{true, 0}>(x, tiles, depth, after, sums); else block<MR, NV, Ask{true, 0}>(x, tiles, depth, tiles, sums);
    } else if (left <= 0) {
      block<MR, NV, Ask{false, 0}>(x, tiles, depth, tiles, sums);
    } else {
      if (lines == 1) block<MR, NV, Ask{false, 1}>(x, tiles, depth, after, sums);
      else if (lines == 2) block<MR, NV, Ask{false, 2}>(x, tiles, depth, after, sums);
      else block<MR, NV, Ask{false, NV}>(x, tiles, depth, after, sums);
      left -= lines;
      for (int j = 0; j < NV; ++j) after[j] = after[j + lines < NV ? j + lines : NV - 1];
    }
    int64_t rows = m1 - m < MR ? m1 - m : MR;
    for (int64_t i = 0; i < rows; ++i) {
      vf row[NV];
      for (int j = 0; j < NV; ++j) row[j] = times_power(sum_of_units(sums + (i * NV + j) * 32), splat(a.row_exponents[m + i]) + back[j]);
      put(a, row, m + i, n, outputs);
    }
  }
}

template <int MR = kRows> void rows_of(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1, const void* next) {
  if constexpr (MR > 1) {
    if (a.tile < MR) return rows_of<MR - 1>(a, m0, m1, n0, n1, next);
  }
  if (a.gate) return cut<MR <= 6 ? 2 : 1, 16>(n0, n1, [&]<int gates>(int64_t n) { columns<MR, 2 * gates>(a, m0, m1, n, n1, next); });
  cut<columns_of(MR), 16>(n0, n1, [&]<int NV>(int64_t n) { columns<MR, NV>(a, m0, m1, n, n1, next); });
}

// ---- codes ----------------------------------------------------------------------------------------------------------
//
// A code becomes a number of a dense panel: its scale and offset, times the output's power of two, are rounded to binary16, and so is the
// number. Of 8 bits it is code - zero times the scale, plus what that leaves of the offset: an offset far from zero would not leave enough bits.
// Of 4 bits, codes lie around 8, and the offset of that is small enough.

// A unit of 16 outputs, two columns of each: step t of eight columns, which begin at `at`.
template <int bits, int t> INLINE __m512h code_unit(const char* at) {
  if constexpr (bits == 8) {  // two bytes of each lane, each to the upper half of a number of 16 bits
    const __m512i lanes = t % 2 ? _mm512_set4_epi32(0x0f800e80, 0x0b800a80, 0x07800680, 0x03800280) : _mm512_set4_epi32(0x0d800c80, 0x09800880, 0x05800480, 0x01800080);
    return _mm512_cvtepi16_ph(_mm512_srai_epi16(_mm512_shuffle_epi8(_mm512_loadu_si512(at + t / 2 * 128), lanes), 8));
  }
  // A look-up reads five bits of each lane: the table says every number twice, so that no mask is needed.
  const __m512i table = (__m512i)_mm512_set_ph(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8, 7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
  return (__m512h)_mm512_permutexvar_epi16(_mm512_srli_epi16(_mm512_loadu_si512(at), 4 * t), table);
}

// 16 numbers in binary16, each twice.
INLINE __m512h for_units(vf v) {
  const __m512i twice = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  return (__m512h)_mm512_permutexvar_epi16(twice, _mm512_castsi256_si512(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT)));
}

// 16 outputs of a panel, walked by eight columns.
template <int bits, bool has_offsets> struct CodeColumn {
  static constexpr int64_t kStep = kPanel * bits;  // bytes of eight columns of a panel
  const char* at;
  int64_t table;  // of the first group's scale
  vf exponent;
  __m512h scale, offset, zero;

  INLINE_MEMBER void begin(const CodesArgs& c, int64_t column) {
    int64_t panel = column / 2, half = column % 2;
    at = static_cast<const char*>(c.panels) + panel * (c.width / 8) * kStep + half * 64;
    table = panel * c.groups * kPanel + half * 16;
    exponent = load(c.exponents + column * 16);
  }
  INLINE_MEMBER void group(const CodesArgs& c, int64_t g) {
    vf s = numbers_at(c.scales, c.is_half, table + g * kPanel);
    scale = for_units(times_power(s, exponent));
    if constexpr (has_offsets) {
      vf o = c.offsets ? numbers_at(c.offsets, c.is_half, table + g * kPanel) : s * splat(-c.zero), near = splat(8.f);
      if constexpr (bits == 8) {
        near = (vf)_mm512_roundscale_ps((__m512)(o / (s == splat(0.f) ? splat(1.f) : -s)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        near = max(splat(-128.f), near < splat(127.f) ? near : splat(127.f));
        zero = for_units(near);
      }
      offset = for_units(times_power(fma(s, near, o), exponent));
    }
  }
  template <int t> INLINE_MEMBER __m512h unit() const {
    if constexpr (has_offsets && bits == 8) return _mm512_fmadd_ph(_mm512_sub_ph(code_unit<bits, t>(at), zero), scale, offset);
    if constexpr (has_offsets) return _mm512_fmadd_ph(code_unit<bits, t>(at), scale, offset);
    return _mm512_mul_ph(code_unit<bits, t>(at), scale);
  }
};

template <class C, int MR, int NV, int t = 0> INLINE void eight_columns(const uint32_t* x, const C (&c)[NV], __m512h (&acc)[MR][NV]) {
  if constexpr (t < 4) {
    __m512h w[NV];
    for (int j = 0; j < NV; ++j) w[j] = c[j].template unit<t>();
    for (int i = 0; i < MR; ++i) {
      __m512h xv = (__m512h)_mm512_set1_epi32(static_cast<int>(x[t * MR + i]));
      for (int j = 0; j < NV; ++j) acc[i][j] = _mm512_fmadd_ph(xv, w[j], acc[i][j]);
    }
    eight_columns<C, MR, NV, t + 1>(x, c, acc);
  }
}

// The rows of the tile times NV tile columns from output n on, as `columns` does with a dense weight.
template <int bits, bool has_offsets, int MR, int NV> void code_columns(const CodesArgs& c, const LinearArgs& a, int64_t n, int64_t n1) {
  using C = CodeColumn<bits, has_offsets>;
  constexpr int64_t run_columns = kRunDepth * 32;
  C column[NV];
  for (int j = 0; j < NV; ++j) column[j].begin(c, column_of<NV>(a, n, j));
  alignas(64) float sums[MR * NV * 32] = {};  // read where the width is 0
  const uint32_t* x = static_cast<const uint32_t*>(a.x);
  int64_t panel_bytes = c.width / 8 * C::kStep, k = 0, g = 0, group_end = 0;
  for (int64_t k0 = 0; k0 < c.width; k0 += run_columns) {
    int64_t end = k0 + run_columns < c.width ? k0 + run_columns : c.width;
    __m512h acc[MR][NV];
    for (int i = 0; i < MR; ++i)
      for (int j = 0; j < NV; ++j) acc[i][j] = _mm512_setzero_ph();
    for (; k < end; k += 8, x += 4 * MR) {
      if (k == group_end) {
        for (int j = 0; j < NV; ++j) column[j].group(c, g);
        group_end = c.ends[g++];
      }
      int64_t ahead = k / 8 * C::kStep + kCodesAheadBytes < panel_bytes ? kCodesAheadBytes : kCodesAheadBytes + panel_bytes * ((NV + 1) / 2 - 1);
      eight_columns<C, MR, NV>(x, column, acc);
      for (int j = 0; j < NV; ++j) {
        column[j].at += C::kStep;
        for (int line = 0; line < bits / 4; ++line) __builtin_prefetch(column[j].at + ahead + line * (bits == 8 ? 128 : 64));
      }
    }
    Run<MR, NV> run(acc);
    add_run(run, k0 == 0, sums);
  }
  int64_t outputs = n1 - n < NV * 16 ? n1 - n : NV * 16;
  for (int64_t i = 0; i < MR; ++i) {
    vf row[NV];
    for (int j = 0; j < NV; ++j) row[j] = times_power(sum_of_units(sums + (i * NV + j) * 32), splat(a.row_exponents[i]) - column[j].exponent);
    put(a, row, i, n, outputs);
  }
}

INLINE bool has_offsets(const CodesArgs& c) { return c.offsets || c.zero != (c.bits == 4 ? 8 : 0); }

template <int bits, bool has_offsets, int MR = kRows> void codes_of(const CodesArgs& c, const LinearArgs& a, int64_t n0, int64_t n1) {
  if constexpr (MR > 1) {
    if (a.tile < MR) return codes_of<bits, has_offsets, MR - 1>(c, a, n0, n1);
  }
  if (a.gate) return cut<MR <= 5 ? 2 : 1, 16>(n0, n1, [&]<int gates>(int64_t n) { code_columns<bits, has_offsets, MR, 2 * gates>(c, a, n, n1); });
  cut<code_columns_of(MR), 16>(n0, n1, [&]<int NV>(int64_t n) { code_columns<bits, has_offsets, MR, NV>(c, a, n, n1); });
}

template <class C, int t = 0> INLINE void store_units(const C& c, uint16_t* to) {
  if constexpr (t < 4) {
    _mm512_storeu_ph(to + t * 32, c.template unit<t>());
    store_units<C, t + 1>(c, to);
  }
}

template <int bits, bool has_offsets> void unpack_of(const CodesArgs& c, int64_t panel, uint16_t* to) {
  for (int half = 0; half < 2; ++half) {
    CodeColumn<bits, has_offsets> column;
    column.begin(c, panel * 2 + half);
    int64_t k = 0;
    for (int64_t g = 0; g < c.groups; ++g) {
      column.group(c, g);
      for (; k < c.ends[g]; k += 8, column.at += column.kStep) store_units(column, to + ((k / 32 * 2 + half) * 16 + k % 32 / 2) * 32);
    }
    store(reinterpret_cast<float*>(to + c.width * kPanel) + half * 16, -column.exponent);
  }
}

// f.operator()<bits, has_offsets>() of these codes.
template <class F> INLINE void by_kind(const CodesArgs& c, const F& f) {
  if (c.bits == 4 && has_offsets(c)) f.template operator()<4, true>();
  else if (c.bits == 4) f.template operator()<4, false>();
  else if (has_offsets(c)) f.template operator()<8, true>();
  else f.template operator()<8, false>();
}

}  // namespace

void half_codes(const CodesArgs& c, const LinearArgs& a, int64_t n0, int64_t n1) {
  by_kind(c, [&]<int bits, bool offsets>() { codes_of<bits, offsets>(c, a, n0, n1); });
}

void half_unpack(const CodesArgs& c, int64_t panel, uint16_t* to) {
  by_kind(c, [&]<int bits, bool offsets>() { unpack_of<bits, offsets>(c, panel, to); });
}

void packed_of_halves(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1, const void* next) {
  if (a.dtype == Dtype::bf16) rows_of(a, m0, m1, n0, n1, next); else packed_typed<float>(a, m0, m1, n0, n1);
}

}  // namespace isa_fp16

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
