// write_kv and attend: tiles, threads and the split of long contexts. The arithmetic is in attention.inl.
#include <algorithm>
#include <vector>

#include "tensors.h"

namespace {

constexpr int kTileRows = 64;  // (query, head) rows of a tile: enough for every key read to serve many

struct Cache {
  Dtype dtype;
  int64_t blocks, kv_heads, dim, block_size;
  Cache(const Tensor& keys, const Tensor& values) : dtype(dtype_of(keys, "keys")) {
    int64_t P = 4 / size_of(dtype);
    STD_TORCH_CHECK(keys.dim() == 5 && values.dim() == 5 && keys.is_contiguous() && values.is_contiguous() && keys.size(4) == P, "the KV cache must have the layout of kv_layout()");
    blocks = keys.size(0), kv_heads = keys.size(1), dim = keys.size(2) * P, block_size = keys.size(3);
    STD_TORCH_CHECK(values.scalar_type() == keys.scalar_type() && values.numel() == keys.numel() && values.size(2) * P == block_size && values.size(3) == dim,
                    "the KV cache's keys and values must have the layout of kv_layout()");
  }
};

template <class T> void scatter(const Cache& c, const T* key, const T* value, T* keys, T* values, int64_t block, int64_t at, int64_t head_dim) {
  constexpr int P = per_unit<T>;
  T* k = keys + block * c.block_size * c.dim + at * P;
  T* v = values + block * c.block_size * c.dim + at / P * c.dim * P + at % P;
  for (int64_t d = 0; d < head_dim; ++d) k[d / P * c.block_size * P + d % P] = key[d];
  for (int64_t d = 0; d < head_dim; ++d) v[d * P] = value[d];
  for (int64_t d = head_dim; d < c.dim; ++d) k[d / P * c.block_size * P + d % P] = T{}, v[d * P] = T{};  // padding must be finite
}

template <class T> void write_typed(const Cache& c, const Tensor& key, const Tensor& value, const Tensor& keys, const Tensor& values, const int32_t* slots) {
  int64_t tokens = key.size(0), head_dim = key.size(2);
  const T *k = static_cast<const T*>(key.const_data_ptr()), *v = static_cast<const T*>(value.const_data_ptr());
  T *kc = static_cast<T*>(keys.mutable_data_ptr()), *vc = static_cast<T*>(values.mutable_data_ptr());
  int64_t ks = key.stride(0), kh = key.stride(1), vs = value.stride(0), vh = value.stride(1);
  // By KV head, not by token: padded tokens share a slot, and two threads must not write it at once.
  int threads = threads_for(tokens * c.kv_heads * head_dim * 4);
  pool::parallel(c.kv_heads, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h)
      for (int64_t t = 0; t < tokens; ++t)
        scatter(c, k + t * ks + h * kh, v + t * vs + h * vh, kc, vc, slots[t] / c.block_size * c.kv_heads + h, slots[t] % c.block_size, head_dim);
  });
}

void write_kv(const Tensor& keys, const Tensor& values, const Tensor& key_in, const Tensor& value_in, const Tensor& slots) {
  Cache c(keys, values);
  STD_TORCH_CHECK(key_in.dim() == 3 && key_in.size(1) == c.kv_heads && key_in.size(2) <= c.dim && value_in.numel() == key_in.numel(), "write_kv: key and value must be [num_tokens, num_kv_heads, head_dim]");
  STD_TORCH_CHECK(dtype_of(key_in, "key") == c.dtype && dtype_of(value_in, "value") == c.dtype, "write_kv: key, value and cache must have one dtype");
  Tensor key = key_in.stride(2) == 1 ? key_in : packed(key_in), value = value_in.stride(2) == 1 ? value_in : packed(value_in);
  const int32_t* at = ints(slots, "slots");
  STD_TORCH_CHECK(slots.numel() == key.size(0), "write_kv: one slot a token");
  for (int64_t t = 0; t < slots.numel(); ++t)
    STD_TORCH_CHECK(at[t] >= 0 && at[t] < c.blocks * c.block_size, "write_kv: slot ", at[t], " is outside the cache of ", c.blocks * c.block_size);
  if (c.dtype == Dtype::bf16) write_typed<bf16>(c, key, value, keys, values, at); else write_typed<float>(c, key, value, keys, values, at);
}

