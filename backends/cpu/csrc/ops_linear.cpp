// linear over plain and packed weights, and the packing.
#include <algorithm>
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

// weight [N, K] -> [panels, numbers of a panel]; see kernels.h.
Tensor pack_weight(const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.stride(1) == 1, "pack_weight: weight must be [out, in], row-major");
  Dtype d = dtype_of(weight, "weight");
  Tensor out = new_like(weight, {rounded(weight.size(0), kPanel) / kPanel, rounded(weight.size(1), packed_step(d)) * kPanel});
  if (d == Dtype::bf16) pack_typed<bf16>(weight, out); else pack_typed<float>(weight, out);
  return out;
}

// ---- linear ---------------------------------------------------------------------------------------------------------

using Kernel = void (*)(const LinearArgs&, int64_t, int64_t, int64_t, int64_t);

// Cuts out [M][N] into blocks of rows and panels of outputs.
void spread(const LinearArgs& a, int64_t M, int64_t N, int64_t block, Kernel kernel) {
  int64_t panels = (N + kPanel - 1) / kPanel, blocks = (M + block - 1) / block;
  int threads = threads_for(M * N * a.K);
  int64_t chunk = panels * blocks / (threads * 8), whole = threads == 1 ? panels * blocks : chunk > 2 ? chunk / 2 * 2 : 2;
  pool::parallel(panels * blocks, whole, threads, [&](int64_t begin, int64_t end) {
    while (begin < end) {  // panels of one block of rows are done together
      int64_t m = begin / panels, p0 = begin % panels, p1 = p0 + (end - begin) < panels ? p0 + (end - begin) : panels;
      int64_t m1 = (m + 1) * block < M ? (m + 1) * block : M, n1 = p1 * kPanel < N ? p1 * kPanel : N;
      kernel(a, m * block, m1, p0 * kPanel, n1);
      begin += p1 - p0;
    }
  });
}

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
  spread(a, M, N, kBlock, kernels()->plain);
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

const void* checked_bias(const Tensor* bias, Dtype d, int64_t N) {
  if (!bias) return nullptr;
  STD_TORCH_CHECK(dtype_of(*bias, "bias") == d && bias->is_contiguous() && bias->numel() == N, "linear: bias must be [out] of x's dtype");
  return bias->const_data_ptr();
}

int64_t give_rows(LinearArgs& a, const void* x, int64_t ldx, int64_t M, int64_t K, int64_t width) {
  static thread_local std::vector<float> wide;
  static thread_local std::vector<bf16> narrow;
  if (a.dtype == Dtype::bf16 && kernels()->packed_takes_bf16) {
    a.x = bf16_rows(x, M, K, ldx, width, narrow, &a.ldx);
    return kBlock;
  }
  a.tile = tile_of(M);
  a.x = tiled(x, a.dtype, M, K, ldx, width, a.tile, wide);
  return std::max<int64_t>(1, kBlock / a.tile) * a.tile;
}

PackedLinear packed_linear(const Tensor& panels, const Tensor* bias, Dtype d, int64_t in, int64_t out) {
  STD_TORCH_CHECK(dtype_of(panels, "weight") == d && panels.is_contiguous() && panels.size(1) == rounded(in, packed_step(d)) * kPanel && panels.size(0) == rounded(out, kPanel) / kPanel,
                  "linear: x [num_tokens, in] does not fit the packed weight");
  return {panels.const_data_ptr(), checked_bias(bias, d, out), in, out};
}

void run_linear(const PackedLinear& w, Dtype d, const void* x, int64_t ldx, int64_t M, void* out, bool out_f32) {
  LinearArgs a{d, nullptr, w.panels, w.bias, out, w.in, 0, 0, w.out, out_f32};
  int64_t block = give_rows(a, x, ldx, M, w.in, rounded(w.in, packed_step(d)));
  spread(a, M, w.out, block, kernels()->packed);
}

STABLE_TORCH_LIBRARY_FRAGMENT(oarlock_cpu, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, bool out_f32) -> Tensor");
  m.def("linear_packed(Tensor x, Tensor weight, int out_size, Tensor? bias, bool out_f32) -> Tensor");
  m.def("pack_weight(Tensor weight) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(oarlock_cpu, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_packed", TORCH_BOX(&linear_packed));
  m.impl("pack_weight", TORCH_BOX(&pack_weight));
}
