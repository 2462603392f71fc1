// Norms, rotary, activations, and the choice of instruction set.
#include "stages.h"

namespace {

// x as rows of its last dimension: [outer][inner][size], so that a slice of a wider tensor needs no copy.
struct Rows {
  Tensor x;
  int64_t outer, inner, size, outer_stride, inner_stride, element;
  Rows(const Tensor& t, int64_t element_size) : x(t), element(element_size) {
    bool fits = (t.dim() == 2 || t.dim() == 3) && t.stride(t.dim() - 1) == 1;
    if (!fits) x = packed(t);
    size = x.size(x.dim() - 1);
    if (fits && t.dim() == 3) {
      outer = t.size(0), inner = t.size(1), outer_stride = t.stride(0), inner_stride = t.stride(1);
    } else {
      outer = size ? x.numel() / size : 0, inner = 1, outer_stride = fits ? t.stride(0) : size, inner_stride = size;
    }
  }
  int64_t count() const { return outer * inner; }
  const char* row(int64_t i) const { return bytes(x) + (i / inner * outer_stride + i % inner * inner_stride) * element; }
};

void check_norm(const Tensor& weight, int64_t size, const char* name) {
  STD_TORCH_CHECK(weight.is_contiguous() && weight.numel() == size, name, ": weight must hold one number for each of the last dimension's");
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  Dtype d = dtype_of(x, "x"), dw = dtype_of(weight, "weight");
  Rows rows(x, size_of(d));
  check_norm(weight, rows.size, "rms_norm");
  Tensor out = torch::stable::empty_like(packed(x));
  char* to = writable(out);
  each_row(rows.count(), rows.size * 4, [&, k = kernels()](int64_t i) {
    k->rms_norm(d, dw, rows.row(i), nullptr, weight.const_data_ptr(), to + i * rows.size * rows.element, nullptr, rows.size, static_cast<float>(eps));
  });
  return out;
}

std::tuple<Tensor, Tensor> fused_add_rms_norm(const Tensor& x_in, const Tensor& residual_in, const Tensor& weight, double eps) {
  Tensor x = packed(x_in), residual = packed(residual_in);
  Dtype d = dtype_of(x, "x"), dw = dtype_of(weight, "weight");
  const float* sums = floats(residual, "residual");
  STD_TORCH_CHECK(residual.numel() == x.numel(), "fused_add_rms_norm: x and residual must agree");
  int64_t size = x.size(x.dim() - 1), step = size * size_of(d);
  check_norm(weight, size, "fused_add_rms_norm");
  Tensor out = torch::stable::empty_like(x), total = torch::stable::empty_like(residual);
  char* to = writable(out);
  float* sum = static_cast<float*>(total.mutable_data_ptr());
  each_row(size ? x.numel() / size : 0, size * 6, [&, k = kernels()](int64_t i) {
    k->rms_norm(d, dw, bytes(x) + i * step, sums + i * size, weight.const_data_ptr(), to + i * step, sum + i * size, size, static_cast<float>(eps));
  });
  return {out, total};
}

Tensor layer_norm(const Tensor& x_in, const Tensor& weight, const OptionalTensor& bias, double eps) {
  Tensor x = packed(x_in);
  Dtype d = dtype_of(x, "x"), dw = dtype_of(weight, "weight");
  int64_t size = x.size(x.dim() - 1), step = size * size_of(d);
  check_norm(weight, size, "layer_norm");
  if (bias) {
    check_norm(*bias, size, "layer_norm");
    STD_TORCH_CHECK(dtype_of(*bias, "bias") == dw, "layer_norm: weight and bias must have one dtype");
  }
  Tensor out = torch::stable::empty_like(x);
  char* to = writable(out);
  each_row(size ? x.numel() / size : 0, size * 6, [&, k = kernels()](int64_t i) {
    k->layer_norm(d, dw, bytes(x) + i * step, weight.const_data_ptr(), bias ? bias->const_data_ptr() : nullptr, to + i * step, size, static_cast<float>(eps));
  });
  return out;
}

Tensor rotary(const Tensor& x_in, const Tensor& positions, const Tensor& table, bool interleaved) {
  STD_TORCH_CHECK(x_in.dim() == 3 && table.dim() == 3 && table.size(1) == 2, "rotary: x [num_tokens, heads, head_dim] and table [max_len, 2, rot / 2] expected");
  Dtype d = dtype_of(x_in, "x");
  Rows rows(x_in, size_of(d));
  int64_t half = table.size(2), tokens = x_in.size(0), heads = x_in.size(1), length = table.size(0);
  STD_TORCH_CHECK(2 * half <= rows.size && positions.numel() == tokens, "rotary: rot must be at most head_dim, and positions one a token");
  const int32_t* at = ints(positions, "positions");
  const float* angles = floats(table, "table");
  for (int64_t t = 0; t < tokens; ++t) STD_TORCH_CHECK(at[t] >= 0 && at[t] < length, "rotary: position ", at[t], " is outside the table of ", length);
  Tensor out = new_like(x_in, {tokens, heads, rows.size});
  char* to = writable(out);
  each_row(tokens, heads * rows.size * 4, [&, k = kernels()](int64_t t) {
    for (int64_t i = t * heads; i < (t + 1) * heads; ++i)
      k->rotary(d, rows.x.dim() == 3 && rows.inner == heads ? rows.row(i) : bytes(rows.x) + i * rows.size * rows.element, to + i * rows.size * rows.element,
                angles + at[t] * 2 * half, half, rows.size - 2 * half, interleaved);
  });
  return out;
}

// act(x) or act(first half) * second half, for a whole tensor.
Tensor activate(const Tensor& x_in, int64_t kind, bool gated) {
  Tensor x = packed(x_in);
  Dtype d = dtype_of(x, "x");
  STD_TORCH_CHECK(kind >= 0 && kind <= 3, "activation: kind must be 0 relu, 1 gelu, 2 gelu_tanh or 3 silu");
  Act act = static_cast<Act>(kind);
  const Kernels* k = kernels();
  int64_t element = size_of(d), width = x.size(x.dim() - 1);
  if (gated) {
    STD_TORCH_CHECK(x.dim() == 2 && width % 2 == 0, "gated activation: x [num_tokens, 2 * size] expected");
    int64_t size = width / 2;
    Tensor out = new_like(x, {x.size(0), size});
    char* to = writable(out);
    each_row(x.size(0), size * 16, [&](int64_t i) {
      const char* row = bytes(x) + i * width * element;
      k->activation(d, act, row, row + size * element, to + i * size * element, size);
    });
    return out;
  }
  Tensor out = torch::stable::empty_like(x);
  char* to = writable(out);
  each_row(width ? x.numel() / width : 0, width * 12, [&](int64_t i) { k->activation(d, act, bytes(x) + i * width * element, nullptr, to + i * width * element, width); });
  return out;
}

bool set_isa(std::string name) { return use_kernels(name.c_str()); }
std::string get_isa() { return kernels()->name; }

}  // namespace

