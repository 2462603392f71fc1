// write_kv and attend: tiles, threads and the split of long contexts. The arithmetic is in attention.inl.
#include <algorithm>
#include <vector>

#include "stages.h"

namespace {

constexpr int kTileRows = 64;  // (query, head) rows of a tile: enough for every key read to serve many

template <class T> void scatter(const Cache& c, const T* key, const T* value, T* keys, T* values, int64_t block, int64_t at, int64_t head_dim) {
  constexpr int P = per_unit<T>;
  T* k = keys + block * c.block_size * c.dim + at * P;
  T* v = values + block * c.block_size * c.dim + at / P * c.dim * P + at % P;
  for (int64_t d = 0; d < head_dim; ++d) k[d / P * c.block_size * P + d % P] = key[d];
  for (int64_t d = 0; d < head_dim; ++d) v[d * P] = value[d];
  for (int64_t d = head_dim; d < c.dim; ++d) k[d / P * c.block_size * P + d % P] = T{}, v[d * P] = T{};  // padding must be finite
}

template <class T> void write_typed(const Cache& c, const KVRows& r, const int32_t* slots) {
  const T *k = static_cast<const T*>(r.key), *v = static_cast<const T*>(r.value);
  T *keys = static_cast<T*>(c.keys->mutable_data_ptr()), *values = static_cast<T*>(c.values->mutable_data_ptr());
  // By KV head, not by token: padded tokens share a slot, and two threads must not write it at once.
  int threads = threads_for(r.tokens * c.kv_heads * r.head_dim * 4);
  pool::parallel(c.kv_heads, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h)
      for (int64_t t = 0; t < r.tokens; ++t) {
        int64_t block = slots[t] / c.block_size * c.kv_heads + h;
        scatter(c, k + t * r.key_token + h * r.key_head, v + t * r.value_token + h * r.value_head, keys, values, block, slots[t] % c.block_size, r.head_dim);
      }
  });
}

void write_kv(const Tensor& keys, const Tensor& values, const Tensor& key_in, const Tensor& value_in, const Tensor& slots) {
  Cache c(keys, values);
  STD_TORCH_CHECK(key_in.dim() == 3 && key_in.size(1) == c.kv_heads && key_in.size(2) <= c.dim && value_in.numel() == key_in.numel(), "write_kv: key and value must be [num_tokens, num_kv_heads, head_dim]");
  STD_TORCH_CHECK(dtype_of(key_in, "key") == c.dtype && dtype_of(value_in, "value") == c.dtype, "write_kv: key, value and cache must have one dtype");
  Tensor key = key_in.stride(2) == 1 ? key_in : packed(key_in), value = value_in.stride(2) == 1 ? value_in : packed(value_in);
  check_slots(c, slots, key.size(0));
  write_rows(c, {key.const_data_ptr(), value.const_data_ptr(), key.size(0), key.size(2), key.stride(0), key.stride(1), value.stride(0), value.stride(1)}, ints(slots, "slots"));
}

// ---- attend ---------------------------------------------------------------------------------------------------------

int64_t first_chunk(int64_t window, const AttentionTile& t) {
  int64_t begin = window ? t.position + 1 - window : 0;
  return begin > 0 ? begin / kChunk : 0;
}
int64_t end_chunk(const AttentionTile& t) { return (t.position + t.queries - 1) / kChunk + 1; }

// The tiles of a region; false when some tokens belong to no row (padding), whose results must be set to 0.
bool make_tiles(int64_t heads, int64_t kv_heads, const int32_t* seq_lens, const int32_t* starts, int64_t rows, int64_t max_q, int64_t tokens, std::vector<AttentionTile>& tiles) {
  int64_t covered = 0;
  int queries = std::max(1, kTileRows / static_cast<int>(heads / kv_heads));
  for (int64_t r = 0; r < rows; ++r) {
    int64_t from = max_q == 1 ? r : starts[r], count = max_q == 1 ? 1 : starts[r + 1] - starts[r];
    if (seq_lens[r] <= 0 || count <= 0) continue;
    STD_TORCH_CHECK(from >= 0 && from + count <= tokens && count <= seq_lens[r], "attend: row ", r, " has ", count, " tokens from ", from, " and a context of ", seq_lens[r], ", of ", tokens, " tokens");
    covered += count;
    for (int64_t q = 0; q < count; q += queries)
      for (int h = 0; h < kv_heads; ++h)
        tiles.push_back({from + q, seq_lens[r] - count + q, static_cast<int32_t>(std::min<int64_t>(queries, count - q)), static_cast<int32_t>(r), h});
  }
  return covered == tokens;
}

