// write_kv and attend: tiles, threads and the split of long contexts. The arithmetic is in attention.inl.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "stages.h"

namespace {

constexpr int kTileRows = 64;  // (query, head) rows of a tile: enough for every key read to serve many

// ---- 8-bit floats -------------------------------------------------------------------------------------------------

// `mantissa` bits and a bias; e4m3 has no infinity and one NaN a sign, e5m2 has what IEEE 754's formats have (arXiv:2209.05433).
struct Format8 {
  int mantissa, bias;
  float largest;
  uint16_t as_bf16[256];

  Format8(int m, int b, float top, bool has_infinity) : mantissa(m), bias(b), largest(top) {
    for (int code = 0; code < 256; ++code) {
      int exponent = (code & 0x7f) >> m, rest = code & ((1 << m) - 1);
      float f = exponent ? std::ldexp(static_cast<float>((1 << m) + rest), exponent - b - m) : std::ldexp(static_cast<float>(rest), 1 - b - m);
      if (has_infinity && exponent == 127 >> m) f = rest ? NAN : INFINITY;
      if (!has_infinity && (code & 0x7f) == 0x7f) f = NAN;
      uint32_t bits;
      std::memcpy(&bits, &f, 4);
      as_bf16[code] = static_cast<uint16_t>((f == f ? bits >> 16 : 0x7fc0) | (code & 0x80) << 8);
    }
  }

  // Rounded to nearest even; what is too large becomes the largest.
  uint8_t code(float x) const {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
    float magnitude = std::fabs(x);
    if (!(magnitude <= largest)) return sign | (x == x ? code(largest) : 0x7f);
    if (magnitude < std::ldexp(1.f, 1 - bias)) return sign | static_cast<uint8_t>(std::nearbyint(std::ldexp(magnitude, bias - 1 + mantissa)));
    bits &= 0x7fffffff;
    bits += (1u << (22 - mantissa)) - 1 + (bits >> (23 - mantissa) & 1);
    return sign | static_cast<uint8_t>((bits >> (23 - mantissa)) - (static_cast<uint32_t>(127 - bias) << mantissa));
  }
};

const Format8& e4m3() {
  static const Format8 format(3, 7, 448.f, false);
  return format;
}
const Format8& e5m2() {
  static const Format8 format(2, 15, 57344.f, true);
  return format;
}

// ---- writing --------------------------------------------------------------------------------------------------------

// One token of one head, `kept(number)` of each; P numbers a unit.
template <int P, class T, class D, class F> void scatter(const Cache& c, const T* key, const T* value, D* keys, D* values, int64_t block, int64_t at, int64_t head_dim, const F& kept) {
  D* k = keys + block * c.block_size * c.dim + at * P;
  D* v = values + block * c.block_size * c.dim + at / P * c.dim * P + at % P;
  if constexpr (P == 2 && sizeof(D) == 2 && std::is_same_v<T, D>) {
    for (int64_t d = 0; d + 1 < head_dim; d += 2) std::memcpy(k + d * c.block_size, key + d, 4);  // a unit
    if (head_dim % 2) k[(head_dim - 1) * c.block_size] = key[head_dim - 1];
  } else {
    for (int64_t d = 0; d < head_dim; ++d) k[d / P * c.block_size * P + d % P] = kept(key[d]);
  }
  for (int64_t d = 0; d < head_dim; ++d) v[d * P] = kept(value[d]);
  for (int64_t d = head_dim; d < c.dim; ++d) k[d / P * c.block_size * P + d % P] = D{}, v[d * P] = D{};  // padding must be finite
}

template <int P, class T, class D, class F> void write_typed(const Cache& c, const KVRows& r, const int32_t* slots, const F& kept) {
  const T *k = static_cast<const T*>(r.key), *v = static_cast<const T*>(r.value);
  D *keys = static_cast<D*>(c.keys->mutable_data_ptr()), *values = static_cast<D*>(c.values->mutable_data_ptr());
  // By KV head, not by token: padded tokens share a slot, and two threads must not write it at once.
  int threads = threads_for(r.tokens * c.kv_heads * r.head_dim * 4);
  pool::parallel(c.kv_heads, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h)
      for (int64_t t = 0; t < r.tokens; ++t) {
        int64_t block = slots[t] / c.block_size * c.kv_heads + h;
        scatter<P>(c, k + t * r.key_token + h * r.key_head, v + t * r.value_token + h * r.value_head, keys, values, block, slots[t] % c.block_size, r.head_dim, kept);
      }
  });
}

