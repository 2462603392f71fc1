// Chooses the kernels of this processor, once. OARLOCK_CPU_ISA caps the choice (generic, avx2, avx512, amx): for tests and bug reports.
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
namespace isa_amx {
void packed_on_tiles(const LinearArgs&, int64_t, int64_t, int64_t, int64_t);
bool tiles_work();
}
#endif

namespace {

struct Candidate {
  const Kernels* table;
  bool there;
};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_tiles() { return has_avx512() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && isa_amx::tiles_work(); }

Kernels with_tiles() {
  Kernels k = isa_avx512::table;
  k.name = "amx";
  k.packed = isa_amx::packed_on_tiles;
  k.packed_takes_bf16 = true;
  return k;
}
#endif

// Best last.
const Candidate* candidates(int* count) {
#if defined(__x86_64__)
  static const Kernels amx = with_tiles();
#endif
  static const Candidate all[] = {
      {&isa_generic::table, true},
#if defined(__x86_64__)
      {&isa_avx2::table, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
      {&isa_avx512::table, has_avx512()},
      {&amx, has_tiles()},
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
