// Chooses the kernels of this processor, once. OARLOCK_CPU_ISA caps the choice (generic, avx2, avx512, avx512_vnni, avx512_fp16, amx): for tests and bug reports.
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
#ifdef OARLOCK_FP16
namespace isa_fp16 {
void packed_of_halves(const LinearArgs&, int64_t, int64_t, int64_t, int64_t, const void*);
void pack_half_panel(const bf16*, int64_t, int64_t, int64_t, uint16_t*);
void half_unpack(const CodesArgs&, int64_t, uint16_t*);
void pack_half_rows(const bf16*, int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t*, float*);
void half_codes(const CodesArgs&, const LinearArgs&, int64_t, int64_t);
}
#endif
namespace isa_vnni {
void pack_byte_rows(const ByteRows&, const bf16*, int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t*);
void byte_codes(const CodesArgs&, const LinearArgs&, int64_t, int64_t, int64_t, int64_t, const void*);
}
namespace isa_amx {
void packed_on_tiles(const LinearArgs&, int64_t, int64_t, int64_t, int64_t, const void*);
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

bool has_bytes() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

Kernels with_bytes() {
  Kernels k = isa_avx512::table;
  k.name = "avx512_vnni";
  k.pack_byte_rows = isa_vnni::pack_byte_rows;
  k.byte_codes = isa_vnni::byte_codes;
  return k;
}

#ifdef OARLOCK_FP16
Kernels with_halves() {
  Kernels k = with_bytes();
  k.name = "avx512_fp16";
  k.packed = isa_fp16::packed_of_halves;
  k.bf16_form = Rows::half_tiles;
  k.pack_half_panel = isa_fp16::pack_half_panel;
  k.pack_half_rows = isa_fp16::pack_half_rows;
  k.half_unpack = isa_fp16::half_unpack;
  k.half_codes = isa_fp16::half_codes;
  return k;
}
#endif

Kernels with_tiles() {
  Kernels k = isa_avx512::table;
  k.name = "amx";
  k.packed = isa_amx::packed_on_tiles;
  k.bf16_form = Rows::bf16;
  return k;
}
#endif

// Best last.
const Candidate* candidates(int* count) {
#if defined(__x86_64__)
  static const Kernels vnni = with_bytes(), amx = with_tiles();
#ifdef OARLOCK_FP16
  static const Kernels fp16 = with_halves();
#endif
#endif
  static const Candidate all[] = {
      {&isa_generic::table, true},
#if defined(__x86_64__)
      {&isa_avx2::table, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
      {&isa_avx512::table, has_avx512()},
      {&vnni, has_bytes()},
#ifdef OARLOCK_FP16
      {&fp16, has_bytes() && __builtin_cpu_supports("avx512fp16")},
#endif
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
