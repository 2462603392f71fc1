// The kernels of one instruction set as a table of functions, chosen once at run time. Kernels are serial: the callers in
// ops_*.cpp cut the work into items and spread them over the team.
//
// Legend: x, w, out are rows of `dtype`; ld* are row strides in elements; K is the length that a product sums over.
#pragma once
#include <cstdint>

#include "bf16.h"

// Whether this compiler knows the instructions of isa_fp16.cpp.
#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 12)
#define OARLOCK_FP16
#endif

// out[m][n] = sum_k x[m][k] * w[n][k] + bias[n], for m in [m0, m1), n in [n0, n1).
// `plain`: w is row-major [N][K], x of `dtype`; sums run along K in vectors.
// `packed`: w is as pack_weight leaves it; x has K rounded up to packed_step(), with zeros there, and with bfloat16 weights the form of
// rows that the table names. Sums run along K one by one.
// Each has one order of summation, whatever m0 and m1 are: a row's bits do not depend on the other rows.
enum class Rows {
  f32_tiles,   // float32 in tiles of `tile` rows, each [K][tile], zeros where the rows were rounded up: one step along K reads neighbours
  bf16,        // bfloat16 rows
  half_tiles,  // tiles of binary16 numbers, two of a row a unit, [K / 2][tile] and kHalfTileGap units, each row times a power of two
  byte_tiles,  // tiles of codes of 8 bits, for byte_codes alone: [K / 32][kByteBlock][tile] units (isa_vnni.cpp)
};
constexpr int64_t kHalfTileGap = 16;
constexpr int64_t kByteBlock = 11;  // units of a row's 32 columns
struct ByteRows {
  int bits;       // of the weights, whose order of columns they take
  bool is_whole;  // they are whole numbers of 8 bits, and stay as they are
};
enum class Act { relu, gelu, gelu_tanh, silu };
struct LinearArgs {
  Dtype dtype;               // of w and bias
  const void *x, *w, *bias;  // bias may be null
  void* out;
  int64_t K, ldx, ldw, ldo;  // ldx: not with tiles; ldw: plain only
  bool out_f32;              // out is float32 whatever `dtype` is: the sums are not rounded
  int64_t tile = 0;          // rows of a tile, of `packed` alone: m0 is a multiple
  ByteRows bytes = {};       // with byte tiles
  const float* row_exponents = nullptr;  // [rows], with half tiles: each row's sums are to be multiplied by 2 to this
  // Not 0, with half tiles and no bias: n counts outputs of the first half of w, and each becomes act(itself) times the output `gate` after it,
  // both rounded to bfloat16 before, as two operations would.
  int64_t gate = 0;
  Act act = Act::silu;
};

// Packed weights, P numbers a unit: [N / 32][K / (16 P)][2][16 units of K][16 outputs], zeros where N or K were rounded up.
// Each of the 2 tiles is 16 units deep and 16 outputs wide: one vector of 16 lanes a unit, which is also the order of an AMX tile.
// For half tiles the numbers are binary16, each output times a power of two, and a panel ends with 32 float32: exponents that undo those.
constexpr int64_t kPanel = 32;       // outputs of a panel
constexpr int64_t kTileUnits = 256;  // of one tile
constexpr int64_t packed_step(Dtype d) { return d == Dtype::bf16 ? 32 : 16; }  // K is rounded up to it

