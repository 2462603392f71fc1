// Paged attention over one tile: queries of one row that share a KV head, so that each key and value is read once for all.
//
// Rows of a tile are (query, head of the group), query first. A chunk of the context is done in three passes: scores, weights
// with the chunk's own maximum, weighted values. Chunks are merged by the running maximum (FlashAttention-2, arXiv:2307.08691,
// section 3.1). Slots outside a row's context are never part of a product: scores are masked, and the second value of a pair is
// left out when it lies past the context, as such slots may hold NaN.
#include "kernels.h"
#include "vmath.h"

namespace OARLOCK_ISA {
namespace {

// A register block holds MR rows times NV vectors of sums.
constexpr int kBlockRows = W == 16 ? 12 : 4, NV = 2;
constexpr int kScoreStride = kChunk + 32;  // groups past the chunk's end may be written, never read

// n numbers, a multiple of 16, of 8 bits each to the bfloat16 that `table` says.
inline void expand_bytes(const uint16_t* table, const uint8_t* from, uint16_t* to, int64_t n) {
#if OARLOCK_LANES == 16
  // Half the table is enough, the other half has the sign set: two look-ups of 64 numbers.
  const __m512i t0 = _mm512_loadu_si512(table), t1 = _mm512_loadu_si512(table + 32), t2 = _mm512_loadu_si512(table + 64), t3 = _mm512_loadu_si512(table + 96);
  for (int64_t i = 0; i + 32 <= n; i += 32) {
    __m512i b = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
    __m512i low = _mm512_permutex2var_epi16(t0, b, t1), high = _mm512_permutex2var_epi16(t2, b, t3);
    __m512i v = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(b, _mm512_set1_epi16(64)), low, high);
    _mm512_storeu_si512(to + i, _mm512_or_si512(v, _mm512_slli_epi16(_mm512_and_si512(b, _mm512_set1_epi16(128)), 8)));
  }
  for (int64_t i = n / 32 * 32; i < n; ++i) to[i] = table[from[i]];
#else
  for (int64_t i = 0; i < n; ++i) to[i] = table[from[i]];
#endif
}

// The parts of `scratch` and what a tile's row may see.
template <class T> struct Tile {
  const AttentionArgs& a;
  const AttentionTile& t;
  int group, rows, dim, units;  // query heads a KV head; rows; padded head size; units of a key
  float* scores;            // [rows][kScoreStride], then the weights
  float *part, *merged;     // one chunk's result and the merged one
  float* q;                 // [rows][dim]
  uint32_t* expanded;       // keys, then values of a chunk whose bytes became T
  int64_t expanded_from = 0;  // its first block

  Tile(const AttentionArgs& args, const AttentionTile& tile, float* scratch) : a(args), t(tile) {
    group = a.heads / a.kv_heads;
    rows = t.queries * group;
    dim = static_cast<int>(padded_dim(a.head_dim));
    units = dim / per_unit<T>;
    expanded = reinterpret_cast<uint32_t*>(scratch);
    scores = scratch + (a.bytes_as ? 2 * attention_expanded_floats(a.block_size, a.head_dim) : 0);
    part = scores + rows * kScoreStride;
    merged = part + attention_partial_floats(rows, a.head_dim);
    q = merged + attention_partial_floats(rows, a.head_dim);
  }

  // Rows of a register block: as even as can be.
  int block_rows() const {
    int count = (rows + kBlockRows - 1) / kBlockRows;
    return (rows + count - 1) / count;
  }
  int64_t end(int row) const { return t.position + row / group + 1; }
  int64_t begin(int row) const {
    int64_t b = a.window ? end(row) - a.window : 0;
    return b > 0 ? b : 0;
  }
  // [part of a row]: largest score, sum of weights, weighted values.
  float* largest_of(float* p) const { return p; }
  float* sum_of(float* p) const { return p + rows; }
  float* values_of(float* p) const { return p + 2 * rows; }

  int64_t head_units() const { return static_cast<int64_t>(a.block_size) * units; }
  int64_t head_of(int64_t block) const { return head_of(t, block); }
  int64_t head_of(const AttentionTile& of, int64_t block) const { return a.tables[of.row * a.table_width + block] * static_cast<int64_t>(a.kv_heads) + of.kv_head; }
  const uint32_t* block(const void* cache, int64_t position) const {
    if (!a.bytes_as) return static_cast<const uint32_t*>(cache) + head_of(position / a.block_size) * head_units();
    int64_t values_from = cache == a.values ? attention_expanded_floats(a.block_size, a.head_dim) : 0;
    return expanded + values_from + (position / a.block_size - expanded_from) * head_units();
  }

  // Bytes of the blocks from `first` to `end` become T.
  void expand(int64_t first, int64_t end) {
    expanded_from = first / a.block_size;
    for (int64_t b = expanded_from; b * a.block_size < end; ++b)
      for (int i = 0; i < 2; ++i) {
        const void* cache = i ? a.values : a.keys;
        const uint8_t* from = static_cast<const uint8_t*>(cache) + head_of(b) * head_units() * per_unit<T>;
        expand_bytes(a.bytes_as, from, reinterpret_cast<uint16_t*>(const_cast<uint32_t*>(block(cache, b * a.block_size))), head_units() * per_unit<T>);
      }
  }

  void load_queries() {
    if (a.dtype == Dtype::bf16) queries_of<bf16>(); else queries_of<float>();
  }
  template <class Q> void queries_of() {
    const Q* from = static_cast<const Q*>(a.q);
    for (int r = 0; r < rows; ++r) {
      float* to = q + r * dim;
      const Q* x = from + (t.token + r / group) * a.q_token + (t.kv_head * group + r % group) * a.q_head;
      for (int d = 0; d < dim; ++d) to[d] = d < a.head_dim ? to_float(x[d]) : 0.f;
    }
  }
};

// ---- scores ---------------------------------------------------------------------------------------------------------

// W tokens' keys: where the first half and the second half of the lanes are read (one load when they lie side by side), and
// what to ask memory for meanwhile: the next keys of this register block, and the values of these tokens.
struct Group {
  const uint32_t *low, *high, *next_keys, *values;
};

template <class T, int p, int MR> INLINE void multiply(const float* x, int64_t ldx, const vi (&units)[NV], vf (&acc)[MR][NV]) {
  vf numbers[NV];
  for (int j = 0; j < NV; ++j) numbers[j] = part<p>(T{}, units[j]);
  for (int i = 0; i < MR; ++i) {
    vf xv = splat(x[i * ldx + p]);
    for (int j = 0; j < NV; ++j) acc[i][j] = fma(xv, numbers[j], acc[i][j]);
  }
}

template <class T, int MR, bool Split> void score_block(const float* q, int dim, const Group (&g)[NV], bool ahead, int64_t block_size, float* out) {
  vf acc[MR][NV] = {};
  for (int d = 0; d < dim; d += per_unit<T>) {
    int64_t unit = d / per_unit<T>, at = unit * block_size;
    vi keys[NV];
    for (int j = 0; j < NV; ++j) {
      if (ahead) {
        __builtin_prefetch(g[j].next_keys + at);
        __builtin_prefetch(g[j].values + unit * W);
      }
      keys[j] = Split ? join_units(g[j].low + at, g[j].high + at) : load_units(g[j].low + at);
    }
    multiply<T, 0>(q + d, dim, keys, acc);
    if constexpr (per_unit<T> == 2) multiply<T, 1>(q + d, dim, keys, acc);
  }
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < NV; ++j) store(out + i * kScoreStride + j * W, acc[i][j]);
}

