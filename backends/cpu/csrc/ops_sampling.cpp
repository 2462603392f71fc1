// greedy, sample, logprobs, penalties and masks without sorting the vocabulary. Rows are independent: one item each.
#include <algorithm>
#include <cmath>
#include <vector>

#include "tensors.h"

namespace {

constexpr float kGreedyBelow = 1e-5f;  // temperatures below it mean argmax

template <class F> void each_row(int64_t rows, int64_t vocab, const F& f) {
  pool::parallel(rows, 1, threads_for(rows * vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) f(r);
  });
}

int32_t greedy_row(const float* x, int64_t n) {
  float best;
  int64_t at;
  kernels()->argmax(x, n, &best, &at);
  return std::isfinite(best) ? static_cast<int32_t>(at) : -1;
}

Tensor greedy(const Tensor& logits) {
  const float* x = floats(logits, "logits");
  int64_t rows = logits.size(0), vocab = logits.size(1);
  Tensor out = new_like(logits, {rows}, ScalarType::Int);
  int32_t* to = static_cast<int32_t*>(out.mutable_data_ptr());
  each_row(rows, vocab, [&](int64_t r) { to[r] = greedy_row(x + r * vocab, vocab); });
  return out;
}

// ---- noise ----------------------------------------------------------------------------------------------------------

uint32_t rotate_left(uint32_t x, int bits) { return x << bits | x >> (32 - bits); }

// Gumbel noise of (seed, choice, position, token): the definition, step by step. Salmon et al., SC 2011.
float gumbel_noise(const uint32_t key[2], uint32_t position, uint32_t token) {
  static const int rounds[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDAu};
  uint32_t x0 = position + keys[0], x1 = token + keys[1];
  for (int group = 0; group < 5; ++group) {
    for (int bits : rounds[group % 2]) {
      x0 += x1;
      x1 = rotate_left(x1, bits) ^ x0;
    }
    x0 += keys[(group + 1) % 3];
    x1 += keys[(group + 2) % 3] + static_cast<uint32_t>(group + 1);
  }
  float u = static_cast<float>(x0 >> 9) * 0x1p-23f + (static_cast<float>(x1 >> 9) * 0x1p-46f + 0x1p-47f);
  return -std::log(-std::log1p(-u));
}

// ---- sample ---------------------------------------------------------------------------------------------------------

struct Row {
  const float* logits;
  int64_t vocab;
  float temperature, top_p, min_p;
  int32_t top_k;
  uint32_t key[2], position;
  float scaled(int64_t id) const { return logits[id] / temperature; }
};

std::vector<int32_t>& ids_of_thread(int64_t n) {
  static thread_local std::vector<int32_t> ids;
  if (static_cast<int64_t>(ids.size()) < n) ids.resize(n);
  return ids;
}

// The best of logits / temperature + noise over the whole vocabulary: an approximation finds the candidates, the definition decides.
int32_t sample_all(const Row& row) {
  static thread_local std::vector<float> noisy;
  if (static_cast<int64_t>(noisy.size()) < row.vocab) noisy.resize(row.vocab);
  const Kernels* k = kernels();
  k->gumbel(row.logits, row.vocab, row.temperature, row.key, row.position, noisy.data());
  float best;
  int64_t at;
  k->argmax(noisy.data(), row.vocab, &best, &at);
  std::vector<int32_t>& ids = ids_of_thread(row.vocab);
  int64_t n = k->at_least(noisy.data(), row.vocab, best - 1e-3f - 1e-5f * std::fabs(best), ids.data());
  float top = -INFINITY;
  int32_t chosen = static_cast<int32_t>(at);
  for (int64_t i = 0; i < n; ++i) {
    float v = row.scaled(ids[i]) + gumbel_noise(row.key, row.position, ids[i]);
    if (v > top) top = v, chosen = ids[i];
  }
  return chosen;
}

// Candidates of a truncated row in order, best first, equal logits by id: the `rank` of the definition.
// Only those are sorted that are needed: the k best, or ever more until their probability exceeds top_p.
struct Kept {
  std::vector<int32_t> ids;  // sorted
  int64_t count = 0;         // of them kept
};

