// linear_codes over weights of 4 or 8 bits, and their packing. Layout and meaning: kernels.h.
#include <algorithm>
#include <cmath>
#include <vector>

#include "stages.h"

namespace {

constexpr int64_t kRound = 32;  // width is a multiple: what dense packed weights of either dtype need

// Of a panel: where column k of output o lies; of 4 bits in the low half for k % 4 < 2.
int64_t code_byte(int64_t bits, int64_t k, int64_t o) { return bits == 8 ? (k / 4 * kPanel + o) * 4 + k % 4 : (k / 8 * kPanel + o) * 4 + k % 2 * 2 + k % 8 / 4; }

// codes [N][width], a byte each -> [panels][bytes of a panel].
Tensor pack_codes(const Tensor& codes, int64_t bits) {
  STD_TORCH_CHECK(codes.dim() == 2 && codes.is_contiguous() && (codes.scalar_type() == ScalarType::Byte || codes.scalar_type() == ScalarType::Char) && (bits == 4 || bits == 8) && codes.size(1) % kRound == 0,
                  "pack_codes: codes must be [out, width] of bytes, width a multiple of ", kRound, ", and bits 4 or 8");
  int64_t N = codes.size(0), width = codes.size(1), panels = (N + kPanel - 1) / kPanel, size = width * kPanel * bits / 8;
  Tensor out = new_like(codes, {panels, size}, ScalarType::Byte);
  const uint8_t* from = static_cast<const uint8_t*>(codes.const_data_ptr());
  uint8_t* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  pool::parallel(panels, 1, threads_for(N * width), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      uint8_t* panel = to + p * size;
      std::fill_n(panel, size, 0);
      for (int64_t o = 0; o < kPanel && p * kPanel + o < N; ++o) {
        const uint8_t* row = from + (p * kPanel + o) * width;
        for (int64_t k = 0; k < width; ++k) {
          if (bits == 8) panel[code_byte(8, k, o)] = row[k];
          else panel[code_byte(4, k, o)] |= static_cast<uint8_t>((row[k] & 15) << (k % 4 / 2 * 4));
        }
      }
    }
  });
  return out;
}

// `floats` numbers on a cache line's boundary.
float* scratch_of(std::vector<float>& buffer, int64_t floats) {
  if (static_cast<int64_t>(buffer.size()) < floats + 16) buffer.resize(floats + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) / 64 * 64);
}

// Each panel is decoded for a block of rows, and multiplied as a dense one of half tiles.
void run_half_decoded(const CodesArgs& c, const LinearArgs& a, int64_t M, int64_t N, int64_t block) {
  const char* panels = static_cast<const char*>(c.panels);
  int64_t panel_bytes = c.width * kPanel * c.bits / 8, bias_size = size_of(a.dtype), out_size = a.out_f32 ? 4 : size_of(a.dtype);
  spread(M, N, c.width, block, 2, [&, k = kernels()](int64_t m0, int64_t m1, int64_t n0, int64_t n1, int64_t next) {
    static thread_local std::vector<float> buffer;
    int64_t floats = c.width * kPanel / 2 + kPanel;  // of a panel
    uint16_t* weight = reinterpret_cast<uint16_t*>(scratch_of(buffer, 2 * floats));
    LinearArgs part = a;
    part.w = weight;
    if (a.gate) part.gate = kPanel;
    for (int64_t n = n0; n < n1; n += kPanel) {
      int64_t then = n + kPanel < n1 ? n + kPanel : next;
      k->half_unpack(c, n / kPanel, weight);
      if (a.gate) k->half_unpack(c, (n + a.gate) / kPanel, weight + 2 * floats);
      part.bias = a.bias ? static_cast<const char*>(a.bias) + n * bias_size : nullptr;
      part.out = static_cast<char*>(a.out) + n * out_size;
      k->packed(part, m0, m1, 0, std::min(kPanel, n1 - n), then < 0 ? nullptr : panels + then / kPanel * panel_bytes);
    }
  });
}

// Each panel is decoded for a block of rows, and multiplied as a dense one.
void run_decoded(const CodesArgs& c, const LinearArgs& a, int64_t M, int64_t N, int64_t block) {
  bool to_bf16 = !a.tile;  // as x is
  int64_t panels = (N + kPanel - 1) / kPanel, blocks = (M + block - 1) / block;
  pool::parallel(panels * blocks, 1, threads_for(M * N * a.K), [&, k = kernels()](int64_t begin, int64_t end) {
    static thread_local std::vector<float> buffer;
    float* weight = scratch_of(buffer, (c.width + block) * kPanel);
    float* sums = weight + c.width * kPanel;
    LinearArgs part = a;
    part.dtype = to_bf16 ? Dtype::bf16 : Dtype::f32, part.w = weight, part.bias = nullptr, part.ldo = kPanel, part.out_f32 = true;
    for (int64_t i = begin; i < end; ++i) {
      int64_t m0 = i / panels * block, m1 = std::min(m0 + block, M), n = i % panels * kPanel, count = std::min(kPanel, N - n);
      k->unpack(c, i % panels, to_bf16, weight);
      part.out = sums - m0 * kPanel;
      k->packed(part, m0, m1, 0, kPanel, nullptr);
      for (int64_t m = m0; m < m1; ++m) k->store_numbers(a, sums + (m - m0) * kPanel, m, n, count);
    }
  });
}