template <class T, int MR, bool Split>
void score_rows(int rows, const float* q, int dim, const Group (&g)[NV], bool ahead, int64_t block_size, float* out) {
  if constexpr (MR > 1) {
    if (rows < MR) return score_rows<T, MR - 1, Split>(rows, q, dim, g, ahead, block_size, out);
  }
  score_block<T, MR, Split>(q, dim, g, ahead, block_size, out);
}

// The keys of tokens [position, position + W); past `end` any block does, as those scores are masked.
template <class T> INLINE void set_keys(const Tile<T>& tile, int64_t position, int64_t end, Group* g) {
  int64_t bs = tile.a.block_size, second = position + bs;
  g->low = tile.block(tile.a.keys, position) + position % bs;
  g->high = bs >= W ? g->low + W / 2 : second < end ? tile.block(tile.a.keys, second) : g->low;
}

template <class T, bool Split> void score_chunk_as(const Tile<T>& tile, int64_t start, int64_t first, int64_t end) {
  int step = tile.block_rows();
  int64_t bs = tile.a.block_size, last = tile.end(tile.rows - 1);
  for (int64_t at = first; at < end; at += NV * W) {
    Group g[NV];
    for (int j = 0; j < NV; ++j) {
      int64_t here = at + j * W < end ? at + j * W : at, next = here + NV * W < (tile.a.bytes_as ? end : last) ? here + NV * W : here;
      set_keys(tile, here, end, &g[j]);
      g[j].next_keys = tile.block(tile.a.keys, next) + next % bs;
      g[j].values = tile.block(tile.a.values, here) + here % bs / per_unit<T> * tile.dim;
    }
    for (int r = 0; r < tile.rows; r += step) {
      int n = tile.rows - r < step ? tile.rows - r : step;
      score_rows<T, kBlockRows, Split>(n, tile.q + r * tile.dim, tile.dim, g, r == 0, bs, tile.scores + r * kScoreStride + (at - start));
    }
  }
}

