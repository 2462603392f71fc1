// moe_experts: tokens gathered by expert, two plain linears over each expert's rows, combined by weight. Nothing is padded: an
// expert without tokens is not read.
#include <algorithm>
#include <vector>

#include "tensors.h"

namespace {

constexpr int64_t kBlock = 96;    // rows of an item
constexpr int64_t kOutputs = 64;  // outputs of an item

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

// out[pairs][N] = x[pairs][K] times each pair's expert's weight [N][K].
void grouped_linear(Dtype d, const Routing& r, const char* x, const Tensor& weights, char* out) {
  struct Item { int64_t expert, m0, m1, n0, n1; };
  std::vector<Item> items;
  int64_t N = weights.size(1), K = weights.size(2), experts = weights.size(0), pairs = r.token.size(), element = size_of(d);
  for (int64_t e = 0; e < experts; ++e)
    for (int64_t m = r.start[e]; m < r.start[e + 1]; m += kBlock)
      for (int64_t n = 0; n < N; n += kOutputs) items.push_back({e, m, std::min(m + kBlock, r.start[e + 1]), n, std::min(n + kOutputs, N)});
  pool::parallel(items.size(), 1, threads_for(pairs * N * K), [&, k = kernels()](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Item& item = items[i];
      k->plain({d, x, bytes(weights) + item.expert * N * K * element, nullptr, out, K, K, K, N}, item.m0, item.m1, item.n0, item.n1);
    }
  });
}

Tensor moe_experts(const Tensor& x_in, const Tensor& w13, const Tensor& w2, const Tensor& weights, const Tensor& ids, const Tensor& valid) {
  Tensor x = packed(x_in);
  Dtype d = dtype_of(x, "x");
  int64_t tokens = x.size(0), hidden = x.size(1), experts = w13.size(0), size = w2.size(2), k = ids.size(1), element = size_of(d);
  STD_TORCH_CHECK(dtype_of(w13, "w13") == d && dtype_of(w2, "w2") == d && w13.is_contiguous() && w2.is_contiguous() && w13.size(1) == 2 * size && w13.size(2) == hidden &&
                      w2.size(0) == experts && w2.size(1) == hidden,
                  "moe_experts: w13 [experts, 2 * size, hidden] and w2 [experts, hidden, size] of x's dtype expected");
  STD_TORCH_CHECK(valid.scalar_type() == ScalarType::Bool && valid.is_contiguous() && valid.numel() == tokens && ids.size(0) == tokens && weights.numel() == ids.numel(),
                  "moe_experts: valid [num_tokens] bool, weights and ids [num_tokens, k] expected");
  const float* by = floats(weights, "weights");
  Routing r = route(ints(ids, "ids"), static_cast<const bool*>(valid.const_data_ptr()), tokens, k, experts);
  int64_t pairs = r.token.size();
  const Kernels* kernel = kernels();
  std::vector<char> gathered(pairs * hidden * element), gate_up(pairs * 2 * size * element), act(pairs * size * element), result(pairs * hidden * element);
  for (int64_t p = 0; p < pairs; ++p) std::copy_n(bytes(x) + r.token[p] * hidden * element, hidden * element, gathered.data() + p * hidden * element);
  grouped_linear(d, r, gathered.data(), w13, gate_up.data());
  pool::parallel(pairs, 4, threads_for(pairs * size * 16), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const char* row = gate_up.data() + p * 2 * size * element;
      kernel->activation(d, Act::silu, row, row + size * element, act.data() + p * size * element, size);
    }
  });
  grouped_linear(d, r, act.data(), w2, result.data());
  Tensor out = torch::stable::empty_like(x);
  char* to = writable(out);
  pool::parallel(tokens, 4, threads_for(pairs * hidden * 4), [&](int64_t begin, int64_t end) {
    std::vector<const void*> rows(k);
    for (int64_t t = begin; t < end; ++t) {
      int64_t n = r.place[t * k] < 0 ? 0 : k;  // a token has all its experts or none
      for (int64_t j = 0; j < n; ++j) rows[j] = result.data() + r.place[t * k + j] * hidden * element;
      kernel->combine(d, rows.data(), by + t * k, n, to + t * hidden * element, hidden);
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oarlock_cpu, m) { m.def("moe_experts(Tensor x, Tensor w13, Tensor w2, Tensor weights, Tensor ids, Tensor valid) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(oarlock_cpu, CPU, m) { m.impl("moe_experts", TORCH_BOX(&moe_experts)); }
