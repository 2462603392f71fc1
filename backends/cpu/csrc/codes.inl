// Linear over weights of 4 or 8 bits. Layouts and the one numeric definition: kernels.h.
#include "kernels.h"
#include "linear.inl"
#include "vec.h"

namespace OARLOCK_ISA {
namespace {

constexpr int64_t kStep = 8;                // columns that are decoded together
constexpr int kFewRows = W == 16 ? 8 : kPackedRows / 3 ? kPackedRows / 3 : 1;  // as many as leave registers for scales and codes
constexpr int64_t kAheadBytes = 4096;

// ---- what differs between instruction sets --------------------------------------------------------------------------
//
// nibble<j>: code j of each unit.

#if OARLOCK_LANES == 16
// A table look-up reads four bits of each lane: no mask is needed.
template <int j> INLINE vf nibble(vi units) {
  const vf table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return _mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)units, 4 * j), table);
}
INLINE vf load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
#else
template <int j> INLINE vf nibble(vi units) { return __builtin_convertvector((vi)(((vu)units >> (4 * j)) & 15u), vf); }
// IEEE 754 binary16: the exponent is moved by a product, which is right for subnormals too. Scales are finite.
INLINE vf load_half(const uint16_t* p) {
  vh h;
  memcpy(&h, p, sizeof h);
  vu u = __builtin_convertvector(h, vu);
  vf magnitude = (vf)((u & 0x7fff) << 13) * 0x1p112f;
  return (vf)((vu)magnitude | ((u & 0x8000) << 16));
}
#endif

// Byte c of each unit.
template <int c> INLINE vf byte_of(vi units) { return __builtin_convertvector((vi)((vu)units << (24 - 8 * c)) >> 24, vf); }

// ---- decoding -------------------------------------------------------------------------------------------------------

// Scales and offsets of one group, of NV vectors of outputs.
template <int NV> INLINE void load_group(const CodesArgs& c, int64_t at, int64_t stride, vf (&s)[NV], vf (&o)[NV]) {
  for (int v = 0; v < NV; ++v) {
    int64_t i = at + v / (2 * kVectors) * stride + v % (2 * kVectors) * W;
    s[v] = c.is_half ? load_half(static_cast<const uint16_t*>(c.scales) + i) : load(static_cast<const float*>(c.scales) + i);
    if (!c.offsets) o[v] = s[v] * splat(-c.zero);
    else o[v] = c.is_half ? load_half(static_cast<const uint16_t*>(c.offsets) + i) : load(static_cast<const float*>(c.offsets) + i);
  }
}

// Calls f.operator()<j>(column vector) for the NV vectors of each of kStep columns. at[v]: where a vector of outputs begins for these columns.
template <int bits, int NV> struct Columns;
template <int NV> struct Columns<4, NV> {
  static constexpr int64_t stride = 2 * 64;  // bytes from one step of a panel to the next
  static constexpr int64_t offset(int v) { return v % (2 * kVectors) * W * 4; }
  vi units[NV];
  INLINE_MEMBER explicit Columns(const uint8_t* const (&at)[NV]) {
    for (int v = 0; v < NV; ++v) units[v] = load_units(at[v]);
  }
  template <int j> INLINE_MEMBER vf number(int v, const uint8_t* const (&)[NV]) const { return nibble<j % 2 * 4 + j / 2>(units[v]); }
};
template <int NV> struct Columns<8, NV> {
  static constexpr int64_t stride = kStep * 2 * 16;
  static constexpr int64_t offset(int v) { return v % (2 * kVectors) * W * 4; }
  INLINE_MEMBER explicit Columns(const uint8_t* const (&)[NV]) {}
  template <int j> INLINE_MEMBER vf number(int v, const uint8_t* const (&at)[NV]) const { return byte_of<j % 4>(load_units(at[v] + j / 4 * 128)); }
};

template <int bits, int NV, int j> INLINE void decode(const Columns<bits, NV>& c, const uint8_t* const (&at)[NV], const vf (&s)[NV], const vf (&o)[NV], vf (&w)[NV]) {
  for (int v = 0; v < NV; ++v) w[v] = fma(c.template number<j>(v, at), s[v], o[v]);
}

// ---- few rows: decoded and used at once -----------------------------------------------------------------------------

template <int MR, int NV> INLINE void add_column(const float* x, const vf (&w)[NV], vf (&acc)[MR][NV]) {
  for (int i = 0; i < MR; ++i) {
    vf xv = splat(x[i]);
    for (int v = 0; v < NV; ++v) acc[i][v] = fma(xv, w[v], acc[i][v]);
  }
}

template <int bits, int MR, int NV, int j = 0>
INLINE void add_step(const Columns<bits, NV>& c, const uint8_t* const (&at)[NV], const vf (&s)[NV], const vf (&o)[NV], const float* x, vf (&acc)[MR][NV]) {
  if constexpr (j < kStep) {
    vf w[NV];
    decode<bits, NV, j>(c, at, s, o, w);
    add_column<MR, NV>(x + j * MR, w, acc);
    add_step<bits, MR, NV, j + 1>(c, at, s, o, x, acc);
  }
}

