// What sampling needs of a row of logits: the best, exponentials, noise, and who lies above a bound.
#include "kernels.h"
#include "vmath.h"

namespace OARLOCK_ISA {
namespace {

// The first of the largest; the first NaN when there is one.
void argmax(const float* x, int64_t n, float* value, int64_t* at) {
  vf top = splat(-INFINITY);
  vi nan = {};
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    vf v = load(x + i);
    nan |= v != v;
    top = max(top, v);
  }
  float best = largest(top);
  bool has_nan = false;
  for (int j = 0; j < W; ++j) has_nan |= nan[j] != 0;
  for (int64_t j = i; j < n; ++j) {
    has_nan |= x[j] != x[j];
    best = x[j] > best ? x[j] : best;
  }
  for (int64_t j = 0; j < n; ++j) {
    if (has_nan ? x[j] != x[j] : x[j] == best) {
      *value = x[j], *at = j;
      return;
    }
  }
  *value = best, *at = 0;
}

double sum_exp(const float* x, int64_t n, float shift, float scale) {
  double total = 0;
  vf s = splat(shift), by = splat(scale);
  for (int64_t i = 0; i < n;) {  // float32 within 4096 numbers, double over them
    int64_t end = i + 4096 < n ? i + 4096 : n;
    vf part = {};
    for (; i + W <= end; i += W) part = part + exp((load(x + i) - s) / by);
    total += sum(part);
    if (i < end) {
      float tail[W];
      store(tail, exp((load_some(x + i, end - i) - s) / by));
      for (int64_t j = 0; j < end - i; ++j) total += tail[j];
      i = end;
    }
  }
  return total;
}

int64_t at_least(const float* x, int64_t n, float bound, int32_t* ids) {
  int64_t found = 0, i = 0;
  vf b = splat(bound);
  for (; i + W <= n; i += W) {
    vi over = load(x + i) >= b;
    int any = 0;
    for (int j = 0; j < W; ++j) any |= over[j];
    if (!any) continue;
    for (int j = 0; j < W; ++j)
      if (over[j]) ids[found++] = static_cast<int32_t>(i + j);
  }
  for (; i < n; ++i)
    if (x[i] >= bound) ids[found++] = static_cast<int32_t>(i);
  return found;
}

template <int bits> INLINE vu rotate_left(vu x) { return (x << bits) | (x >> (32 - bits)); }

// Threefry-2x32, 20 rounds. Salmon et al., SC 2011. The caller scores exactly what comes out near the top; see ops_sampling.cpp.
INLINE void threefry(vu k0, vu k1, vu& x0, vu& x1) {
  const vu keys[3] = {k0, k1, k0 ^ k1 ^ 0x1BD11BDAu};
  x0 += k0;
  x1 += k1;
#define ROUND(bits) x0 += x1, x1 = rotate_left<bits>(x1) ^ x0
  for (int group = 0; group < 5; ++group) {
    if (group % 2 == 0) ROUND(13), ROUND(15), ROUND(26), ROUND(6);
    else ROUND(17), ROUND(29), ROUND(16), ROUND(24);
    x0 += keys[(group + 1) % 3];
    x1 += keys[(group + 2) % 3] + static_cast<uint32_t>(group + 1);
  }
#undef ROUND
}

// logits / temperature + Gumbel noise, to about 1e-6: enough to find the candidates.
void gumbel(const float* logits, int64_t n, float temperature, const uint32_t key[2], uint32_t position, float* noisy) {
  vu k0 = vu{} + key[0], k1 = vu{} + key[1], lanes = (vu)lane_numbers();
  vf by = splat(temperature);
  for (int64_t i = 0; i < n; i += W) {
    int64_t left = n - i < W ? n - i : W;
    vu x0 = vu{} + position, x1 = lanes + static_cast<uint32_t>(i);
    threefry(k0, k1, x0, x1);
    vf high = __builtin_convertvector((vi)(x0 >> 9), vf), low = __builtin_convertvector((vi)(x1 >> 9), vf);
    vf u = high * splat(0x1p-23f) + (low * splat(0x1p-46f) + splat(0x1p-47f));
    vf rest = splat(1.f) - u;
    rest = rest < splat(0x1p-24f) ? splat(0x1p-24f) : rest;
    vf small = fma(fma(u, splat(1.f / 3), splat(0.5f)) * u, u, u);  // -log1p(-u) for small u
    vf e = u < splat(1e-2f) ? fma(u * u * u * u, splat(0.25f), small) : -log(rest);
    vf v = (left == W ? load(logits + i) : load_some(logits + i, left)) / by - log(e);
    if (left == W) store(noisy + i, v); else store_some(noisy + i, v, left);
  }
}

}  // namespace
}  // namespace OARLOCK_ISA
