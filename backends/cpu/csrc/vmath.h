// Elementary functions on vectors, to about 1e-7 relative. The same text, and so the same bits, wherever fma is one rounding.
#pragma once
#include <cmath>

#include "vec.h"

namespace OARLOCK_ISA {

// e^x = 2^n e^f with n a whole number: f, which is at most ln 2 / 2, and the series of e^f from its sixth power's coefficient on.
INLINE vf exp_rest(vf x, vf n) { return fma(n, splat(-1.42860677e-6f), fma(n, splat(-0.693145752f), x)); }  // ln 2 in two parts
INLINE vf exp_series(vf sixth, vf f) {
  vf p = fma(sixth, f, splat(1.f / 120));
  p = fma(p, f, splat(1.f / 24));
  p = fma(p, f, splat(1.f / 6));
  p = fma(p, f, splat(0.5f));
  p = fma(p, f, splat(1.f));
  return fma(p, f, splat(1.f));
}

// e^x. Below -87.3 it is 0 (no denormals), above 88.7 infinity; NaN gives NaN.
INLINE vf exp(vf x) {
  const vf magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  vf inside = x < splat(-88.f) ? splat(-88.f) : x;
  inside = inside > splat(89.f) ? splat(89.f) : inside;
  vf n = fma(inside, splat(1.44269504f), magic) - magic;
  vf f = exp_rest(inside, n), p = exp_series(fma(splat(1.f / 5040), f, splat(1.f / 720)), f);
  vi exponent = __builtin_convertvector(n, vi);
  // 2^n in two steps, so that n = 128 does not overflow by itself.
  vi half = exponent >> 1;
  p = p * as_float((half + 127) << 23) * as_float((exponent - half + 127) << 23);
  p = x < splat(-87.3f) ? splat(0.f) : p;
  p = x > splat(88.73f) ? splat(INFINITY) : p;
  return x == x ? p : x;
}

// e^x of x <= 0 or NaN, in half of the operations. Below -87.3 it is 0.
INLINE vf exp_below_one(vf x) {
  const vf magic = splat(12582912.f), lowest = splat(-87.3f);
  vf inside = max(lowest, x);  // of this order, which keeps NaN
  vf shifted = fma(inside, splat(1.44269504f), magic), n = shifted - magic;
  vf p = exp_series(splat(1.f / 720), exp_rest(inside, n));
  p = as_float(as_int(p) + (as_int(shifted) << 23));  // n, in the lowest bits of `shifted`, is added to the exponent
  return x < lowest ? splat(0.f) : x == x ? p : x;
}

// Natural logarithm of a positive normal number.
INLINE vf log(vf x) {
  vi bits = as_int(x);
  vi e = ((bits - 0x3f3504f3) >> 23);  // so that the mantissa lies in [0.707, 1.414)
  vf m = as_float(bits - (e << 23));
  vf s = (m - splat(1.f)) / (m + splat(1.f)), s2 = s * s;
  vf p = splat(2.f / 9);
  p = fma(p, s2, splat(2.f / 7));
  p = fma(p, s2, splat(2.f / 5));
  p = fma(p, s2, splat(2.f / 3));
  p = fma(p, s2, splat(2.f));
  return fma(__builtin_convertvector(e, vf), splat(0.693147181f), p * s);
}

INLINE vf tanh(vf x) {
  vf a = x < splat(0.f) ? -x : x;
  vf e = exp(a + a);
  vf large = splat(1.f) - splat(2.f) / (e + splat(1.f));
  vf s = x * x;
  vf p = splat(-1382.f / 155925);
  p = fma(p, s, splat(62.f / 2835));
  p = fma(p, s, splat(-17.f / 315));
  p = fma(p, s, splat(2.f / 15));
  p = fma(p, s, splat(-1.f / 3));
  vf small = fma(p * s, x, x);
  return a < splat(0.3f) ? small : (x < splat(0.f) ? -large : large);
}

INLINE vf sigmoid(vf x) { return splat(1.f) / (splat(1.f) + exp(-x)); }

INLINE vf relu(vf x) { return x < splat(0.f) ? splat(0.f) : x; }  // NaN stays
INLINE vf silu(vf x) { return x / (splat(1.f) + exp(-x)); }

// x * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2, as x * sigmoid of twice the argument.
INLINE vf gelu_tanh(vf x) {
  vf u = splat(1.59576912f) * fma(splat(0.044715f) * x * x, x, x);
  return x / (splat(1.f) + exp(-u));
}

// The exact one; lane by lane, as few models use it.
INLINE vf gelu(vf x) {
  float v[W];
  store(v, x);
  for (int i = 0; i < W; ++i) v[i] = 0.5f * v[i] * (1.f + std::erf(v[i] * 0.707106781f));
  return load(v);
}

}  // namespace OARLOCK_ISA
