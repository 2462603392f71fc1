// bfloat16 as storage: the upper half of a float32. Arithmetic is done by the kernels of each instruction set.
#pragma once
#include <cstdint>

struct bf16 {
  uint16_t bits;
};

// What the kernels compute with. A *unit* is 32 bits along the dimension that a product sums over: one float32 or two
// bfloat16. Vectors are made of units, so that one kernel text serves both dtypes.
enum class Dtype { f32, bf16 };
template <class T> constexpr int per_unit = 4 / sizeof(T);