void sort_best(const Row& row, std::vector<int32_t>& ids, int64_t first) {
  auto better = [&](int32_t a, int32_t b) { return row.logits[a] != row.logits[b] ? row.logits[a] > row.logits[b] : a < b; };
  if (first < static_cast<int64_t>(ids.size())) {
    std::nth_element(ids.begin(), ids.begin() + first, ids.end(), better);
    ids.resize(first);
  }
  std::sort(ids.begin(), ids.end(), better);
}

// Keeps ids until the probability before one reaches top_p; `mass` is the sum of exp(scaled - best) over what is left.
// Returns how many are kept; all of them may not be enough.
int64_t keep_top_p(const Row& row, const std::vector<int32_t>& ids, float best, double mass, bool* enough) {
  double before = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (before / mass >= row.top_p && i > 0) {
      *enough = true;
      return i;
    }
    before += std::exp(row.scaled(ids[i]) - best);
  }
  *enough = false;
  return ids.size();
}

Kept truncate(const Row& row, float best_logit) {
  const Kernels* k = kernels();
  Kept kept;
  float best = best_logit / row.temperature;
  // min_p: exp(scaled - best) >= min_p. The bound is a little generous; the definition decides below.
  float bound = row.min_p > 0 ? (best + std::log(row.min_p)) * row.temperature : -INFINITY;
  bound -= std::isfinite(bound) ? 1e-4f * (std::fabs(bound) + row.temperature) : 0;
  auto passes = [&](int32_t id) { return row.logits[id] > -INFINITY && std::exp(row.scaled(id) - best) >= row.min_p; };
  auto candidates = [&](float at_least) {
    std::vector<int32_t>& ids = ids_of_thread(row.vocab);
    int64_t n = k->at_least(row.logits, row.vocab, at_least, ids.data());
    kept.ids.assign(ids.begin(), ids.begin() + n);
    kept.ids.erase(std::remove_if(kept.ids.begin(), kept.ids.end(), [&](int32_t id) { return !passes(id); }), kept.ids.end());
  };
  bool limited = row.top_k > 0 && row.top_k < row.vocab, nucleus = row.top_p < 1;
  if (limited || !nucleus) {
    candidates(bound);
    if (!nucleus && !limited) {
      kept.count = kept.ids.size();
      return kept;  // order does not matter
    }
    sort_best(row, kept.ids, std::min<int64_t>(row.top_k, kept.ids.size()));
    kept.count = kept.ids.size();
    double mass = 0;
    for (int32_t id : kept.ids) mass += std::exp(row.scaled(id) - best);
    bool enough;
    if (nucleus) kept.count = keep_top_p(row, kept.ids, best, mass, &enough);
    return kept;
  }
  double mass = 0;
  if (row.min_p > 0) {
    candidates(bound);
    for (int32_t id : kept.ids) mass += std::exp(row.scaled(id) - best);
  } else {
    mass = k->sum_exp(row.logits, row.vocab, best_logit, row.temperature);
  }
  for (float depth = 4;; depth *= 2) {  // in units of the temperature; 128 is beyond any float32 probability
    bool last = depth > 128;
    candidates(last ? bound : std::max(bound, best_logit - depth * row.temperature));
    sort_best(row, kept.ids, kept.ids.size());
    bool enough;
    kept.count = keep_top_p(row, kept.ids, best, mass, &enough);
    if (enough || last) return kept;
  }
}