void check_tables(const Cache& c, const int32_t* tables, int64_t stride, int64_t window, const std::vector<AttentionTile>& tiles, int64_t width) {
  for (const AttentionTile& t : tiles) {
    if (t.kv_head) continue;
    int64_t last = (t.position + t.queries - 1) / c.block_size;
    STD_TORCH_CHECK(last < width, "attend: row ", t.row, " reaches block ", last, " of a table of ", width);
    for (int64_t b = first_chunk(window, t) * kChunk / c.block_size; b <= last; ++b) {
      int32_t id = tables[t.row * stride + b];
      STD_TORCH_CHECK(id >= 0 && id < c.blocks, "attend: row ", t.row, " has block ", id, " of ", c.blocks);
    }
  }
}

float* scratch_of(int64_t floats) {
  static thread_local std::vector<float> scratch;
  if (static_cast<int64_t>(scratch.size()) < floats) scratch.resize(floats);
  return scratch.data();
}

Tensor attend(const Tensor& query_in, const Tensor& keys, const Tensor& values, const Tensor& tables, const Tensor& seq_lens, const Tensor& starts,
              int64_t max_q, double scale, int64_t window, double softcap) {
  Cache c(keys, values);
  Tensor query = query_in.stride(2) == 1 ? query_in : packed(query_in);
  int64_t tokens = query.size(0), heads = query.size(1), head_dim = query.size(2);
  STD_TORCH_CHECK(dtype_of(query, "query") == c.dtype, "attend: query and cache must have one dtype");
  Tensor out = new_like(query, {tokens, heads, head_dim});
  RegionPlan plan(c, heads, head_dim, window, tables, seq_lens, starts, max_q, tokens);
  plan.run(c, query.const_data_ptr(), query.stride(0), query.stride(1), out.mutable_data_ptr(), static_cast<float>(scale), static_cast<float>(softcap));
  return out;
}

}  // namespace

Cache::Cache(const Tensor& k, const Tensor& v) : dtype(dtype_of(k, "keys")), keys(&k), values(&v) {
  int64_t P = 4 / size_of(dtype);
  STD_TORCH_CHECK(k.dim() == 5 && v.dim() == 5 && k.is_contiguous() && v.is_contiguous() && k.size(4) == P, "the KV cache must have the layout of kv_layout()");
  blocks = k.size(0), kv_heads = k.size(1), dim = k.size(2) * P, block_size = k.size(3);
  STD_TORCH_CHECK(v.scalar_type() == k.scalar_type() && v.numel() == k.numel() && v.size(2) * P == block_size && v.size(3) == dim,
                  "the KV cache's keys and values must have the layout of kv_layout()");
}

void check_slots(const Cache& c, const Tensor& slots, int64_t tokens) {
  const int32_t* at = ints(slots, "slots");
  STD_TORCH_CHECK(slots.numel() == tokens, "write_kv: one slot a token");
  for (int64_t t = 0; t < tokens; ++t)
    STD_TORCH_CHECK(at[t] >= 0 && at[t] < c.blocks * c.block_size, "write_kv: slot ", at[t], " is outside the cache of ", c.blocks * c.block_size);
}

void write_rows(const Cache& c, const KVRows& rows, const int32_t* slots) {
  if (c.dtype == Dtype::bf16) write_typed<bf16>(c, rows, slots); else write_typed<float>(c, rows, slots);
}

