// linear over plain and packed weights, and the packing.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "stages.h"

namespace {

constexpr int64_t kBlock = 96;  // rows of an item, at most: x stays in the second-level cache while w streams

int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ---- packing --------------------------------------------------------------------------------------------------------

// One panel: outputs [n0, n0 + 32) of a row-major weight.
template <class T> void pack_panel(const T* w, int64_t ldw, int64_t outputs, int64_t K, T* to) {
  constexpr int P = per_unit<T>;
  int64_t depth = rounded(K, 16 * P) / (16 * P);
  for (int64_t d = 0; d < depth; ++d)
    for (int c = 0; c < 2; ++c, to += kTileUnits * P)
      for (int n = 0; n < 16; ++n)
        for (int k = 0; k < 16 * P; ++k) {
          int64_t at = d * 16 * P + k, row = c * 16 + n;
          to[(k / P * 16 + n) * P + k % P] = row < outputs && at < K ? w[row * ldw + at] : T{};
        }
}

template <class T> void pack_typed(const Tensor& weight, Tensor& out) {
  int64_t N = weight.size(0), K = weight.size(1), ldw = weight.stride(0), panel = out.size(1);
  const T* w = static_cast<const T*>(weight.const_data_ptr());
  T* to = static_cast<T*>(out.mutable_data_ptr());
  pool::parallel(out.size(0), 8, threads_for(N * K), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) pack_panel(w + p * kPanel * ldw, ldw, N - p * kPanel < kPanel ? N - p * kPanel : kPanel, K, to + p * panel);
  });
}

// Numbers of a panel as pack_weight leaves it.
int64_t panel_size(Dtype d, bool is_half, int64_t K) { return (rounded(K, packed_step(d)) + 2 * is_half) * kPanel; }

Tensor pack_halves(const Tensor& weight) {
  int64_t N = weight.size(0), K = weight.size(1), ldw = weight.stride(0), panels = rounded(N, kPanel) / kPanel;
  Tensor out = new_like(weight, {panels, panel_size(Dtype::bf16, true, K)}, ScalarType::Half);
  const bf16* w = static_cast<const bf16*>(weight.const_data_ptr());
  uint16_t* to = static_cast<uint16_t*>(out.mutable_data_ptr());
  pool::parallel(panels, 8, threads_for(N * K), [&, k = kernels()](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) k->pack_half_panel(w + p * kPanel * ldw, ldw, std::min(kPanel, N - p * kPanel), K, to + p * out.size(1));
  });
  return out;
}

// weight [N, K] -> [panels, numbers of a panel]; see kernels.h.
Tensor pack_weight(const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.stride(1) == 1, "pack_weight: weight must be [out, in], row-major");
  Dtype d = dtype_of(weight, "weight");
  if (form_of(d) == Rows::half_tiles) return pack_halves(weight);
  Tensor out = new_like(weight, {rounded(weight.size(0), kPanel) / kPanel, panel_size(d, false, weight.size(1))});
  if (d == Dtype::bf16) pack_typed<bf16>(weight, out); else pack_typed<float>(weight, out);
  return out;
}

// One row of panels as pack_weight leaves them, K numbers of T.
template <class T> void unpack_row(const char* panel, int64_t n, int64_t K, bool is_half, T* out) {
  constexpr int P = per_unit<T>;
  int64_t depth = rounded(K, 16 * P) / (16 * P);
  const uint32_t* units = reinterpret_cast<const uint32_t*>(panel) + n / 16 * kTileUnits + n % 16;
  float back;
  std::memcpy(&back, panel + (depth * 2 * kTileUnits + n) * 4, is_half ? 4 : 0);
  for (int64_t u = 0; u * P < K; ++u) {
    T numbers[P];
    std::memcpy(numbers, units + u / 16 * 2 * kTileUnits + u % 16 * 16, 4);
    for (int p = 0; p < P && u * P + p < K; ++p) {
      if constexpr (P == 2) {
        if (is_half) {
          float f = std::ldexp(widened(numbers[p].bits), static_cast<int>(back));
          uint32_t bits;
          std::memcpy(&bits, &f, 4);
          numbers[p].bits = static_cast<uint16_t>(f == f ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40);
        }
      }
      out[u * P + p] = numbers[p];
    }
  }
}

