// Norms, rotary and activations: one row a call, float32 inside, rounded once.
#include "kernels.h"
#include "vmath.h"

namespace OARLOCK_ISA {
namespace {

// Calls f(offset, lanes) over n numbers; lanes == W but for the last.
template <class F> INLINE void each(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + W <= n; i += W) f(i, int64_t{W});
  if (i < n) f(i, n - i);
}
template <class T> INLINE vf get(const T* p, int64_t lanes) { return lanes == W ? load(p) : load_some(p, lanes); }
template <class T> INLINE void put(T* p, vf v, int64_t lanes) {
  if (lanes == W) store(p, v); else store_some(p, v, lanes);
}

// out = from / rms(from) * w, given the sum of squares.
template <class F, class TW, class T> void scale_by_rms(const F* from, float squares, const TW* w, T* out, int64_t H, float eps) {
  vf r = splat(1.f / std::sqrt(squares / H + eps));
  each(H, [&](int64_t i, int64_t n) { put(out + i, get(from + i, n) * r * get(w + i, n), n); });
}

template <class T, class TW> void rms_norm_typed(const T* x, const float* residual, const TW* w, T* out, float* total, int64_t H, float eps) {
  vf squares = {};
  each(H, [&](int64_t i, int64_t n) {
    vf v = get(x + i, n);
    if (residual) put(total + i, v = v + get(residual + i, n), n);
    squares = fma(v, v, squares);
  });
  if (residual) scale_by_rms(total, sum(squares), w, out, H, eps); else scale_by_rms(x, sum(squares), w, out, H, eps);
}

template <class T, class TW> void layer_norm_typed(const T* x, const TW* w, const TW* bias, T* out, int64_t H, float eps) {
  vf total = {}, squares = {};
  each(H, [&](int64_t i, int64_t n) { total = total + get(x + i, n); });
  vf mean = splat(sum(total) / H);
  each(H, [&](int64_t i, int64_t n) {
    vf d = get(x + i, n) - mean;
    if (n < W) {  // lanes past the end hold -mean
      float part[W];
      store(part, d);
      d = load_some(part, n);
    }
    squares = fma(d, d, squares);
  });
  vf r = splat(1.f / std::sqrt(sum(squares) / H + eps));
  each(H, [&](int64_t i, int64_t n) {
    vf v = (get(x + i, n) - mean) * r * get(w + i, n);
    put(out + i, bias ? v + get(bias + i, n) : v, n);
  });
}

template <class T> void rotary_typed(const T* x, T* out, const float* table, int64_t half, int64_t rest, bool interleaved) {
  const float *c = table, *s = table + half;
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
      out[2 * i] = narrow<T>(a * c[i] - b * s[i]);
      out[2 * i + 1] = narrow<T>(b * c[i] + a * s[i]);
    }
  } else {
    each(half, [&](int64_t i, int64_t n) {
      vf a = get(x + i, n), b = get(x + half + i, n), cv = get(c + i, n), sv = get(s + i, n);
      put(out + i, a * cv - b * sv, n);
      put(out + half + i, b * cv + a * sv, n);
    });
  }
  memcpy(out + 2 * half, x + 2 * half, rest * sizeof(T));
}

template <class T, class F> INLINE void activate(const T* x, const T* times, T* out, int64_t n, const F& f) {
  each(n, [&](int64_t i, int64_t lanes) {
    vf v = f(get(x + i, lanes));
    put(out + i, times ? v * get(times + i, lanes) : v, lanes);
  });
}

template <class T> void activation_typed(Act act, const T* x, const T* times, T* out, int64_t n) {
  switch (act) {
    case Act::relu: return activate(x, times, out, n, [](vf v) { return relu(v); });
    case Act::gelu: return activate(x, times, out, n, [](vf v) { return gelu(v); });
    case Act::gelu_tanh: return activate(x, times, out, n, [](vf v) { return gelu_tanh(v); });
    case Act::silu: return activate(x, times, out, n, [](vf v) { return silu(v); });
  }
}

template <class T> void widen_typed(const T* x, float* out, int64_t n, int64_t width) {
  each(n, [&](int64_t i, int64_t lanes) { put(out + i, get(x + i, lanes), lanes); });
  memset(out + n, 0, (width - n) * sizeof(float));
}

template <class T> void combine_typed(const void* const* rows, const float* weights, int64_t k, T* out, int64_t n) {
  each(n, [&](int64_t i, int64_t lanes) {
    vf total = {};
    for (int64_t j = 0; j < k; ++j) total = fma(splat(weights[j]), get(static_cast<const T*>(rows[j]) + i, lanes), total);
    put(out + i, total, lanes);
  });
}

// ---- the table's entries: dtypes to types ---------------------------------------------------------------------------

template <class T> const T* as(const void* p) { return static_cast<const T*>(p); }
template <class T> T* as(void* p) { return static_cast<T*>(p); }

template <class T, class TW> void rms_norm_as(const void* x, const float* residual, const void* w, void* out, float* total, int64_t H, float eps) {
  rms_norm_typed(as<T>(x), residual, as<TW>(w), as<T>(out), total, H, eps);
}
void rms_norm(Dtype t, Dtype tw, const void* x, const float* residual, const void* w, void* out, float* total, int64_t H, float eps) {
  auto f = t == Dtype::bf16 ? (tw == Dtype::bf16 ? rms_norm_as<bf16, bf16> : rms_norm_as<bf16, float>)
                            : (tw == Dtype::bf16 ? rms_norm_as<float, bf16> : rms_norm_as<float, float>);
  f(x, residual, w, out, total, H, eps);
}

template <class T, class TW> void layer_norm_as(const void* x, const void* w, const void* bias, void* out, int64_t H, float eps) {
  layer_norm_typed(as<T>(x), as<TW>(w), as<TW>(bias), as<T>(out), H, eps);
}
void layer_norm(Dtype t, Dtype tw, const void* x, const void* w, const void* bias, void* out, int64_t H, float eps) {
  auto f = t == Dtype::bf16 ? (tw == Dtype::bf16 ? layer_norm_as<bf16, bf16> : layer_norm_as<bf16, float>)
                            : (tw == Dtype::bf16 ? layer_norm_as<float, bf16> : layer_norm_as<float, float>);
  f(x, w, bias, out, H, eps);
}

void rotary(Dtype t, const void* x, void* out, const float* table, int64_t half, int64_t rest, bool interleaved) {
  if (t == Dtype::bf16) rotary_typed(as<bf16>(x), as<bf16>(out), table, half, rest, interleaved);
  else rotary_typed(as<float>(x), as<float>(out), table, half, rest, interleaved);
}

void activation(Dtype t, Act act, const void* x, const void* times, void* out, int64_t n) {
  if (t == Dtype::bf16) activation_typed(act, as<bf16>(x), as<bf16>(times), as<bf16>(out), n);
  else activation_typed(act, as<float>(x), as<float>(times), as<float>(out), n);
}

void combine(Dtype t, const void* const* rows, const float* weights, int64_t k, void* out, int64_t n) {
  if (t == Dtype::bf16) combine_typed(rows, weights, k, as<bf16>(out), n); else combine_typed(rows, weights, k, as<float>(out), n);
}
void widen(Dtype t, const void* x, float* out, int64_t n, int64_t width) {
  if (t == Dtype::bf16) widen_typed(as<bf16>(x), out, n, width); else widen_typed(as<float>(x), out, n, width);
}

}  // namespace
}  // namespace OARLOCK_ISA