int32_t sample_row(const Row& row) {
  float best;
  int64_t at;
  kernels()->argmax(row.logits, row.vocab, &best, &at);
  if (!std::isfinite(best)) return -1;
  if (row.temperature < kGreedyBelow) return static_cast<int32_t>(at);
  if (!std::isfinite(best / row.temperature)) return -1;
  if (row.top_p >= 1 && row.min_p <= 0 && (row.top_k <= 0 || row.top_k >= row.vocab)) return sample_all(row);
  Kept kept = truncate(row, best);
  float top = -INFINITY;
  int32_t chosen = static_cast<int32_t>(at);  // the best token is always kept
  for (int64_t i = 0; i < kept.count; ++i) {
    float v = row.scaled(kept.ids[i]) + gumbel_noise(row.key, row.position, kept.ids[i]);
    if (v > top) top = v, chosen = kept.ids[i];
  }
  return chosen;
}

Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_p, const Tensor& top_k, const Tensor& min_p, const Tensor& seed, const Tensor& choice,
              const Tensor& position) {
  const float *x = floats(logits, "logits"), *t = floats(temperature, "temperature"), *p = floats(top_p, "top_p"), *m = floats(min_p, "min_p");
  const int32_t *k = ints(top_k, "top_k"), *s = ints(seed, "seed"), *c = ints(choice, "choice"), *at = ints(position, "position");
  int64_t rows = logits.size(0), vocab = logits.size(1);
  Tensor out = new_like(logits, {rows}, ScalarType::Int);
  int32_t* to = static_cast<int32_t*>(out.mutable_data_ptr());
  each_row(rows, vocab, [&](int64_t r) {
    to[r] = sample_row({x + r * vocab, vocab, t[r], p[r], m[r], k[r], {static_cast<uint32_t>(s[r]), static_cast<uint32_t>(c[r])}, static_cast<uint32_t>(at[r])});
  });
  return out;
}

// ---- logprobs -------------------------------------------------------------------------------------------------------

struct LogprobRow {
  float* target;
  int32_t* rank;
  int32_t* ids;
  float* values;
};

