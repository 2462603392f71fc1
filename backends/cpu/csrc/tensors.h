// Checks at the seam between torch and the kernels. A failed check is a RuntimeError in Python.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstring>
#include <optional>
#include <tuple>

#include "kernels.h"
#include "pool.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline Dtype dtype_of(const Tensor& t, const char* name) {
  if (t.scalar_type() == ScalarType::BFloat16) return Dtype::bf16;
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, name, " must be float32 or bfloat16");
  return Dtype::f32;
}
inline int64_t size_of(Dtype d) { return d == Dtype::bf16 ? 2 : 4; }

inline const int32_t* ints(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_contiguous(), name, " must be a contiguous int32 tensor");
  return static_cast<const int32_t*>(t.const_data_ptr());
}
inline const float* floats(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous(), name, " must be a contiguous float32 tensor");
  return static_cast<const float*>(t.const_data_ptr());
}
inline const char* bytes(const Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); }
inline char* writable(const Tensor& t) { return static_cast<char*>(t.mutable_data_ptr()); }

inline Tensor packed(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

inline Tensor new_like(const Tensor& t, std::initializer_list<int64_t> shape, std::optional<ScalarType> dtype = std::nullopt) {
  return torch::stable::new_empty(t, torch::headeronly::IntHeaderOnlyArrayRef(shape.begin(), shape.size()), dtype);
}

// Threads for an operation that moves or multiplies about `work` bytes or multiply-adds: one where waking others costs more.
inline int threads_for(int64_t work) { return work < 32768 ? 1 : static_cast<int>(torch::stable::get_num_threads()); }

// binary16 to float32: the exponent is moved by a product, which is right for subnormals too.
inline float widened(uint16_t h) {
  bool is_finite = (h & 0x7c00) != 0x7c00;
  uint32_t u = static_cast<uint32_t>(h & 0x7fff) << 13 | (is_finite ? 0 : 0x7f800000);
  float f;
  std::memcpy(&f, &u, 4);
  return (h & 0x8000 ? -f : f) * (is_finite ? 0x1p112f : 1.f);
}