Tensor linear_codes(const Tensor& x_in, const Tensor& panels, const Tensor& scales, const OptionalTensor& offsets, const Tensor& ends, const Tensor& exponents, int64_t bits, int64_t N, double zero,
                    const OptionalTensor& bias, bool out_f32, bool is_whole) {
  Tensor x = x_in.stride(1) == 1 ? x_in : packed(x_in);
  Tensor out = new_like(x, {x.size(0), N}, out_f32 ? std::optional(ScalarType::Float) : std::nullopt);
  Dtype d = dtype_of(x, "x");
  run_codes(code_linear(panels, scales, offsets ? &*offsets : nullptr, ends, &exponents, bits, zero, bias ? &*bias : nullptr, d, x.size(1), N), d, x.const_data_ptr(), x.stride(0), x.size(0), out.mutable_data_ptr(), out_f32, is_whole);
  return out;
}

// Rows `ids` of a weight of codes, [ids][width] float32.
Tensor code_rows(const Tensor& ids, const Tensor& panels, const Tensor& scales, const OptionalTensor& offsets, const Tensor& ends, int64_t bits, int64_t N, double zero) {
  CodesArgs c = code_linear(panels, scales, offsets ? &*offsets : nullptr, ends, nullptr, bits, zero, nullptr, Dtype::f32, 0, N).codes;
  const int32_t* at = checked_ids(ids, N);
  Tensor out = new_like(panels, {ids.numel(), c.width}, ScalarType::Float);
  float* to = static_cast<float*>(out.mutable_data_ptr());
  auto number = [&](const void* table, int64_t i) { return c.is_half ? widened(static_cast<const uint16_t*>(table)[i]) : static_cast<const float*>(table)[i]; };
  each_row(ids.numel(), c.width * 8, [&](int64_t i) {
    int64_t panel = at[i] / kPanel, o = at[i] % kPanel, k = 0;
    const uint8_t* from = static_cast<const uint8_t*>(c.panels) + panel * c.width * kPanel * bits / 8;
    for (int64_t g = 0; g < c.groups; ++g) {
      int64_t scale = (panel * c.groups + g) * kPanel + o;
      float s = number(c.scales, scale), offset = c.offsets ? number(c.offsets, scale) : s * -c.zero;
      for (; k < c.ends[g]; ++k) {
        int byte = from[code_byte(bits, k, o)], code = bits == 8 ? static_cast<int8_t>(byte) : byte >> (k % 4 / 2 * 4) & 15;
        to[i * c.width + k] = std::fma(static_cast<float>(code), s, offset);
      }
    }
  });
  return out;
}

}  // namespace

CodeLinear code_linear(const Tensor& panels, const Tensor& scales, const Tensor* offsets, const Tensor& ends, const Tensor* exponents, int64_t bits, double zero, const Tensor* bias, Dtype d, int64_t in, int64_t out) {
  bool is_half = scales.scalar_type() == ScalarType::Half;
  int64_t groups = ends.numel(), rows = (out + kPanel - 1) / kPanel;
  const int32_t* last = ints(ends, "ends");
  int64_t width = groups ? last[groups - 1] : 0;
  STD_TORCH_CHECK((bits == 4 || bits == 8) && width % kRound == 0 && in <= width && panels.is_contiguous() && panels.dim() == 2 && panels.size(0) == rows && panels.size(1) == width * kPanel * bits / 8,
                  "linear_codes: x [num_tokens, in] does not fit the packed codes");
  for (int64_t g = 0; g < groups; ++g) STD_TORCH_CHECK(last[g] % 8 == 0 && last[g] > (g ? last[g - 1] : 0), "linear_codes: groups must end at ascending multiples of 8");
  for (const Tensor* t : {&scales, offsets})
    STD_TORCH_CHECK(!t || (t->is_contiguous() && t->numel() == rows * groups * kPanel && t->scalar_type() == (is_half ? ScalarType::Half : ScalarType::Float)),
                    "linear_codes: scales and offsets must be [panels, groups, 32] of one dtype, float32 or float16");
  STD_TORCH_CHECK(!exponents || exponents->numel() == rows * kPanel, "linear_codes: exponents must be [panels, 32]");
  CodeLinear found;
  found.codes = {static_cast<int>(bits), panels.const_data_ptr(), scales.const_data_ptr(), offsets ? offsets->const_data_ptr() : nullptr, is_half, last, exponents ? floats(*exponents, "exponents") : nullptr, groups, width, static_cast<float>(zero), std::all_of(last, last + groups, [](int32_t end) { return end % 32 == 0; })};
  found.bias = checked_bias(bias, d, out);
  found.in = in, found.out = out;
  return found;
}