// MR rows times NV vectors of outputs, from output n of a panel on.
template <int bits, int MR, int NV> void codes_block(const CodesArgs& c, const float* x, int64_t panel, int64_t first, float* out) {
  int64_t panel_bytes = c.width * kPanel * bits / 8, panel_scales = c.groups * kPanel;
  const uint8_t* at[NV];
  for (int v = 0; v < NV; ++v) {
    int64_t whole = first + v;
    at[v] = static_cast<const uint8_t*>(c.panels) + (panel + whole / (2 * kVectors)) * panel_bytes + Columns<bits, NV>::offset(static_cast<int>(whole % (2 * kVectors)));
  }
  vf acc[MR][NV] = {}, s[NV], o[NV];
  int64_t k = 0;
  for (int64_t g = 0; g < c.groups; ++g) {
    load_group<NV>(c, panel * panel_scales + g * kPanel + first * W, panel_scales, s, o);
    for (; k < c.ends[g]; k += kStep, x += kStep * MR) {
      Columns<bits, NV> columns(at);
      add_step<bits, MR, NV>(columns, at, s, o, x, acc);
      for (int v = 0; v < NV; ++v) {
        if (v * W % 16 == 0) __builtin_prefetch(at[v] + kAheadBytes);  // a step of a panel is 4 lines of int8, or 2 of int4
        if (bits == 8 && v * W % 16 == 0) __builtin_prefetch(at[v] + kAheadBytes + 128);
        at[v] += Columns<bits, NV>::stride;
      }
    }
  }
  for (int i = 0; i < MR; ++i)
    for (int v = 0; v < NV; ++v) store(out + (i * NV + v) * W, acc[i][v]);
}

template <int bits, int MR> void codes_rows(const CodesArgs& c, const LinearArgs& a, int64_t n0, int64_t n1) {
  constexpr int wide = W == 16 ? (MR <= 2 ? 4 : 2) : 2, per_panel = 2 * kVectors;
  static_assert(wide % per_panel == 0 || per_panel % wide == 0);
  alignas(64) float sums[MR * wide * W];
  constexpr int64_t outputs = wide * W;
  for (int64_t n = n0; n < n1;) {
    int64_t panel = n / kPanel, first = n % kPanel / W, left = n1 - n;
    int64_t count = left;
    if (outputs <= kPanel || left > kPanel) {
      codes_block<bits, MR, wide>(c, static_cast<const float*>(a.x), panel, first, sums);
      count = outputs < left ? outputs : left;
      for (int i = 0; i < MR; ++i) store_numbers(a, sums + i * outputs, i, n, count);
    } else {  // a last panel without a neighbour
      constexpr int few = per_panel < wide ? per_panel : wide;
      codes_block<bits, MR, few>(c, static_cast<const float*>(a.x), panel, first, sums);
      for (int i = 0; i < MR; ++i) store_numbers(a, sums + i * few * W, i, n, count);
    }
    n += count;
  }
}

template <int bits, int MR = kFewRows> void codes_typed(const CodesArgs& c, const LinearArgs& a, int64_t n0, int64_t n1) {
  if constexpr (MR > 1) {
    if (a.tile < MR) return codes_typed<bits, MR - 1>(c, a, n0, n1);
  }
  codes_rows<bits, MR>(c, a, n0, n1);
}

// ---- many rows: a panel is decoded once for all ---------------------------------------------------------------------

// Lower halves: even columns, upper halves: odd ones, each rounded to nearest even. Weights are finite.
INLINE vi bf16_pairs(vf even, vf odd) {
  vu a = (vu)even, b = (vu)odd;
  return (vi)(((a + 0x7fff + ((a >> 16) & 1)) >> 16) | ((b + 0x7fff + ((b >> 16) & 1)) & 0xffff0000u));
}

template <int bits, int NV, int j = 0>
INLINE void unpack_step(const Columns<bits, NV>& c, const uint8_t* const (&at)[NV], const vf (&s)[NV], const vf (&o)[NV], bool to_bf16, int64_t k, uint32_t* out) {
  if constexpr (j < kStep) {
    vf even[NV], odd[NV];
    decode<bits, NV, j>(c, at, s, o, even);
    decode<bits, NV, j + 1>(c, at, s, o, odd);
    for (int v = 0; v < NV; ++v) {
      int64_t column = v / kVectors, lane = v % kVectors * W, row = k + j;
      if (to_bf16) {
        vi pair = bf16_pairs(even[v], odd[v]);
        memcpy(out + ((row / 32 * 2 + column) * 16 + row % 32 / 2) * 16 + lane, &pair, sizeof pair);
      } else {
        float* to = reinterpret_cast<float*>(out) + ((row / 16 * 2 + column) * 16 + row % 16) * 16 + lane;
        store(to, even[v]);
        store(to + 16, odd[v]);
      }
    }
    unpack_step<bits, NV, j + 2>(c, at, s, o, to_bf16, k, out);
  }
}

template <int bits> void unpack_typed(const CodesArgs& c, int64_t panel, bool to_bf16, void* out) {
  constexpr int NV = 2 * kVectors;
  const uint8_t* at[NV];
  for (int v = 0; v < NV; ++v) at[v] = static_cast<const uint8_t*>(c.panels) + panel * c.width * kPanel * bits / 8 + Columns<bits, NV>::offset(v);
  vf s[NV], o[NV];
  int64_t k = 0;
  for (int64_t g = 0; g < c.groups; ++g) {
    load_group<NV>(c, (panel * c.groups + g) * kPanel, 0, s, o);
    for (; k < c.ends[g]; k += kStep) {
      Columns<bits, NV> columns(at);
      unpack_step<bits, NV>(columns, at, s, o, to_bf16, k, static_cast<uint32_t*>(out));
      for (int v = 0; v < NV; ++v) at[v] += Columns<bits, NV>::stride;
    }
  }
}

}  // namespace
}  // namespace OARLOCK_ISA