float widened(float x) { return x; }
float widened(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

template <class T> void write_from(const Cache& c, const KVRows& r, const int32_t* slots) {
  if (!c.bytes_as) return write_typed<per_unit<T>, T, T>(c, r, slots, [](T x) { return x; });
  const Format8& format = c.bytes_as == e4m3().as_bf16 ? e4m3() : e5m2();
  write_typed<2, T, uint8_t>(c, r, slots, [&](T x) { return format.code(widened(x)); });
}

void write_kv(const Tensor& keys, const Tensor& values, const Tensor& key_in, const Tensor& value_in, const Tensor& slots) {
  Cache c(keys, values);
  STD_TORCH_CHECK(key_in.dim() == 3 && key_in.size(1) == c.kv_heads && key_in.size(2) <= c.dim && value_in.numel() == key_in.numel(), "write_kv: key and value must be [num_tokens, num_kv_heads, head_dim]");
  Dtype d = dtype_of(key_in, "key");
  STD_TORCH_CHECK(dtype_of(value_in, "value") == d && (c.bytes_as || d == c.dtype), "write_kv: key, value and cache must have one dtype, or the cache 8-bit floats");
  Tensor key = key_in.stride(2) == 1 ? key_in : packed(key_in), value = value_in.stride(2) == 1 ? value_in : packed(value_in);
  check_slots(c, slots, key.size(0));
  write_rows(c, {d, key.const_data_ptr(), value.const_data_ptr(), key.size(0), key.size(2), key.stride(0), key.stride(1), value.stride(0), value.stride(1)}, ints(slots, "slots"));
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
  Dtype d = dtype_of(query, "query");
  STD_TORCH_CHECK(c.bytes_as || d == c.dtype, "attend: query and cache must have one dtype, or the cache 8-bit floats");
  Tensor out = new_like(query, {tokens, heads, head_dim});
  RegionPlan plan(c, heads, head_dim, window, tables, seq_lens, starts, max_q, tokens);
  plan.run(c, d, query.const_data_ptr(), query.stride(0), query.stride(1), out.mutable_data_ptr(), static_cast<float>(scale), static_cast<float>(softcap));
  return out;
}

}  // namespace

Cache::Cache(const Tensor& k, const Tensor& v) : keys(&k), values(&v) {
  if (k.scalar_type() == ScalarType::Float8_e4m3fn) dtype = Dtype::bf16, bytes_as = e4m3().as_bf16;
  else if (k.scalar_type() == ScalarType::Float8_e5m2) dtype = Dtype::bf16, bytes_as = e5m2().as_bf16;
  else dtype = dtype_of(k, "keys");
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
  if (rows.dtype == Dtype::bf16) write_from<bf16>(c, rows, slots); else write_from<float>(c, rows, slots);
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
  scratch_ = attention_scratch_floats(std::max<int64_t>(kTileRows, group), head_dim) + (c.bytes_as ? 2 * attention_expanded_floats(c.block_size, head_dim) : 0);
  is_split_ = threads_ > 1 && count < 4 * threads_ && chunks > count;
  if (is_split_) partial_ = attention_partial_floats(most, head_dim);
}

void RegionPlan::run(const Cache& c, Dtype d, const void* q, int64_t q_token, int64_t q_head, void* out, float scale, float softcap) const {
  if (!is_full_) std::fill_n(static_cast<char*>(out), tokens_ * heads_ * head_dim_ * size_of(d), 0);
  AttentionArgs a{d, c.dtype, c.bytes_as, q, c.keys->const_data_ptr(), c.values->const_data_ptr(), out, q_token, q_head, tables_, table_width_,
                  static_cast<int>(heads_), static_cast<int>(kv_heads_), static_cast<int>(head_dim_), static_cast<int>(c.block_size), scale, softcap, window_};
  if (is_split_) split(a); else whole(a);
}

// f(i, scratch, what this thread attends after i) for each of `count` items; first(i) says where an item begins.
template <class First, class F> void RegionPlan::attend_each(int64_t count, const First& first, const F& f) const {
  pool::parallel(count, 1, threads_, [&](int64_t begin, int64_t end, int64_t next) {
    float* own = scratch_of(scratch_);
    for (int64_t i = begin; i < end; ++i) {
      int64_t then = i + 1 < end ? i + 1 : next;
      f(i, own, then < count ? first(then) : AttentionPart{nullptr, 0});
    }
  });
}

// Whole tiles, one after another.
void RegionPlan::whole(const AttentionArgs& a) const {
  auto first = [&](int64_t i) { return AttentionPart{&tiles_[i], first_chunk(window_, tiles_[i])}; };
  attend_each(tiles_.size(), first, [&, k = kernels()](int64_t i, float* own, AttentionPart next) {
    k->attend(a, tiles_[i], first(i).chunk, end_chunk(tiles_[i]), own, nullptr, next);
  });
}

// Few tiles with long contexts: chunk by chunk, then merged. The same bits as whole tiles.
void RegionPlan::split(const AttentionArgs& a) const {
  std::vector<AttentionPart> parts;
  std::vector<int64_t> first(tiles_.size());
  for (size_t i = 0; i < tiles_.size(); ++i) {
    first[i] = parts.size();
    for (int64_t c = first_chunk(window_, tiles_[i]); c < end_chunk(tiles_[i]); ++c) parts.push_back({&tiles_[i], c});
  }
  std::vector<float> partials(parts.size() * partial_);
  const Kernels* k = kernels();
  attend_each(parts.size(), [&](int64_t i) { return parts[i]; }, [&](int64_t i, float* own, AttentionPart next) {
    k->attend(a, *parts[i].tile, parts[i].chunk, parts[i].chunk + 1, own, partials.data() + i * partial_, next);
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