// Weights of 4 or 8 bits: w[n][k] = fma(code, scale, offset) in float32, of the output's scale and offset in the group of column k; where
// there are no offsets, -zero * scale. Many rows multiply that number in float32 (in bfloat16, rounded to nearest even, where x has
// Rows::bf16), few rows the same number in the same order: so the bits of a row do not depend on how many there are.
//   panels  [N / 32], each 4 bits: [width / 8][32 outputs] of 32 bits, 8 codes 0 .. 15 of one output: columns 0, 2, 4, 6, 1, 3, 5, 7, the lowest bits first
//                          8 bits: [width / 4][32 outputs][4 columns] of int8
//   scales, offsets  [N / 32][groups][32] of float32 or binary16
// With half tiles that number is rounded to binary16 (isa_fp16.cpp), times 2 to the output's entry in `exponents` [N / 32][32], and a panel is
// multiplied as a dense one of half tiles: by few rows as it is decoded, by more after half_unpack.
// Where the table has byte_codes, rows of bfloat16 are rounded to 8 bits for weights whose groups are whole blocks of 32 columns (isa_vnni.cpp),
// however many rows there are.
// Columns were put in order of their groups, each group rounded up to 8 columns and the last to 32 with x = 0 there.
struct CodesArgs {
  int bits;
  const void *panels, *scales, *offsets;  // offsets may be null
  bool is_half;                           // scales and offsets are binary16
  const int32_t* ends;                    // [groups]: one past the last column of each
  const float* exponents;                    // null where only rows are read
  int64_t groups, width;
  float zero;
  bool is_by_32;  // each group is a multiple of 32 columns
};

// Cache layout of one layer, in units of 32 bits (see bf16.h), D the head size rounded up to 16, P elements a unit:
//   keys    [num_blocks][kv_heads][D / P][block_size]   tokens side by side: one load gives 16 tokens' unit d
//   values  [num_blocks][kv_heads][block_size / P][D]   with P = 2, a unit holds two tokens' number d
// A cache of 8-bit floats has the order of bfloat16's, a byte a number, and becomes that a chunk at a time.
struct AttentionArgs {
  Dtype dtype;                  // of q and out
  Dtype cache_dtype;            // of keys and values, or what their bytes become
  const uint16_t* bytes_as;     // [256], the bfloat16 of each byte; null: the cache is of `cache_dtype`
  const void *q, *keys, *values;
  void* out;                    // [tokens][heads][head_dim], contiguous
  int64_t q_token, q_head;      // strides of q in elements
  const int32_t* tables;        // [rows][table_width]
  int64_t table_width;
  int heads, kv_heads, head_dim, block_size;
  float scale, softcap;         // softcap 0: none
  int64_t window;               // 0: none
};

// Consecutive queries of one row that share one KV head.
struct AttentionTile {
  int64_t token;     // first query, in q
  int64_t position;  // its position in the row's context
  int32_t queries, row, kv_head;
};

// A chunk of a tile; as what comes next, its keys may be asked for early, and a null tile is unknown.
struct AttentionPart {
  const AttentionTile* tile;
  int64_t chunk;
};

// Contexts are cut at multiples of kChunk, whatever is computed with what, and the parts are merged in order: so the bits of
// a query's result depend neither on the batch nor on how its prompt was cut nor on the number of threads.
constexpr int kChunk = 256;

struct Kernels {
  const char* name;
  void (*plain)(const LinearArgs&, int64_t m0, int64_t m1, int64_t n0, int64_t n1);
  // n0 a multiple of kPanel; next: what this thread is to read after these weights and may ask for early, null: unknown.
  void (*packed)(const LinearArgs&, int64_t m0, int64_t m1, int64_t n0, int64_t n1, const void* next);
  Rows bf16_form;  // of x, for `packed` with bfloat16 weights
  int tile_rows;  // most rows of a tile
  // One tile: `rows` <= tile rows of K numbers, to [width][tile] float32.
  void (*pack_rows)(Dtype, const void* x, int64_t ldx, int64_t rows, int64_t tile, int64_t K, int64_t width, float* out);
  // With half tiles; else null. A panel of row-major w, or of codes; one tile of x; the product of at most a tile of rows with codes.
  void (*pack_half_panel)(const bf16* w, int64_t ldw, int64_t outputs, int64_t K, uint16_t* to);
  void (*half_unpack)(const CodesArgs&, int64_t panel, uint16_t* to);
  void (*pack_half_rows)(const bf16* x, int64_t ldx, int64_t rows, int64_t tile, int64_t K, int64_t width, uint32_t* out, float* row_exponents);
  void (*half_codes)(const CodesArgs&, const LinearArgs&, int64_t n0, int64_t n1);  // n0 a multiple of kPanel
  // Where there are products of whole numbers; else null. One tile of x, and rows [m0, m1) of tiles times codes; n0 and next as of `packed`.
  void (*pack_byte_rows)(const ByteRows&, const bf16* x, int64_t ldx, int64_t rows, int64_t tile, int64_t K, int64_t width, uint32_t* out);
  void (*byte_codes)(const CodesArgs&, const LinearArgs&, int64_t m0, int64_t m1, int64_t n0, int64_t n1, const void* next);
  int few_rows;   // most rows that `codes` takes
  void (*codes)(const CodesArgs&, const LinearArgs&, int64_t n0, int64_t n1);        // all rows of x, one tile; n0 a multiple of kPanel
  void (*unpack)(const CodesArgs&, int64_t panel, bool to_bf16, void* out);          // one panel as pack_weight leaves it
  void (*store_numbers)(const LinearArgs&, const float* sums, int64_t m, int64_t n, int64_t count);  // with the bias, rounded once
  void (*widen)(Dtype, const void* x, float* out, int64_t n, int64_t width);  // n numbers to float32, then zeros up to width