// ---- attend ---------------------------------------------------------------------------------------------------------

int64_t first_chunk(const AttentionArgs& a, const AttentionTile& t) {
  int64_t begin = a.window ? t.position + 1 - a.window : 0;
  return begin > 0 ? begin / kChunk : 0;
}
int64_t end_chunk(const AttentionTile& t) { return (t.position + t.queries - 1) / kChunk + 1; }

// The tiles of a region; false when some tokens belong to no row (padding), whose results must be set to 0.
bool make_tiles(const AttentionArgs& a, const int32_t* seq_lens, const int32_t* starts, int64_t rows, int64_t max_q, int64_t tokens, std::vector<AttentionTile>& tiles) {
  int64_t covered = 0;
  int queries = std::max(1, kTileRows / (a.heads / a.kv_heads));
  for (int64_t r = 0; r < rows; ++r) {
    int64_t from = max_q == 1 ? r : starts[r], count = max_q == 1 ? 1 : starts[r + 1] - starts[r];
    if (seq_lens[r] <= 0 || count <= 0) continue;
    STD_TORCH_CHECK(from >= 0 && from + count <= tokens && count <= seq_lens[r], "attend: row ", r, " has ", count, " tokens from ", from, " and a context of ", seq_lens[r], ", of ", tokens, " tokens");
    covered += count;
    for (int64_t q = 0; q < count; q += queries)
      for (int h = 0; h < a.kv_heads; ++h)
        tiles.push_back({from + q, seq_lens[r] - count + q, static_cast<int32_t>(std::min<int64_t>(queries, count - q)), static_cast<int32_t>(r), h});
  }
  return covered == tokens;
}

void check_tables(const Cache& c, const AttentionArgs& a, const std::vector<AttentionTile>& tiles, int64_t width) {
  for (const AttentionTile& t : tiles) {
    if (t.kv_head) continue;
    int64_t last = (t.position + t.queries - 1) / c.block_size;
    STD_TORCH_CHECK(last < width, "attend: row ", t.row, " reaches block ", last, " of a table of ", width);
    for (int64_t b = first_chunk(a, t) * kChunk / c.block_size; b <= last; ++b) {
      int32_t id = a.tables[t.row * a.table_width + b];
      STD_TORCH_CHECK(id >= 0 && id < c.blocks, "attend: row ", t.row, " has block ", id, " of ", c.blocks);
    }
  }
}

float* scratch_of(int64_t floats) {
  static thread_local std::vector<float> scratch;
  if (static_cast<int64_t>(scratch.size()) < floats) scratch.resize(floats);
  return scratch.data();
}

// Whole tiles, one after another.
void attend_whole(const AttentionArgs& a, const std::vector<AttentionTile>& tiles, int64_t scratch, int threads) {
  pool::parallel(tiles.size(), 1, threads, [&, k = kernels()](int64_t begin, int64_t end) {
    float* own = scratch_of(scratch);
    for (int64_t i = end - 1; i >= begin; --i) k->attend(a, tiles[i], first_chunk(a, tiles[i]), end_chunk(tiles[i]), own, nullptr);
  });
}

// Few tiles with long contexts: chunk by chunk, then merged. The same bits as whole tiles.
void attend_split(const AttentionArgs& a, const std::vector<AttentionTile>& tiles, int64_t scratch, int64_t partial, int threads) {
  struct Part { int64_t tile, chunk; };
  std::vector<Part> parts;
  std::vector<int64_t> first(tiles.size());
  for (size_t i = 0; i < tiles.size(); ++i) {
    first[i] = parts.size();
    for (int64_t c = first_chunk(a, tiles[i]); c < end_chunk(tiles[i]); ++c) parts.push_back({static_cast<int64_t>(i), c});
  }
  std::vector<float> partials(parts.size() * partial);
  const Kernels* k = kernels();
  pool::parallel(parts.size(), 1, threads, [&](int64_t begin, int64_t end) {
    float* own = scratch_of(scratch);
    for (int64_t i = begin; i < end; ++i) k->attend(a, tiles[parts[i].tile], parts[i].chunk, parts[i].chunk + 1, own, partials.data() + i * partial);
  });
  for (size_t i = 0; i < tiles.size(); ++i) {
    int64_t chunks = end_chunk(tiles[i]) - first_chunk(a, tiles[i]);
    int64_t size = attention_partial_floats(tiles[i].queries * (a.heads / a.kv_heads), a.head_dim);
    float* own = scratch_of(scratch);
    // Parts lie `partial` apart; the kernel expects them side by side.
    for (int64_t c = 1; c < chunks && size != partial; ++c) std::copy_n(partials.data() + (first[i] + c) * partial, size, partials.data() + first[i] * partial + c * size);
    k->merge(a, tiles[i], chunks, own, partials.data() + first[i] * partial);
  }
}

