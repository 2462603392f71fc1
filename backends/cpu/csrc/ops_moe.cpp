// moe_experts: tokens gathered by expert, the linears of a gated feed-forward over each expert's rows, combined by weight. Nothing is padded:
// an expert without tokens is not read.
#include <algorithm>
#include <vector>

#include "stages.h"

namespace {

// Token-expert pairs by expert: those of expert e are [start[e], start[e + 1]).
struct Routing {
  std::vector<int64_t> start, token, place;  // token of each pair; pair of each (token, choice), -1: none
};

Routing route(const int32_t* ids, const bool* valid, int64_t tokens, int64_t k, int64_t experts) {
  Routing r{std::vector<int64_t>(experts + 1), {}, std::vector<int64_t>(tokens * k, -1)};
  for (int64_t i = 0; i < tokens * k; ++i) {
    if (!valid[i / k]) continue;
    STD_TORCH_CHECK(ids[i] >= 0 && ids[i] < experts, "moe_experts: expert ", ids[i], " of ", experts);
    ++r.start[ids[i] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) r.start[e + 1] += r.start[e];
  r.token.resize(r.start[experts]);
  std::vector<int64_t> next(r.start.begin(), r.start.end() - 1);
  for (int64_t i = 0; i < tokens * k; ++i) {
    if (!valid[i / k]) continue;
    r.place[i] = next[ids[i]]++;
    r.token[r.place[i]] = i / k;
  }
  return r;
}

// The linears of all experts, [experts][out, in] before: one packed weight, whose panels are those of one expert after another.
struct Stack {
  int64_t panels;  // of an expert
  Linear all;
  int64_t out;

  Linear of(int64_t expert) const {
    Linear one = all;
    int64_t first = expert * panels;
    if (auto* w = std::get_if<PackedLinear>(&one.of)) {
      w->panels = static_cast<const char*>(w->panels) + first * w->panel_bytes;
      w->out = out;
      return one;
    }
    CodeLinear& w = std::get<CodeLinear>(one.of);
    CodesArgs& c = w.codes;
    auto moved = [](const void* p, int64_t by) -> const void* { return p ? static_cast<const char*>(p) + by : nullptr; };
    int64_t numbers = first * c.groups * kPanel * (c.is_half ? 2 : 4);
    c.panels = moved(c.panels, first * c.width * kPanel * c.bits / 8);
    c.scales = moved(c.scales, numbers), c.offsets = moved(c.offsets, numbers), c.exponents += first * kPanel;
    w.out = out;
    return one;
  }
};

Tensor experts(const Tensor& x, const Stack& w13, const Stack& w2, int64_t count, const Tensor& weights, const Tensor& ids, const Tensor& valid) {
  Dtype d = dtype_of(x, "x");
  int64_t tokens = x.size(0), hidden = x.size(1), size = w13.out / 2, k = ids.size(1), element = size_of(d);
  STD_TORCH_CHECK(valid.scalar_type() == ScalarType::Bool && valid.is_contiguous() && valid.numel() == tokens && ids.size(0) == tokens && weights.numel() == ids.numel(),
                  "moe_experts: valid [num_tokens] bool, weights and ids [num_tokens, k] expected");
  const float* by = floats(weights, "weights");
  Routing r = route(ints(ids, "ids"), static_cast<const bool*>(valid.const_data_ptr()), tokens, k, count);
  int64_t pairs = r.token.size();
  const Kernels* kernel = kernels();
  Tensor gathered = new_like(x, {pairs, hidden}), gate_up = new_like(x, {pairs, 2 * size}), act = new_like(x, {pairs, size}), result = new_like(x, {pairs, hidden});
  for (int64_t p = 0; p < pairs; ++p) std::copy_n(bytes(x) + r.token[p] * hidden * element, hidden * element, writable(gathered) + p * hidden * element);
  for (int64_t e = 0; e < count; ++e) {
    int64_t first = r.start[e], rows = r.start[e + 1] - first;
    if (!rows) continue;
    char* inner = writable(act) + first * size * element;
    w13.of(e).run_gated(d, bytes(gathered) + first * hidden * element, hidden, rows, Act::silu, writable(gate_up) + first * 2 * size * element, inner);
    w2.of(e).run(d, inner, size, rows, writable(result) + first * hidden * element);
  }
  Tensor out = torch::stable::empty_like(x);
  char* to = writable(out);
  pool::parallel(tokens, 4, threads_for(pairs * hidden * 4), [&](int64_t begin, int64_t end) {
    std::vector<const void*> rows(k);
    for (int64_t t = begin; t < end; ++t) {
      int64_t n = r.place[t * k] < 0 ? 0 : k;  // a token has all its experts or none
      for (int64_t j = 0; j < n; ++j) rows[j] = bytes(result) + r.place[t * k + j] * hidden * element;
      kernel->combine(d, rows.data(), by + t * k, n, to + t * hidden * element, hidden);
    }
  });
  return out;
}

Tensor moe_experts(const Tensor& x_in, const Tensor& w13, const Tensor& w2, int64_t count, int64_t size, const Tensor& weights, const Tensor& ids, const Tensor& valid) {
  Tensor x = packed(x_in);
  Dtype d = dtype_of(x, "x");
  int64_t hidden = x.size(1);
  auto stack = [&](const Tensor& panels, int64_t in, int64_t out) {
    int64_t rows = (out + kPanel - 1) / kPanel;
    return Stack{rows, {packed_linear(panels, nullptr, d, in, count * rows * kPanel)}, out};
  };
  return experts(x, stack(w13, hidden, 2 * size), stack(w2, size, hidden), count, weights, ids, valid);
}

// w13 and w2: panels, scales, ends, exponents, then offsets where there are any.
Tensor moe_experts_codes(const Tensor& x_in, std::vector<Tensor> w13, std::vector<Tensor> w2, int64_t bits, double zero, int64_t count, int64_t size, const Tensor& weights, const Tensor& ids,
                         const Tensor& valid) {
  Tensor x = packed(x_in);
  Dtype d = dtype_of(x, "x");
  int64_t hidden = x.size(1);
  auto stack = [&](const std::vector<Tensor>& w, int64_t in, int64_t out) {
    STD_TORCH_CHECK(w.size() == 4 || w.size() == 5, "moe_experts: panels, scales, ends, exponents and perhaps offsets expected");
    int64_t rows = (out + kPanel - 1) / kPanel;
    return Stack{rows, {code_linear(w[0], w[1], w.size() == 5 ? &w[4] : nullptr, w[2], &w[3], bits, zero, nullptr, d, in, count * rows * kPanel)}, out};
  };
  return experts(x, stack(w13, hidden, 2 * size), stack(w2, size, hidden), count, weights, ids, valid);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oarlock_cpu, m) {
  m.def("moe_experts(Tensor x, Tensor w13, Tensor w2, int num_experts, int size, Tensor weights, Tensor ids, Tensor valid) -> Tensor");
  m.def("moe_experts_codes(Tensor x, Tensor[] w13, Tensor[] w2, int bits, float zero, int num_experts, int size, Tensor weights, Tensor ids, Tensor valid) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(oarlock_cpu, CPU, m) {
  m.impl("moe_experts", TORCH_BOX(&moe_experts));
  m.impl("moe_experts_codes", TORCH_BOX(&moe_experts_codes));
}
