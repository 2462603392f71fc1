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

// Buffers of this thread, at least n long.
template <class T> std::vector<T>& buffer_of_thread(int64_t n) {
  static thread_local std::vector<T> buffer;
  if (static_cast<int64_t>(buffer.size()) < n) buffer.resize(n);
  return buffer;
}

// An approximation of logits / temperature + noise is good to about 1e-6: whoever lies this far below its maximum cannot win.
float cannot_win(float best) { return best - 1e-3f - 1e-5f * std::fabs(best); }

// The best of logits / temperature + noise over the whole vocabulary: an approximation finds the candidates, the definition decides.
int32_t sample_all(const Row& row) {
  std::vector<float>& noisy = buffer_of_thread<float>(row.vocab);
  const Kernels* k = kernels();
  k->gumbel(row.logits, row.vocab, row.temperature, row.key, row.position, noisy.data());
  float best;
  int64_t at;
  k->argmax(noisy.data(), row.vocab, &best, &at);
  std::vector<int32_t>& ids = buffer_of_thread<int32_t>(row.vocab);
  int64_t n = k->at_least(noisy.data(), row.vocab, cannot_win(best), ids.data());
  float top = -INFINITY;
  int32_t chosen = static_cast<int32_t>(at);
  for (int64_t i = 0; i < n; ++i) {
    float v = row.scaled(ids[i]) + gumbel_noise(row.key, row.position, ids[i]);
    if (v > top) top = v, chosen = ids[i];
  }
  return chosen;
}

struct Candidate {
  float logit, p;  // p: exp(scaled - best), not normalised
  int32_t id;
};

// The order of the definition: best first, equal logits by id.
bool better(const Candidate& a, const Candidate& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; }

double mass_of(const Candidate* begin, const Candidate* end) {
  double mass = 0;
  for (; begin != end; ++begin) mass += begin->p;
  return mass;
}

// Keeps candidates while those before them weigh less than `limit`; at least one. Halves what is undecided instead of sorting it all.
void keep_mass(std::vector<Candidate>& c, double limit) {
  Candidate* all = c.data();
  size_t low = 0, high = c.size();
  double before = 0;
  while (high - low > 32) {
    size_t middle = low + (high - low) / 2;
    std::nth_element(all + low, all + middle, all + high, better);
    double half = mass_of(all + low, all + middle);
    if (before + half >= limit) high = middle; else before += half, low = middle;
  }
  std::sort(all + low, all + high, better);
  size_t kept = low;
  for (; kept < high && (before < limit || kept == 0); ++kept) before += all[kept].p;
  c.resize(kept);
}

void keep_best(std::vector<Candidate>& c, int64_t k) {
  if (k >= static_cast<int64_t>(c.size())) return;
  std::nth_element(c.begin(), c.begin() + k, c.end(), better);
  c.resize(k);
}

// Tokens with a logit of at least `bound` that pass min_p.
void find_candidates(const Row& row, float bound, float best, std::vector<Candidate>& c) {
  std::vector<int32_t>& ids = buffer_of_thread<int32_t>(row.vocab);
  int64_t n = kernels()->at_least(row.logits, row.vocab, bound, ids.data());
  c.clear();
  for (int64_t i = 0; i < n; ++i) {
    float logit = row.logits[ids[i]], p = std::exp(row.scaled(ids[i]) - best);
    if (logit > -INFINITY && p >= row.min_p) c.push_back({logit, p, ids[i]});
  }
}

// What min_p, top_k and top_p leave, in no order. Looks at ever more of the vocabulary until that is enough.
void truncate(const Row& row, float best_logit, std::vector<Candidate>& c) {
  float best = best_logit / row.temperature;
  bool limited = row.top_k > 0 && row.top_k < row.vocab, nucleus = row.top_p < 1;
  float lowest = -INFINITY;  // of the logits that may pass min_p; a little generous
  if (row.min_p > 0) {
    lowest = (best + std::log(row.min_p)) * row.temperature;
    lowest -= 1e-4f * (std::fabs(lowest) + row.temperature);
  }
  double mass = -1;  // of what top_p looks at; -1: all candidates are needed to know
  if (nucleus && !limited && row.min_p <= 0) mass = kernels()->sum_exp(row.logits, row.vocab, best_logit, row.temperature);
  for (float depth = 4;; depth *= 2) {  // in units of the temperature
    float bound = best_logit - depth * row.temperature;
    bool last = depth > 128 || bound <= lowest || (!limited && mass < 0);
    find_candidates(row, last ? lowest : bound, best, c);
    bool enough = limited ? static_cast<int64_t>(c.size()) >= row.top_k : mass_of(c.data(), c.data() + c.size()) >= row.top_p * mass;
    if (last || enough) break;
  }
  if (limited) keep_best(c, row.top_k);
  if (nucleus) keep_mass(c, row.top_p * (mass >= 0 ? mass : mass_of(c.data(), c.data() + c.size())));
}

// The best of the kept by scaled logit + noise. Many: by the approximation first.
int32_t choose(const Row& row, const std::vector<Candidate>& c, int32_t fallback) {
  constexpr size_t kMany = 512;
  float bound = -INFINITY;
  const float* noisy = nullptr;
  if (c.size() > kMany) {
    std::vector<float>& approximate = buffer_of_thread<float>(row.vocab);
    kernels()->gumbel(row.logits, row.vocab, row.temperature, row.key, row.position, approximate.data());
    noisy = approximate.data();
    for (const Candidate& k : c) bound = std::max(bound, noisy[k.id]);
    bound = cannot_win(bound);
  }
  float top = -INFINITY;
  int32_t chosen = fallback;
  for (const Candidate& k : c) {
    if (noisy && noisy[k.id] < bound) continue;
    float v = row.scaled(k.id) + gumbel_noise(row.key, row.position, k.id);
    if (v > top) top = v, chosen = k.id;
  }
  return chosen;
}

int32_t sample_row(const Row& row) {
  float best;
  int64_t at;
  kernels()->argmax(row.logits, row.vocab, &best, &at);
  if (!std::isfinite(best)) return -1;
  if (row.temperature < kGreedyBelow) return static_cast<int32_t>(at);
  if (!std::isfinite(best / row.temperature)) return -1;
  if (row.top_p >= 1 && row.min_p <= 0 && (row.top_k <= 0 || row.top_k >= row.vocab)) return sample_all(row);
  static thread_local std::vector<Candidate> kept;
  truncate(row, best, kept);
  return choose(row, kept, static_cast<int32_t>(at));  // the best token is always kept
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
  std::vector<int32_t>& ids = buffer_of_thread<int32_t>(vocab);
  int64_t found = 0;
  for (float depth = 4; found < k && depth < 1e6f; depth *= 2) found = kernel->at_least(x, vocab, best - depth, ids.data());
  if (found < k) found = kernel->at_least(x, vocab, -INFINITY, ids.data());
  if (found < k) {  // NaN among the logits: the row is reported by its sampled token; here it gets any ids
    for (int64_t i = 0; i < k; ++i) to.ids[i] = static_cast<int32_t>(i), to.values[i] = NAN;
    return;
  }
  auto higher = [&](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
  std::partial_sort(ids.begin(), ids.begin() + k, ids.begin() + found, higher);
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