// Rows `ids` of a packed weight [N, K].
Tensor packed_rows(const Tensor& ids, const Tensor& panels, int64_t N, int64_t K) {
  bool is_half = panels.scalar_type() == ScalarType::Half;
  Dtype d = is_half ? Dtype::bf16 : dtype_of(panels, "weight");
  STD_TORCH_CHECK(panels.is_contiguous() && panels.size(0) == rounded(N, kPanel) / kPanel && panels.size(1) == panel_size(d, is_half, K),
                  "embedding: the packed weight is not [", N, ", ", K, "]");
  const int32_t* at = checked_ids(ids, N);
  Tensor out = new_like(panels, {ids.numel(), K}, is_half ? ScalarType::BFloat16 : panels.scalar_type());
  char* to = writable(out);
  int64_t panel_bytes = panels.size(1) * size_of(d);
  each_row(ids.numel(), K * 8, [&](int64_t i) {
    const char* panel = bytes(panels) + at[i] / kPanel * panel_bytes;
    if (d == Dtype::bf16) unpack_row(panel, at[i] % kPanel, K, is_half, reinterpret_cast<bf16*>(to) + i * K);
    else unpack_row(panel, at[i] % kPanel, K, false, reinterpret_cast<float*>(to) + i * K);
  });
  return out;
}

// ---- linear ---------------------------------------------------------------------------------------------------------

// The result: of x's dtype, or float32 where the sums are to stay unrounded.
Tensor new_out(const Tensor& x, int64_t N, bool out_f32) {
  return out_f32 ? new_like(x, {x.size(0), N}, ScalarType::Float) : new_like(x, {x.size(0), N});
}

Tensor linear(const Tensor& x_in, const Tensor& weight, const OptionalTensor& bias, bool out_f32) {
  STD_TORCH_CHECK(x_in.dim() == 2 && weight.dim() == 2 && x_in.size(1) == weight.size(1), "linear: x [num_tokens, in] and weight [out, in] expected");
  STD_TORCH_CHECK(weight.stride(1) == 1 || weight.size(1) == 1, "linear: weight must be row-major");
  Tensor x = x_in.stride(1) == 1 ? x_in : packed(x_in);
  int64_t M = x.size(0), N = weight.size(0), K = x.size(1);
  LinearArgs a{dtype_of(x, "x"), x.const_data_ptr(), weight.const_data_ptr(), nullptr, nullptr, K, x.stride(0), weight.stride(0), N, out_f32};
  STD_TORCH_CHECK(dtype_of(weight, "weight") == a.dtype, "linear: x and weight must have one dtype");
  a.bias = checked_bias(bias ? &*bias : nullptr, a.dtype, N);
  Tensor out = new_out(x, N, out_f32);
  a.out = out.mutable_data_ptr();
  spread(M, N, K, kBlock, 2, [&, k = kernels()](int64_t m0, int64_t m1, int64_t n0, int64_t n1, int64_t) { k->plain(a, m0, m1, n0, n1); });
  return out;
}

Tensor linear_packed(const Tensor& x_in, const Tensor& weight, int64_t N, const OptionalTensor& bias, bool out_f32) {
  Tensor x = x_in.stride(1) == 1 ? x_in : packed(x_in);
  Dtype d = dtype_of(x, "x");
  PackedLinear w = packed_linear(weight, bias ? &*bias : nullptr, d, x.size(1), N);
  Tensor out = new_out(x, N, out_f32);
  run_linear(w, d, x.const_data_ptr(), x.stride(0), x.size(0), out.mutable_data_ptr(), out_f32);
  return out;
}