void Linear::run_gated(Dtype d, const void* x, int64_t ldx, int64_t M, Act act, void* between, void* out) const {
  if (std::visit([&](const auto& w) { return ::run_gated(w, d, x, ldx, M, act, out); }, of)) return;
  run(d, x, ldx, M, between);
  int64_t inner = std::visit([](const auto& w) { return w.out; }, of) / 2, element = size_of(d);
  each_row(M, inner * 16, [&, k = kernels()](int64_t i) {
    const char* row = static_cast<const char*>(between) + i * 2 * inner * element;
    k->activation(d, act, row, row + inner * element, static_cast<char*>(out) + i * inner * element, inner);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(oarlock_cpu, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> Tensor");
  m.def("rotary(Tensor x, Tensor positions, Tensor table, bool interleaved=False) -> Tensor");
  m.def("activate(Tensor x, int kind, bool gated) -> Tensor");
  m.def("set_isa(str name) -> bool");
  m.def("get_isa() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(oarlock_cpu, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm));
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("rotary", TORCH_BOX(&rotary));
  m.impl("activate", TORCH_BOX(&activate));
}

STABLE_TORCH_LIBRARY_IMPL(oarlock_cpu, CompositeExplicitAutograd, m) {
  m.impl("set_isa", TORCH_BOX(&set_isa));
  m.impl("get_isa", TORCH_BOX(&get_isa));
}