Tensor attend(const Tensor& query_in, const Tensor& keys, const Tensor& values, const Tensor& tables, const Tensor& seq_lens, const Tensor& starts,
              int64_t max_q, double scale, int64_t window, double softcap) {
  Cache c(keys, values);
  Tensor query = query_in.stride(2) == 1 ? query_in : packed(query_in);
  int64_t tokens = query.size(0), heads = query.size(1), head_dim = query.size(2), rows = seq_lens.numel();
  STD_TORCH_CHECK(dtype_of(query, "query") == c.dtype && padded_dim(head_dim) == c.dim && heads % c.kv_heads == 0, "attend: query [num_tokens, num_heads, head_dim] must fit the cache");
  STD_TORCH_CHECK(tables.dim() == 2 && tables.size(0) == rows && tables.scalar_type() == ScalarType::Int && tables.stride(1) == 1, "attend: block_tables must be [num_rows, num_blocks] int32");
  Tensor out = new_like(query, {tokens, heads, head_dim});
  AttentionArgs a{c.dtype, query.const_data_ptr(), keys.const_data_ptr(), values.const_data_ptr(), out.mutable_data_ptr(), query.stride(0), query.stride(1),
                  static_cast<const int32_t*>(tables.const_data_ptr()), tables.stride(0), static_cast<int>(heads), static_cast<int>(c.kv_heads), static_cast<int>(head_dim),
                  static_cast<int>(c.block_size), static_cast<float>(scale), static_cast<float>(softcap), window};
  std::vector<AttentionTile> tiles;
  if (!make_tiles(a, ints(seq_lens, "seq_lens"), ints(starts, "query_start_loc"), rows, max_q, tokens, tiles)) std::fill_n(writable(out), out.numel() * size_of(c.dtype), 0);
  check_tables(c, a, tiles, tables.size(1));
  int64_t tile_rows = std::max<int64_t>(kTileRows, heads / c.kv_heads), chunks = 0, work = 0;
  for (const AttentionTile& t : tiles) chunks += end_chunk(t) - first_chunk(a, t), work += (end_chunk(t) - first_chunk(a, t)) * t.queries;
  int threads = threads_for(std::min<int64_t>(work * kChunk * head_dim * 2, chunks > 1 || tiles.size() > 1 ? INT64_MAX : 0));
  int64_t scratch = attention_scratch_floats(tile_rows, head_dim);
  if (threads > 1 && static_cast<int64_t>(tiles.size()) < 4 * threads && chunks > static_cast<int64_t>(tiles.size())) {
    int64_t most = 0;
    for (const AttentionTile& t : tiles) most = std::max<int64_t>(most, t.queries * (heads / c.kv_heads));
    attend_split(a, tiles, scratch, attention_partial_floats(most, head_dim), threads);
  } else {
    attend_whole(a, tiles, scratch, threads);
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oarlock_cpu, m) {
  m.def("write_kv(Tensor(a!) keys, Tensor(b!) values, Tensor key, Tensor value, Tensor slots) -> ()");
  m.def("attend(Tensor query, Tensor keys, Tensor values, Tensor block_tables, Tensor seq_lens, Tensor query_start_loc, int max_q, float scale, int window, float softcap) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(oarlock_cpu, CPU, m) {
  m.impl("write_kv", TORCH_BOX(&write_kv));
  m.impl("attend", TORCH_BOX(&attend));
}