// Panels that are walked side by side.
int64_t group_of(const LinearArgs& a) { return a.gate ? 1 : a.row_exponents && a.tile > 6 && a.tile <= 8 ? 3 : 2; }

// As even as can be: of 13 rows, two tiles of 7.
int64_t tile_of(int64_t M) {
  int64_t most = kernels()->tile_rows, count = std::max<int64_t>(1, (M + most - 1) / most);
  return std::max<int64_t>(1, (M + count - 1) / count);
}

// x in float32 tiles of `tile` rows (kernels.h); x itself where it is that already.
const float* tiled(const void* x, Dtype d, int64_t M, int64_t K, int64_t ldx, int64_t width, int64_t tile, std::vector<float>& buffer) {
  if (d == Dtype::f32 && M == 1 && K == width) return static_cast<const float*>(x);
  int64_t count = (M + tile - 1) / tile;
  if (static_cast<int64_t>(buffer.size()) < count * tile * width) buffer.resize(count * tile * width);
  float* to = buffer.data();
  const Kernels* k = kernels();
  pool::parallel(count, 1, threads_for(M * K), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      k->pack_rows(d, static_cast<const char*>(x) + t * tile * ldx * size_of(d), ldx, std::min(tile, M - t * tile), tile, K, width, to + t * tile * width);
  });
  return to;
}

// x in tiles of halves; the rows' scales follow them.
void half_tiles(LinearArgs& a, const bf16* x, int64_t M, int64_t K, int64_t ldx, int64_t width, std::vector<uint32_t>& buffer) {
  int64_t tile = a.tile, count = (M + tile - 1) / tile, size = width / 2 * tile + kHalfTileGap;
  if (static_cast<int64_t>(buffer.size()) < count * (size + tile)) buffer.resize(count * (size + tile));
  uint32_t* to = buffer.data();
  float* scales = reinterpret_cast<float*>(to + count * size);
  a.x = to, a.row_exponents = scales;
  pool::parallel(count, 1, threads_for(M * K), [&, k = kernels()](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) k->pack_half_rows(x + t * tile * ldx, ldx, std::min(tile, M - t * tile), tile, K, width, to + t * size, scales + t * tile);
  });
}

// x in tiles of codes of 8 bits.
void byte_tiles(LinearArgs& a, const bf16* x, int64_t M, int64_t K, int64_t ldx, int64_t width, std::vector<uint32_t>& buffer) {
  int64_t tile = a.tile, count = (M + tile - 1) / tile, size = width / 32 * kByteBlock * tile;
  if (static_cast<int64_t>(buffer.size()) < count * size) buffer.resize(count * size);
  uint32_t* to = buffer.data();
  a.x = to;
  pool::parallel(count, 1, threads_for(M * K), [&, k = kernels()](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) k->pack_byte_rows(a.bytes, x + t * tile * ldx, ldx, std::min(tile, M - t * tile), tile, K, width, to + t * size);
  });
}

// x as bfloat16 rows of `width` >= K numbers, zeros after K; x itself when it is that already.
const void* bf16_rows(const void* x, int64_t M, int64_t K, int64_t stride, int64_t width, std::vector<bf16>& buffer, int64_t* ldx) {
  *ldx = stride;
  if (K == width) return x;
  buffer.assign(M * width, bf16{0});
  *ldx = width;
  for (int64_t m = 0; m < M; ++m) std::copy_n(static_cast<const bf16*>(x) + m * stride, K, buffer.data() + m * width);
  return buffer.data();
}

}  // namespace

Rows form_of(Dtype d) { return d == Dtype::bf16 ? kernels()->bf16_form : Rows::f32_tiles; }

const int32_t* checked_ids(const Tensor& ids, int64_t N) {
  const int32_t* at = ints(ids, "ids");
  for (int64_t i = 0; i < ids.numel(); ++i) STD_TORCH_CHECK(at[i] >= 0 && at[i] < N, "embedding: id ", at[i], " of ", N);
  return at;
}

