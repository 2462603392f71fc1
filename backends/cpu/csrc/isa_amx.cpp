// bfloat16 linears on AMX tiles; everything else is the AVX-512 table's (dispatch.cpp puts them together). Packed weights are
// tiles already: 16 units of K deep, 16 outputs wide. x is read as it is, bfloat16 rows with K rounded up to 32.
//
// Tiles: 0..3 sums of 2 x 2 blocks (16 rows x 16 outputs), 4 and 5 two blocks of x, 6 and 7 two columns of w.
// A sum runs along K in steps of 32 whatever the number of rows, so a row's bits do not depend on the others here either.
#define OARLOCK_ISA isa_amx
#define OARLOCK_NAME "amx"
#define OARLOCK_LANES 16
#include "linear.inl"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace isa_amx {
namespace {

constexpr int kTileRows = 16, kBlockRows = 2 * kTileRows;
constexpr int64_t kTileBytes = kTileUnits * 4;

// What LDTILECFG reads: palette 1, bytes of a row and rows of each tile.
struct alignas(64) Config {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  Config(int first, int second) {
    for (int i = 0; i < 8; ++i) row_bytes[i] = 64;
    rows[0] = rows[1] = rows[4] = static_cast<uint8_t>(first);
    rows[2] = rows[3] = rows[5] = static_cast<uint8_t>(second);
    rows[6] = rows[7] = kTileRows;
  }
  void load() const { __asm__ volatile("ldtilecfg (%0)" ::"r"(this) : "memory"); }
};

INLINE void ask_early(const char* w, int lines) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(w + kAhead * 4 + i * 64);
}

// At most 16 rows times a panel; sums [rows][32].
void one_block(const bf16* x, int64_t ldx, const char* w, int64_t depth, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t k = 0; k < depth; ++k, w += 2 * kTileBytes, x += 32) {
    ask_early(w, 32);
    _tile_loadd(4, x, ldx * 2);
    _tile_loadd(6, w, 64);
    _tile_loadd(7, w + kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, sums, kPanel * 4);
  _tile_stored(1, sums + 16, kPanel * 4);
}

// 17 to 32 rows times a panel.
void two_blocks(const bf16* x, int64_t ldx, const char* w, int64_t depth, bool ahead, float* sums) {
  const bf16* y = x + kTileRows * ldx;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < depth; ++k, w += 2 * kTileBytes, x += 32, y += 32) {
    if (ahead) ask_early(w, 32);
    _tile_loadd(4, x, ldx * 2);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, y, ldx * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kPanel * 4);
  _tile_stored(1, sums + 16, kPanel * 4);
  _tile_stored(2, sums + kTileRows * kPanel, kPanel * 4);
  _tile_stored(3, sums + kTileRows * kPanel + 16, kPanel * 4);
}

void packed_bf16(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  int64_t depth = (a.K + 31) / 32;
  alignas(64) float sums[kBlockRows * kPanel];
  for (int64_t m = m0; m < m1; m += kBlockRows) {
    int rows = static_cast<int>(m1 - m < kBlockRows ? m1 - m : kBlockRows);
    Config(rows < kTileRows ? rows : kTileRows, rows > kTileRows ? rows - kTileRows : kTileRows).load();
    const bf16* x = static_cast<const bf16*>(a.x) + m * a.ldx;
    for (int64_t n = n0; n < n1; n += kPanel) {
      const char* w = static_cast<const char*>(a.w) + n / kPanel * depth * 2 * kTileBytes;
      if (rows > kTileRows) two_blocks(x, a.ldx, w, depth, m == m0, sums); else one_block(x, a.ldx, w, depth, sums);
      int64_t outputs = n1 - n < kPanel ? n1 - n : kPanel;
      for (int i = 0; i < rows; ++i) store_row<bf16>(a, sums + i * kPanel, m + i, n, outputs);
    }
  }
  _tile_release();
}

}  // namespace

void packed_on_tiles(const LinearArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1, const void*) {
  if (a.dtype == Dtype::bf16) packed_bf16(a, m0, m1, n0, n1); else packed_typed<float>(a, m0, m1, n0, n1);
}

// Asks the system for the tile registers, then multiplies small whole numbers, whose sums are exact, and compares.
bool tiles_work() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
#endif
  constexpr int M = 19, N = 40, K = 64;
  alignas(64) bf16 x[M * K], w[2 * kPanel * K] = {}, out[M * N];
  auto number = [](int i) { return static_cast<float>(i % 7 - 3); };
  auto narrow_whole = [](float v) { uint32_t u; memcpy(&u, &v, 4); return bf16{static_cast<uint16_t>(u >> 16)}; };
  for (int i = 0; i < M * K; ++i) x[i] = narrow_whole(number(i));
  for (int n = 0; n < N; ++n)
    for (int k = 0; k < K; ++k) w[((n / 32 * (K / 32) + k / 32) * 2 + n % 32 / 16) * 512 + (k % 32 / 2 * 16 + n % 16) * 2 + k % 2] = narrow_whole(number(n * 5 + k * 3));
  packed_bf16({Dtype::bf16, x, w, nullptr, out, K, K, 0, N}, 0, M, 0, N);
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      float want = 0;
      for (int k = 0; k < K; ++k) want += number(m * K + k) * number(n * 5 + k * 3);
      if (to_float(out[m * N + n]) != to_float(narrow<bf16>(want))) return false;
    }
  return true;
}

}  // namespace isa_amx