template <class T> void score_chunk(const Tile<T>& tile, int64_t start, int64_t first, int64_t end) {
  auto f = tile.a.block_size < W ? score_chunk_as<T, true> : score_chunk_as<T, false>;
  f(tile, start, first, end);
}

// ---- weights --------------------------------------------------------------------------------------------------------

// Scores [first, end) of a row become exp(score - largest), 0 outside [lo, hi). All are offsets in the chunk; first is a multiple of W.
inline void weigh_row(const AttentionArgs& a, float* s, int64_t first, int64_t end, int64_t lo, int64_t hi, float* largest_out, float* sum_out) {
  const vi lanes = lane_numbers();
  const vf masked = splat(-INFINITY), scale = splat(a.scale), cap = splat(a.softcap);
  vf top = masked, total = {};
  for (int64_t i = first; i < end; i += W) {
    vf v = load(s + i) * scale;
    if (a.softcap != 0.f) v = cap * tanh(v / cap);
    if (i < lo || i + W > hi) {
      vi at = lanes + static_cast<int32_t>(i);
      v = select((at >= static_cast<int32_t>(lo)) & (at < static_cast<int32_t>(hi)), v, masked);
    }
    store(s + i, v);
    top = max(top, v);
  }
  float best = largest(top);
  vf shift = splat(best == -INFINITY ? 0.f : best);
  for (int64_t i = first; i < end; i += W) {
    vf p = exp_below_one(load(s + i) - shift);
    total = total + p;
    store(s + i, p);
  }
  *largest_out = best;
  *sum_out = sum(total);
}

// ---- values ---------------------------------------------------------------------------------------------------------

// Blocks of a chunk whose values are summed: units [from, to) of each. `odd`: the last unit's second token is past the context.
struct ValueBlocks {
  const uint32_t* base[kChunk / 8 + 1];
  int from[kChunk / 8 + 1], to[kChunk / 8 + 1];
  // As many bytes of the next chunk's keys, asked for meanwhile: few rows wait for memory, which would idle else.
  const uint32_t* ask[kChunk / 8 + 1];
  int count;
  bool odd;
};

