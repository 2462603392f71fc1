// Chooses the kernels of this processor, once. OARLOCK_CPU_ISA caps the choice (generic, avx2, avx512): for tests and bug reports.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

#define DECLARE(set) \
  namespace set {    \
  extern const Kernels table; \
  }
DECLARE(isa_generic)
#if defined(__x86_64__)
DECLARE(isa_avx2)
DECLARE(isa_avx512)
#endif

namespace {

struct Candidate {
  const Kernels* table;
  bool there;
};

// Best last.
const Candidate* candidates(int* count) {
  static const Candidate all[] = {
      {&isa_generic::table, true},
#if defined(__x86_64__)
      {&isa_avx2::table, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
      {&isa_avx512::table, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")},
#endif
  };
  *count = sizeof all / sizeof all[0];
  return all;
}

const Kernels* choose() {
  const char* cap = std::getenv("OARLOCK_CPU_ISA");
  int n;
  const Candidate* all = candidates(&n);
  const Kernels* best = all[0].table;
  for (int i = 0; i < n; ++i) {
    if (all[i].there) best = all[i].table;
    if (cap && std::strcmp(cap, all[i].table->name) == 0) break;
  }
  return best;
}

const Kernels*& chosen() {
  static const Kernels* table = choose();
  return table;
}

}  // namespace

const Kernels* kernels() { return chosen(); }

bool use_kernels(const char* name) {
  int n;
  const Candidate* all = candidates(&n);
  for (int i = 0; i < n; ++i) {
    if (std::strcmp(all[i].table->name, name) || !all[i].there) continue;
    chosen() = all[i].table;
    return true;
  }
  return false;
}