const void* checked_bias(const Tensor* bias, Dtype d, int64_t N) {
  if (!bias) return nullptr;
  STD_TORCH_CHECK(dtype_of(*bias, "bias") == d && bias->is_contiguous() && bias->numel() == N, "linear: bias must be [out] of x's dtype");
  return bias->const_data_ptr();
}

int64_t give_rows(LinearArgs& a, Rows form, const void* x, int64_t ldx, int64_t M, int64_t K, int64_t width) {
  static thread_local std::vector<float> wide;
  static thread_local std::vector<uint32_t> halves;
  static thread_local std::vector<bf16> narrow;
  if (form == Rows::bf16) {
    a.x = bf16_rows(x, M, K, ldx, width, narrow, &a.ldx);
    return kBlock;
  }
  a.tile = tile_of(M);
  if (form == Rows::byte_tiles) byte_tiles(a, static_cast<const bf16*>(x), M, K, ldx, width, halves);
  else if (form == Rows::half_tiles) half_tiles(a, static_cast<const bf16*>(x), M, K, ldx, width, halves);
  else a.x = tiled(x, a.dtype, M, K, ldx, width, a.tile, wide);
  return std::max<int64_t>(1, kBlock / a.tile) * a.tile;
}

PackedLinear packed_linear(const Tensor& panels, const Tensor* bias, Dtype d, int64_t in, int64_t out) {
  bool is_half = form_of(d) == Rows::half_tiles;
  STD_TORCH_CHECK((is_half ? panels.scalar_type() == ScalarType::Half : dtype_of(panels, "weight") == d) && panels.is_contiguous() && panels.size(1) == panel_size(d, is_half, in) && panels.size(0) == rounded(out, kPanel) / kPanel,
                  "linear: x [num_tokens, in] does not fit the packed weight");
  return {panels.const_data_ptr(), checked_bias(bias, d, out), in, out, panels.size(1) * size_of(d)};
}

namespace {

// N: outputs that are counted, half of w's where they are gated.
void run_packed(const PackedLinear& w, LinearArgs a, const void* x, int64_t ldx, int64_t M, int64_t N) {
  int64_t block = give_rows(a, form_of(a.dtype), x, ldx, M, w.in, rounded(w.in, packed_step(a.dtype)));
  const char* panels = static_cast<const char*>(w.panels);
  spread(M, N, w.in, block, group_of(a), [&, k = kernels()](int64_t m0, int64_t m1, int64_t n0, int64_t n1, int64_t next) {
    k->packed(a, m0, m1, n0, n1, next < 0 ? nullptr : panels + next / kPanel * w.panel_bytes);
  });
}

}  // namespace

void run_linear(const PackedLinear& w, Dtype d, const void* x, int64_t ldx, int64_t M, void* out, bool out_f32) {
  run_packed(w, {d, nullptr, w.panels, w.bias, out, w.in, 0, 0, w.out, out_f32}, x, ldx, M, w.out);
}

bool run_gated(const PackedLinear& w, Dtype d, const void* x, int64_t ldx, int64_t M, Act act, void* out) {
  int64_t inner = w.out / 2;
  if (form_of(d) != Rows::half_tiles || w.bias || inner % kPanel) return false;
  LinearArgs a{d, nullptr, w.panels, nullptr, out, w.in, 0, 0, inner, false};
  a.gate = inner, a.act = act;
  run_packed(w, a, x, ldx, M, inner);
  return true;
}

STABLE_TORCH_LIBRARY_FRAGMENT(oarlock_cpu, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, bool out_f32) -> Tensor");
  m.def("linear_packed(Tensor x, Tensor weight, int out_size, Tensor? bias, bool out_f32) -> Tensor");
  m.def("pack_weight(Tensor weight) -> Tensor");
  m.def("packed_rows(Tensor ids, Tensor panels, int out_size, int in_size) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(oarlock_cpu, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_packed", TORCH_BOX(&linear_packed));
  m.impl("pack_weight", TORCH_BOX(&pack_weight));
  m.impl("packed_rows", TORCH_BOX(&packed_rows));
}