  // Chunks [c0, c1) of a tile's context. partial null: writes the result to out (c0, c1 must be all of the tile's chunks).
  // Else c1 == c0 + 1 and the chunk's part is left in `partial`, attention_partial_floats long. `next`: what this thread does after it.
  void (*attend)(const AttentionArgs&, const AttentionTile&, int64_t c0, int64_t c1, float* scratch, float* partial, AttentionPart next);
  void (*merge)(const AttentionArgs&, const AttentionTile&, int64_t chunks, float* scratch, const float* partials);

  // Rows of H numbers. residual and total (float32) may be null; with them, total = x + residual is normed.
  void (*rms_norm)(Dtype, Dtype weight_dtype, const void* x, const float* residual, const void* w, void* out, float* total, int64_t H, float eps);
  void (*layer_norm)(Dtype, Dtype weight_dtype, const void* x, const void* w, const void* bias, void* out, int64_t H, float eps);
  // One head: `half` pairs rotated by cos[half], sin[half], then `rest` numbers copied.
  void (*rotary)(Dtype, const void* x, void* out, const float* table, int64_t half, int64_t rest, bool interleaved);
  void (*activation)(Dtype, Act, const void* x, const void* times, void* out, int64_t n);  // times null: none
  void (*combine)(Dtype, const void* const* rows, const float* weights, int64_t k, void* out, int64_t n);  // out = sum of weights[j] * rows[j]

  void (*argmax)(const float* x, int64_t n, float* value, int64_t* at);        // the first of equals; NaN counts as the largest
  void (*gumbel)(const float* logits, int64_t n, float temperature, const uint32_t key[2], uint32_t position, float* noisy);
  double (*sum_exp)(const float* x, int64_t n, float shift, float scale);       // sum of exp((x - shift) / scale)
  int64_t (*at_least)(const float* x, int64_t n, float bound, int32_t* ids);    // ids of x >= bound, ascending; returns how many
};

constexpr int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
constexpr int64_t attention_partial_floats(int64_t rows, int64_t head_dim) { return rows * (padded_dim(head_dim) + 2); }
// Of a chunk whose bytes become bfloat16: floats for its keys, and as many for its values. It may begin and end within a block.
constexpr int64_t attention_expanded_floats(int64_t block_size, int64_t head_dim) { return (kChunk + 2 * block_size) * padded_dim(head_dim) / 2; }
// Scores and weights of a chunk, this chunk's part, the merged one, and the queries: floats for one thread.
constexpr int64_t attention_scratch_floats(int64_t rows, int64_t head_dim) {
  return rows * (kChunk + 32) + 2 * attention_partial_floats(rows, head_dim) + rows * padded_dim(head_dim) + 64;
}

const Kernels* kernels();                // of this processor
bool use_kernels(const char* name);      // for tests: false when the processor lacks them
