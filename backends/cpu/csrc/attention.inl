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

constexpr int kTileRows = W == 16 ? 12 : 4;  // rows in one register block: kTileRows * 2 accumulators
constexpr int kScoreStride = kChunk + 32;    // a group past the chunk's end may be written, never read

// The parts of `scratch` and what a tile's row may see.
template <class T> struct Tile {
  const AttentionArgs& a;
  const AttentionTile& t;
  int group, rows, dim, units;  // query heads a KV head; rows; padded head size; units of a key
  float* scores;            // [rows][kScoreStride], then the weights
  float *part, *merged;     // one chunk's result and the merged one
  float* q;                 // [rows][dim]

  Tile(const AttentionArgs& args, const AttentionTile& tile, float* scratch) : a(args), t(tile) {
    group = a.heads / a.kv_heads;
    rows = t.queries * group;
    dim = static_cast<int>(padded_dim(a.head_dim));
    units = dim / per_unit<T>;
    scores = scratch;
    part = scores + rows * kScoreStride;
    merged = part + attention_partial_floats(rows, a.head_dim);
    q = merged + attention_partial_floats(rows, a.head_dim);
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

  const uint32_t* block(const void* cache, int64_t position) const {
    int64_t id = a.tables[t.row * a.table_width + position / a.block_size];
    int64_t head_units = static_cast<int64_t>(a.block_size) * units;
    return static_cast<const uint32_t*>(cache) + (id * a.kv_heads + t.kv_head) * head_units;
  }

  void load_queries() {
    const T* from = static_cast<const T*>(a.q);
    for (int r = 0; r < rows; ++r) {
      float* to = q + r * dim;
      const T* x = from + (t.token + r / group) * a.q_token + (t.kv_head * group + r % group) * a.q_head;
      for (int d = 0; d < dim; ++d) to[d] = d < a.head_dim ? to_float(x[d]) : 0.f;
    }
  }
};

// ---- scores ---------------------------------------------------------------------------------------------------------

// W tokens' keys: where the first half and the second half of the lanes are read (one load when they lie side by side).
struct Group {
  const uint32_t *low, *high;
};

template <bool Split> INLINE vi load_group(const Group& g, int64_t at) {
  return Split ? join_units(g.low + at, g.high + at) : load_units(g.low + at);
}

template <class T, int p, int MR> INLINE void score_step(const float* q, int dim, vi k0, vi k1, vf (&acc)[MR][2]) {
  vf a = part<p>(T{}, k0), b = part<p>(T{}, k1);
  for (int i = 0; i < MR; ++i) {
    vf qv = splat(q[i * dim + p]);
    acc[i][0] = fma(qv, a, acc[i][0]);
    acc[i][1] = fma(qv, b, acc[i][1]);
  }
}

template <class T, int MR, bool Split> void score_block(const float* q, int dim, const Group g[2], int64_t block_size, float* out) {
  vf acc[MR][2] = {};
  for (int d = 0; d < dim; d += per_unit<T>) {
    int64_t at = d / per_unit<T> * block_size;
    vi k0 = load_group<Split>(g[0], at), k1 = load_group<Split>(g[1], at);
    score_step<T, 0>(q + d, dim, k0, k1, acc);
    if constexpr (per_unit<T> == 2) score_step<T, 1>(q + d, dim, k0, k1, acc);
  }
  for (int i = 0; i < MR; ++i) {
    store(out + i * kScoreStride, acc[i][0]);
    store(out + i * kScoreStride + W, acc[i][1]);
  }
}

template <class T, int MR, bool Split> void score_rows(int rows, const float* q, int dim, const Group g[2], int64_t block_size, float* out) {
  if constexpr (MR > 1) {
    if (rows < MR) return score_rows<T, MR - 1, Split>(rows, q, dim, g, block_size, out);
  }
  score_block<T, MR, Split>(q, dim, g, block_size, out);
}

template <class T> INLINE Group group_at(const Tile<T>& tile, int64_t position, int64_t end) {
  int64_t bs = tile.a.block_size;
  const uint32_t* low = tile.block(tile.a.keys, position) + position % bs;
  if (bs >= W) return {low, low + W / 2};
  int64_t second = position + bs;  // a block of its own; past the end any block does, its scores are masked
  return {low, second < end ? tile.block(tile.a.keys, second) : low};
}

template <class T> void score_chunk(const Tile<T>& tile, int64_t start, int64_t first, int64_t end) {
  bool split = tile.a.block_size < W;
  int tiles = (tile.rows + kTileRows - 1) / kTileRows, step = (tile.rows + tiles - 1) / tiles;
  for (int64_t at = first; at < end; at += 2 * W) {
    Group g[2] = {group_at(tile, at, end), {}};
    g[1] = at + W < end ? group_at(tile, at + W, end) : g[0];
    for (int r = 0; r < tile.rows; r += step) {
      int n = tile.rows - r < step ? tile.rows - r : step;
      auto f = split ? score_rows<T, kTileRows, true> : score_rows<T, kTileRows, false>;
      f(n, tile.q + r * tile.dim, tile.dim, g, tile.a.block_size, tile.scores + r * kScoreStride + (at - start));
    }
  }
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
    vf p = exp(load(s + i) - shift);
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
  int count;
  bool odd;
};

template <class T, int p, int MR> INLINE void value_step(const float* w, vi v0, vi v1, vf (&acc)[MR][2]) {
  vf a = part<p>(T{}, v0), b = part<p>(T{}, v1);
  for (int i = 0; i < MR; ++i) {
    vf weight = splat(w[i * kScoreStride + p]);
    acc[i][0] = fma(weight, a, acc[i][0]);
    acc[i][1] = fma(weight, b, acc[i][1]);
  }
}

template <class T, int MR> void value_block(const float* w, const ValueBlocks& b, int64_t dim, int d0, int d1, float* out) {
  vf acc[MR][2] = {};
  for (int n = 0; n < b.count; ++n) {
    const uint32_t* v = b.base[n];
    bool odd = b.odd && n + 1 == b.count;
    int to = b.to[n] - odd;
    for (int u = b.from[n]; u < to; ++u, w += per_unit<T>) {
      vi v0 = load_units(v + u * dim + d0), v1 = load_units(v + u * dim + d1);
      value_step<T, 0>(w, v0, v1, acc);
      if constexpr (per_unit<T> == 2) value_step<T, 1>(w, v0, v1, acc);
    }
    if (odd) value_step<T, 0>(w, load_units(v + to * dim + d0), load_units(v + to * dim + d1), acc);
  }
  for (int i = 0; i < MR; ++i) {
    store(out + i * dim + d0, acc[i][0]);
    store(out + i * dim + d1, acc[i][1]);
  }
}

template <class T, int MR> void value_rows(int rows, const float* w, const ValueBlocks& b, int64_t dim, int d0, int d1, float* out) {
  if constexpr (MR > 1) {
    if (rows < MR) return value_rows<T, MR - 1>(rows, w, b, dim, d0, d1, out);
  }
  value_block<T, MR>(w, b, dim, d0, d1, out);
}

template <class T> void value_chunk(const Tile<T>& tile, int64_t start, int64_t first, int64_t end, float* out) {
  constexpr int P = per_unit<T>;
  const int64_t bs = tile.a.block_size;
  ValueBlocks b;
  b.count = 0;
  b.odd = end % P != 0;
  first -= first % P;
  for (int64_t at = first; at < end; at = (at / bs + 1) * bs) {
    int64_t stop = (at / bs + 1) * bs < end ? bs : (end - 1) % bs + 1;
    b.base[b.count] = tile.block(tile.a.values, at);
    b.from[b.count] = static_cast<int>(at % bs / P);
    b.to[b.count++] = static_cast<int>((stop + P - 1) / P);
  }
  int tiles = (tile.rows + kTileRows - 1) / kTileRows, step = (tile.rows + tiles - 1) / tiles;
  for (int r = 0; r < tile.rows; r += step) {
    int n = tile.rows - r < step ? tile.rows - r : step;
    const float* w = tile.scores + r * kScoreStride + (first - start);
    for (int d = 0; d < tile.dim; d += 2 * W) {
      int second = d + W < tile.dim ? d + W : d;
      value_rows<T, kTileRows>(n, w, b, tile.dim, d, second, out + static_cast<int64_t>(r) * tile.dim);
    }
  }
}

// ---- chunks and merging ---------------------------------------------------------------------------------------------

template <class T> void attend_chunk(const Tile<T>& tile, int64_t chunk, float* part) {
  int64_t start = chunk * kChunk, first = tile.begin(0), end = tile.end(tile.rows - 1);
  first = first > start ? first : start;
  end = end < start + kChunk ? end : start + kChunk;
  int64_t group_first = first / W * W;
  // Scores begin at a group of W, but not in a block before the first one seen: that one may have been given back.
  int64_t block_first = first / tile.a.block_size * tile.a.block_size;
  score_chunk(tile, start, group_first > block_first ? group_first : block_first, end);
  for (int r = 0; r < tile.rows; ++r) {
    weigh_row(tile.a, tile.scores + r * kScoreStride, group_first - start, end - start, tile.begin(r) - start,
              tile.end(r) - start, tile.largest_of(part) + r, tile.sum_of(part) + r);
  }
  value_chunk(tile, start, first, end, tile.values_of(part));
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

template <class T> void write_out(const Tile<T>& tile) {
  T* out = static_cast<T*>(tile.a.out);
  for (int r = 0; r < tile.rows; ++r) {
    float l = tile.sum_of(tile.merged)[r];
    vf inverse = splat(l == 0.f ? 0.f : 1.f / l);
    const float* o = tile.values_of(tile.merged) + static_cast<int64_t>(r) * tile.dim;
    T* to = out + ((tile.t.token + r / tile.group) * tile.a.heads + tile.t.kv_head * tile.group + r % tile.group) * tile.a.head_dim;
    for (int d = 0; d < tile.a.head_dim; d += W) {
      int64_t n = tile.a.head_dim - d;
      if (n >= W) store(to + d, load(o + d) * inverse); else store_some(to + d, load(o + d) * inverse, n);
    }
  }
}

template <class T> void attend_typed(const AttentionArgs& a, const AttentionTile& t, int64_t c0, int64_t c1, float* scratch, float* partial) {
  Tile<T> tile(a, t, scratch);
  tile.load_queries();
  if (partial) return attend_chunk(tile, c0, partial);
  for (int64_t c = c0; c < c1; ++c) {
    attend_chunk(tile, c, tile.part);
    merge_part(tile, c == c0, tile.part);
  }
  write_out(tile);
}

template <class T> void merge_typed(const AttentionArgs& a, const AttentionTile& t, int64_t chunks, float* scratch, const float* partials) {
  Tile<T> tile(a, t, scratch);
  for (int64_t c = 0; c < chunks; ++c) merge_part(tile, c == 0, partials + c * attention_partial_floats(tile.rows, a.head_dim));
  write_out(tile);
}

void attend(const AttentionArgs& a, const AttentionTile& t, int64_t c0, int64_t c1, float* scratch, float* partial) {
  if (a.dtype == Dtype::bf16) attend_typed<bf16>(a, t, c0, c1, scratch, partial); else attend_typed<float>(a, t, c0, c1, scratch, partial);
}
void merge(const AttentionArgs& a, const AttentionTile& t, int64_t chunks, float* scratch, const float* partials) {
  if (a.dtype == Dtype::bf16) merge_typed<bf16>(a, t, chunks, scratch, partials); else merge_typed<float>(a, t, chunks, scratch, partials);
}

}  // namespace
}  // namespace OARLOCK_ISA