void logprobs_row(const float* x, int64_t vocab, int64_t target, int64_t k, const LogprobRow& to) {
  const Kernels* kernel = kernels();
  float best;
  int64_t at;
  kernel->argmax(x, vocab, &best, &at);
  double normaliser = best + std::log(kernel->sum_exp(x, vocab, best, 1.f));
  *to.target = static_cast<float>(x[target] - normaliser);
  int32_t above = 0;
  for (int64_t i = 0; i < vocab; ++i) above += x[i] > x[target];
  *to.rank = above + 1;
  if (k == 0) return;
  // Narrow the vocabulary to a few hundred candidates by lowering a bound, then sort those.
  std::vector<int32_t>& ids = ids_of_thread(vocab);
  int64_t found = 0;
  for (float depth = 4; found < k; depth *= 2) found = kernel->at_least(x, vocab, depth > 1e6f ? -INFINITY : best - depth, ids.data());
  auto better = [&](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
  std::partial_sort(ids.begin(), ids.begin() + k, ids.begin() + found, better);
  for (int64_t i = 0; i < k; ++i) to.ids[i] = ids[i], to.values[i] = static_cast<float>(x[ids[i]] - normaliser);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> logprobs(const Tensor& logits, const Tensor& targets, int64_t k) {
  const float* x = floats(logits, "logits");
  const int32_t* target = ints(targets, "targets");
  int64_t rows = logits.size(0), vocab = logits.size(1);
  STD_TORCH_CHECK(k >= 0 && k <= vocab && targets.numel() == rows, "logprobs: one target a row, and k of at most the vocabulary's ", vocab);
  for (int64_t r = 0; r < rows; ++r) STD_TORCH_CHECK(target[r] >= 0 && target[r] < vocab, "logprobs: target ", target[r], " is outside the vocabulary of ", vocab);
  Tensor values = new_like(logits, {rows}), ranks = new_like(logits, {rows}, ScalarType::Int), ids = new_like(logits, {rows, k}, ScalarType::Int), tops = new_like(logits, {rows, k});
  auto *v = static_cast<float*>(values.mutable_data_ptr()), *tv = static_cast<float*>(tops.mutable_data_ptr());
  auto *rk = static_cast<int32_t*>(ranks.mutable_data_ptr()), *ti = static_cast<int32_t*>(ids.mutable_data_ptr());
  each_row(rows, vocab, [&](int64_t r) { logprobs_row(x + r * vocab, vocab, target[r], k, {v + r, rk + r, ti + r * k, tv + r * k}); });
  return {values, ranks, ids, tops};
}

// ---- penalties and masks --------------------------------------------------------------------------------------------

struct Penalties {
  float presence, frequency, repetition;
};

void penalise_row(float* x, int64_t vocab, const int32_t* history, int64_t prompt_len, int64_t total_len, const Penalties& p) {
  static thread_local std::vector<int32_t> counts;  // 0 between calls: 1 + occurrences in the output, of each token seen
  if (static_cast<int64_t>(counts.size()) < vocab) counts.resize(vocab);
  for (int64_t i = 0; i < total_len; ++i) {
    int32_t id = history[i];
    if (!counts[id]) counts[id] = 1;
    counts[id] += i >= prompt_len;
  }
  for (int64_t i = 0; i < total_len; ++i) {
    int32_t id = history[i], count = counts[id] - 1;
    if (count < 0) continue;  // done already
    counts[id] = 0;
    x[id] = x[id] > 0 ? x[id] / p.repetition : x[id] * p.repetition;
    x[id] -= p.frequency * count + (count > 0 ? p.presence : 0.f);
  }
}

Tensor apply_penalties(const Tensor& logits, const Tensor& history, const Tensor& prompt_len, const Tensor& total_len, const Tensor& presence, const Tensor& frequency,
                       const Tensor& repetition) {
  floats(logits, "logits");
  STD_TORCH_CHECK(history.scalar_type() == ScalarType::Int && history.dim() == 2 && history.stride(1) == 1, "history must be [num_rows, length] int32");
  const int32_t *h = static_cast<const int32_t*>(history.const_data_ptr()), *n = ints(prompt_len, "prompt_len"), *t = ints(total_len, "total_len");
  const float *p = floats(presence, "presence"), *f = floats(frequency, "frequency"), *r = floats(repetition, "repetition");
  int64_t rows = logits.size(0), vocab = logits.size(1), step = history.stride(0);
  for (int64_t i = 0; i < rows; ++i) {
    STD_TORCH_CHECK(t[i] <= history.size(1), "apply_penalties: row ", i, " has ", t[i], " tokens, history holds ", history.size(1));
    for (int64_t j = 0; j < t[i]; ++j) STD_TORCH_CHECK(h[i * step + j] >= 0 && h[i * step + j] < vocab, "apply_penalties: token ", h[i * step + j], " is outside the vocabulary of ", vocab);
  }
  Tensor out = torch::stable::clone(logits);
  float* x = static_cast<float*>(out.mutable_data_ptr());
  each_row(rows, vocab, [&](int64_t i) { penalise_row(x + i * vocab, vocab, h + i * step, n[i], t[i], {p[i], f[i], r[i]}); });
  return out;
}

Tensor apply_mask(const Tensor& logits, const Tensor& bitmask) {
  const float* x = floats(logits, "logits");
  const int32_t* bits = ints(bitmask, "bitmask");
  int64_t rows = logits.size(0), vocab = logits.size(1), words = bitmask.size(1);
  STD_TORCH_CHECK(bitmask.size(0) == rows && words * 32 >= vocab, "apply_mask: bitmask must be [num_rows, ceil(vocab_size / 32)]");
  Tensor out = torch::stable::empty_like(logits);
  float* to = static_cast<float*>(out.mutable_data_ptr());
  each_row(rows, vocab, [&](int64_t r) {
    for (int64_t v = 0; v < vocab; ++v) to[r * vocab + v] = (static_cast<uint32_t>(bits[r * words + v / 32]) >> (v % 32)) & 1 ? x[r * vocab + v] : -INFINITY;
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oarlock_cpu, m) {
  m.def("greedy(Tensor logits) -> Tensor");
  m.def("sample(Tensor logits, Tensor temperature, Tensor top_p, Tensor top_k, Tensor min_p, Tensor seed, Tensor choice, Tensor position) -> Tensor");
  m.def("logprobs(Tensor logits, Tensor targets, int k) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("apply_penalties(Tensor logits, Tensor history, Tensor prompt_len, Tensor total_len, Tensor presence, Tensor frequency, Tensor repetition) -> Tensor");
  m.def("apply_mask(Tensor logits, Tensor bitmask) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(oarlock_cpu, CPU, m) {
  m.impl("greedy", TORCH_BOX(&greedy));
  m.impl("sample", TORCH_BOX(&sample));
  m.impl("logprobs", TORCH_BOX(&logprobs));
  m.impl("apply_penalties", TORCH_BOX(&apply_penalties));
  m.impl("apply_mask", TORCH_BOX(&apply_mask));
}