namespace {

bool takes_bytes(const CodesArgs& c, Dtype d) { return kernels()->byte_codes && d == Dtype::bf16 && c.is_by_32; }

// N: outputs that are counted, half of w's where they are gated.
void run_bytes(const CodeLinear& w, LinearArgs a, const void* x, int64_t ldx, int64_t M, int64_t N) {
  const CodesArgs& c = w.codes;
  const char* panels = static_cast<const char*>(c.panels);
  int64_t block = give_rows(a, Rows::byte_tiles, x, ldx, M, w.in, c.width), panel_bytes = c.width * kPanel * c.bits / 8;
  spread(M, N, c.width, block, a.gate ? 1 : 2, [&, k = kernels()](int64_t m0, int64_t m1, int64_t n0, int64_t n1, int64_t next) {
    k->byte_codes(c, a, m0, m1, n0, n1, next < 0 ? nullptr : panels + next / kPanel * panel_bytes);
  });
}

// N: as above.
void run_halves(const CodeLinear& w, LinearArgs a, const void* x, int64_t ldx, int64_t M, int64_t N) {
  const CodesArgs& c = w.codes;
  int64_t block = give_rows(a, Rows::half_tiles, x, ldx, M, w.in, c.width);
  if (M > a.tile) return run_half_decoded(c, a, M, N, block);
  spread(M, N, c.width, M, a.gate ? 1 : 2, [&, k = kernels()](int64_t, int64_t, int64_t n0, int64_t n1, int64_t) { k->half_codes(c, a, n0, n1); });
}

}  // namespace

void run_codes(const CodeLinear& w, Dtype d, const void* x, int64_t ldx, int64_t M, void* out, bool out_f32, bool is_whole) {
  const Kernels* k = kernels();
  const CodesArgs& c = w.codes;
  LinearArgs a{d, nullptr, nullptr, w.bias, out, c.width, 0, 0, w.out, out_f32};
  a.bytes = {c.bits, is_whole};
  if (!M) return;
  if (takes_bytes(c, d)) return run_bytes(w, a, x, ldx, M, w.out);
  if (form_of(d) == Rows::half_tiles) return run_halves(w, a, x, ldx, M, w.out);
  int64_t block = give_rows(a, form_of(d), x, ldx, M, w.in, c.width);
  if (!a.tile || M > k->few_rows) return run_decoded(c, a, M, w.out, block);
  spread(M, w.out, c.width, M, 2, [&](int64_t, int64_t, int64_t n0, int64_t n1, int64_t) { k->codes(c, a, n0, n1); });
}

bool run_gated(const CodeLinear& w, Dtype d, const void* x, int64_t ldx, int64_t M, Act act, void* out) {
  int64_t inner = w.out / 2;
  bool bytes = takes_bytes(w.codes, d);
  if ((!bytes && form_of(d) != Rows::half_tiles) || w.bias || inner % kPanel) return false;
  LinearArgs a{d, nullptr, nullptr, nullptr, out, w.codes.width, 0, 0, inner, false};
  a.gate = inner, a.act = act, a.bytes = {w.codes.bits, false};
  if (M && bytes) run_bytes(w, a, x, ldx, M, inner);
  else if (M) run_halves(w, a, x, ldx, M, inner);
  return true;
}

STABLE_TORCH_LIBRARY_FRAGMENT(oarlock_cpu, m) {
  m.def("linear_codes(Tensor x, Tensor panels, Tensor scales, Tensor? offsets, Tensor ends, Tensor exponents, int bits, int out_size, float zero, Tensor? bias, bool out_f32, bool is_whole=False) -> Tensor");
  m.def("pack_codes(Tensor codes, int bits) -> Tensor");
  m.def("code_rows(Tensor ids, Tensor panels, Tensor scales, Tensor? offsets, Tensor ends, int bits, int out_size, float zero) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(oarlock_cpu, CPU, m) {
  m.impl("linear_codes", TORCH_BOX(&linear_codes));
  m.impl("pack_codes", TORCH_BOX(&pack_codes));
  m.impl("code_rows", TORCH_BOX(&code_rows));
}