// NV vectors of the head from d on; vectors past its end are another's copy and not stored.
// PERF: with heads of 128, 12 over 2, Ask brings 32 rows with contexts of 512 from 15.3 to 14.1 ms, and one of 8,192 from 19.2 to 17.1 (300 MB, two
// cores of a 4th generation Xeon); with heads of 64, 9 over 3, it changes less than the machine does.
template <class T, int MR, bool Ask> void value_block(const float* w, const ValueBlocks& b, int64_t dim, int d, float* out) {
  vf acc[MR][NV] = {};
  int64_t at[NV];
  for (int j = 0; j < NV; ++j) at[j] = d + j * W < dim ? d + j * W : d;
  for (int n = 0; n < b.count; ++n) {
    bool odd = b.odd && n + 1 == b.count;
    const uint32_t *v = b.base[n] + b.from[n] * dim, *stop = b.base[n] + (b.to[n] - odd) * dim;
    int64_t ask = b.ask[n] - b.base[n];
    vi values[NV];
    for (; v < stop; v += dim, w += per_unit<T>) {
      for (int j = 0; j < NV; ++j) {
        if (Ask) __builtin_prefetch(v + at[j] + ask, 0, 2);
        values[j] = load_units(v + at[j]);
      }
      multiply<T, 0>(w, kScoreStride, values, acc);
      if constexpr (per_unit<T> == 2) multiply<T, 1>(w, kScoreStride, values, acc);
    }
    if (!odd) continue;
    for (int j = 0; j < NV; ++j) values[j] = load_units(v + at[j]);
    multiply<T, 0>(w, kScoreStride, values, acc);
  }
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < NV; ++j)
      if (d + j * W < dim) store(out + i * dim + d + j * W, acc[i][j]);
}

template <class T, int MR> void value_rows(int rows, bool ask, const float* w, const ValueBlocks& b, int64_t dim, int d, float* out) {
  if constexpr (MR > 1) {
    if (rows < MR) return value_rows<T, MR - 1>(rows, ask, w, b, dim, d, out);
  }
  if (ask) value_block<T, MR, true>(w, b, dim, d, out); else value_block<T, MR, false>(w, b, dim, d, out);
}

template <class T> void value_chunk(const Tile<T>& tile, int64_t start, int64_t first, int64_t end, AttentionPart next, float* out) {
  constexpr int P = per_unit<T>;
  const int64_t bs = tile.a.block_size;
  ValueBlocks b;
  b.count = 0;
  b.odd = end % P != 0;
  bool asks = next.tile && !tile.a.bytes_as && tile.rows <= kBlockRows;
  int64_t next_block = next.chunk * kChunk / bs, next_end = asks ? (next.tile->position + next.tile->queries - 1) / bs : 0;
  first -= first % P;
  for (int64_t at = first; at < end; at = (at / bs + 1) * bs) {
    int64_t stop = (at / bs + 1) * bs < end ? bs : (end - 1) % bs + 1;
    b.base[b.count] = tile.block(tile.a.values, at);
    b.from[b.count] = static_cast<int>(at % bs / P);
    if (asks) b.ask[b.count] = static_cast<const uint32_t*>(tile.a.keys) + tile.head_of(*next.tile, next_block < next_end ? next_block++ : next_end) * tile.head_units();
    b.to[b.count++] = static_cast<int>((stop + P - 1) / P);
  }
  int step = tile.block_rows();
  for (int r = 0; r < tile.rows; r += step) {
    int n = tile.rows - r < step ? tile.rows - r : step;
    const float* w = tile.scores + r * kScoreStride + (first - start);
    for (int d = 0; d < tile.dim; d += NV * W) value_rows<T, kBlockRows>(n, asks, w, b, tile.dim, d, out + static_cast<int64_t>(r) * tile.dim);
  }
}

// ---- chunks and merging ---------------------------------------------------------------------------------------------

template <class T> void attend_chunk(Tile<T>& tile, int64_t chunk, AttentionPart next, float* part) {
  int64_t start = chunk * kChunk, first = tile.begin(0), end = tile.end(tile.rows - 1);
  first = first > start ? first : start;
  end = end < start + kChunk ? end : start + kChunk;
  int64_t group_first = first / W * W;
  // Scores begin at a group of W, but not in a block before the first one seen: that one may have been given back.
  int64_t block_first = first / tile.a.block_size * tile.a.block_size;
  if (tile.a.bytes_as) tile.expand(block_first, end);
  score_chunk(tile, start, group_first > block_first ? group_first : block_first, end);
  for (int r = 0; r < tile.rows; ++r) {
    weigh_row(tile.a, tile.scores + r * kScoreStride, group_first - start, end - start, tile.begin(r) - start,
              tile.end(r) - start, tile.largest_of(part) + r, tile.sum_of(part) + r);
  }
  value_chunk(tile, start, first, end, next, tile.values_of(part));
}