RegionPlan::RegionPlan(const Cache& c, int64_t heads, int64_t head_dim, int64_t window, const Tensor& tables, const Tensor& seq_lens, const Tensor& starts, int64_t max_q, int64_t tokens)
    : tables_(static_cast<const int32_t*>(tables.const_data_ptr())), table_width_(tables.stride(0)), tokens_(tokens), heads_(heads), head_dim_(head_dim), kv_heads_(c.kv_heads), window_(window) {
  int64_t rows = seq_lens.numel(), group = heads / c.kv_heads;
  STD_TORCH_CHECK(padded_dim(head_dim) == c.dim && heads % c.kv_heads == 0, "attend: query [num_tokens, num_heads, head_dim] must fit the cache");
  STD_TORCH_CHECK(tables.dim() == 2 && tables.size(0) == rows && tables.scalar_type() == ScalarType::Int && tables.stride(1) == 1, "attend: block_tables must be [num_rows, num_blocks] int32");
  is_full_ = make_tiles(heads, c.kv_heads, ints(seq_lens, "seq_lens"), ints(starts, "query_start_loc"), rows, max_q, tokens, tiles_);
  check_tables(c, tables_, table_width_, window, tiles_, tables.size(1));
  int64_t chunks = 0, work = 0, most = 0, count = tiles_.size();
  for (const AttentionTile& t : tiles_) {
    int64_t own = end_chunk(t) - first_chunk(window, t);
    chunks += own, work += own * t.queries, most = std::max<int64_t>(most, t.queries * group);
  }
  threads_ = threads_for(std::min<int64_t>(work * kChunk * head_dim * 2, chunks > 1 || count > 1 ? INT64_MAX : 0));
  scratch_ = attention_scratch_floats(std::max<int64_t>(kTileRows, group), head_dim);
  is_split_ = threads_ > 1 && count < 4 * threads_ && chunks > count;
  if (is_split_) partial_ = attention_partial_floats(most, head_dim);
}

void RegionPlan::run(const Cache& c, const void* q, int64_t q_token, int64_t q_head, void* out, float scale, float softcap) const {
  if (!is_full_) std::fill_n(static_cast<char*>(out), tokens_ * heads_ * head_dim_ * size_of(c.dtype), 0);
  AttentionArgs a{c.dtype, q, c.keys->const_data_ptr(), c.values->const_data_ptr(), out, q_token, q_head, tables_, table_width_,
                  static_cast<int>(heads_), static_cast<int>(kv_heads_), static_cast<int>(head_dim_), static_cast<int>(c.block_size), scale, softcap, window_};
  if (is_split_) split(a); else whole(a);
}

// Whole tiles, one after another.
void RegionPlan::whole(const AttentionArgs& a) const {
  pool::parallel(tiles_.size(), 1, threads_, [&, k = kernels()](int64_t begin, int64_t end) {
    float* own = scratch_of(scratch_);
    for (int64_t i = end - 1; i >= begin; --i) k->attend(a, tiles_[i], first_chunk(window_, tiles_[i]), end_chunk(tiles_[i]), own, nullptr);
  });
}

// Few tiles with long contexts: chunk by chunk, then merged. The same bits as whole tiles.
void RegionPlan::split(const AttentionArgs& a) const {
  struct Part { int64_t tile, chunk; };
  std::vector<Part> parts;
  std::vector<int64_t> first(tiles_.size());
  for (size_t i = 0; i < tiles_.size(); ++i) {
    first[i] = parts.size();
    for (int64_t c = first_chunk(window_, tiles_[i]); c < end_chunk(tiles_[i]); ++c) parts.push_back({static_cast<int64_t>(i), c});
  }
  std::vector<float> partials(parts.size() * partial_);
  const Kernels* k = kernels();
  pool::parallel(parts.size(), 1, threads_, [&](int64_t begin, int64_t end) {
    float* own = scratch_of(scratch_);
    for (int64_t i = begin; i < end; ++i) k->attend(a, tiles_[parts[i].tile], parts[i].chunk, parts[i].chunk + 1, own, partials.data() + i * partial_);
  });
  for (size_t i = 0; i < tiles_.size(); ++i) {
    int64_t chunks = end_chunk(tiles_[i]) - first_chunk(window_, tiles_[i]);
    int64_t size = attention_partial_floats(tiles_[i].queries * (a.heads / a.kv_heads), a.head_dim);
    float* own = scratch_of(scratch_);
    // Parts lie `partial_` apart; the kernel expects them side by side.
    for (int64_t c = 1; c < chunks && size != partial_; ++c) std::copy_n(partials.data() + (first[i] + c) * partial_, size, partials.data() + first[i] * partial_ + c * size);
    k->merge(a, tiles_[i], chunks, own, partials.data() + first[i] * partial_);
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(oarlock_cpu, m) {
  m.def("write_kv(Tensor(a!) keys, Tensor(b!) values, Tensor key, Tensor value, Tensor slots) -> ()");
  m.def("attend(Tensor query, Tensor keys, Tensor values, Tensor block_tables, Tensor seq_lens, Tensor query_start_loc, int max_q, float scale, int window, float softcap) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(oarlock_cpu, CPU, m) {
  m.impl("write_kv", TORCH_BOX(&write_kv));
  m.impl("attend", TORCH_BOX(&attend));
}