// merged += part, both with their own largest scores.
template <class T> void merge_part(const Tile<T>& tile, bool is_first, const float* from) {
  float *to = tile.merged, *part = const_cast<float*>(from);
  if (is_first) {
    memcpy(to, part, attention_partial_floats(tile.rows, tile.a.head_dim) * sizeof(float));
    return;
  }
  for (int r = 0; r < tile.rows; ++r) {
    float *m = tile.largest_of(to) + r, *l = tile.sum_of(to) + r, *o = tile.values_of(to) + static_cast<int64_t>(r) * tile.dim;
    float pm = tile.largest_of(part)[r], pl = tile.sum_of(part)[r];
    const float* po = tile.values_of(part) + static_cast<int64_t>(r) * tile.dim;
    if (pm == -INFINITY) continue;  // this row sees nothing of the chunk
    if (*m == -INFINITY) {
      *m = pm, *l = pl;
      memcpy(o, po, tile.dim * sizeof(float));
      continue;
    }
    float best = pm > *m ? pm : *m;
    float pair[W] = {*m - best, pm - best};
    store(pair, exp(load(pair)));
    vf keep = splat(pair[0]), add = splat(pair[1]);
    *l = *l * pair[0] + pl * pair[1];
    *m = best;
    for (int d = 0; d < tile.dim; d += W) store(o + d, fma(load(po + d), add, load(o + d) * keep));
  }
}

template <class Q, class T> void write_out_as(const Tile<T>& tile) {
  Q* out = static_cast<Q*>(tile.a.out);
  for (int r = 0; r < tile.rows; ++r) {
    float l = tile.sum_of(tile.merged)[r];
    vf inverse = splat(l == 0.f ? 0.f : 1.f / l);
    const float* o = tile.values_of(tile.merged) + static_cast<int64_t>(r) * tile.dim;
    Q* to = out + ((tile.t.token + r / tile.group) * tile.a.heads + tile.t.kv_head * tile.group + r % tile.group) * tile.a.head_dim;
    for (int d = 0; d < tile.a.head_dim; d += W) {
      int64_t n = tile.a.head_dim - d;
      if (n >= W) store(to + d, load(o + d) * inverse); else store_some(to + d, load(o + d) * inverse, n);
    }
  }
}

template <class T> void write_out(const Tile<T>& tile) {
  if (tile.a.dtype == Dtype::bf16) write_out_as<bf16>(tile); else write_out_as<float>(tile);
}

template <class T> void attend_typed(const AttentionArgs& a, const AttentionTile& t, int64_t c0, int64_t c1, float* scratch, float* partial, AttentionPart next) {
  Tile<T> tile(a, t, scratch);
  tile.load_queries();
  if (partial) return attend_chunk(tile, c0, next, partial);
  for (int64_t c = c0; c < c1; ++c) {
    attend_chunk(tile, c, c + 1 < c1 ? AttentionPart{&t, c + 1} : next, tile.part);
    merge_part(tile, c == c0, tile.part);
  }
  write_out(tile);
}

template <class T> void merge_typed(const AttentionArgs& a, const AttentionTile& t, int64_t chunks, float* scratch, const float* partials) {
  Tile<T> tile(a, t, scratch);
  for (int64_t c = 0; c < chunks; ++c) merge_part(tile, c == 0, partials + c * attention_partial_floats(tile.rows, a.head_dim));
  write_out(tile);
}

void attend(const AttentionArgs& a, const AttentionTile& t, int64_t c0, int64_t c1, float* scratch, float* partial, AttentionPart next) {
  if (a.cache_dtype == Dtype::bf16) attend_typed<bf16>(a, t, c0, c1, scratch, partial, next); else attend_typed<float>(a, t, c0, c1, scratch, partial, next);
}
void merge(const AttentionArgs& a, const AttentionTile& t, int64_t chunks, float* scratch, const float* partials) {
  if (a.cache_dtype == Dtype::bf16) merge_typed<bf16>(a, t, chunks, scratch, partials); else merge_typed<float>(a, t, chunks, scratch, partials);
}

}  // namespace
}  // namespace OARLOCK_ISA
