// The parts of a layer over plain pointers: what the ops serve one by one, and the stack of layers in one call.
// Checks are made where these are set up; running them checks nothing.
#pragma once
#include <variant>
#include <vector>

#include "tensors.h"

// ---- linear over packed weights -------------------------------------------------------------------------------------

struct PackedLinear {
  const void *panels = nullptr, *bias = nullptr;  // bias may be null
  int64_t in = 0, out = 0, panel_bytes = 0;
};

// A weight of `d` as pack_weight leaves it, [out, in] before; `bias` may be null.
PackedLinear packed_linear(const Tensor& panels, const Tensor* bias, Dtype d, int64_t in, int64_t out);

// out [M][w.out], of `d` or float32, from rows x of `d`.
void run_linear(const PackedLinear& w, Dtype d, const void* x, int64_t ldx, int64_t M, void* out, bool out_f32);

// act(first half of the outputs) * second half, [M][w.out / 2], in one step; false, and nothing done, where these kernels take two.
bool run_gated(const PackedLinear& w, Dtype d, const void* x, int64_t ldx, int64_t M, Act act, void* out);

Rows form_of(Dtype d);  // what `packed` takes rows of `d` as

// Sets a.x, and what belongs to it, to rows x of a.dtype in a form, K of `width` numbers each. They hold until the next call on this
// thread. Returns the rows of a block.
int64_t give_rows(LinearArgs& a, Rows form, const void* x, int64_t ldx, int64_t M, int64_t K, int64_t width);

// Items that a thread claims at once: some eight times a thread, at least `group`, and so many that all threads have as much to do.
static inline int64_t chunk_of(int64_t count, int64_t group, int threads) {
  if (threads == 1) return count;
  int64_t least = count / (threads * 8), best = least > group ? least / group * group : group;
  auto most = [&](int64_t chunk) { return ((count + chunk - 1) / chunk + threads - 1) / threads * chunk; };  // of one thread
  for (int64_t chunk = best; chunk < 2 * least + 2 * group; ++chunk)
    if (most(chunk) < most(best)) best = chunk;
  return best;
}

// f(m0, m1, n0, n1, next) for blocks of at most `block` rows times some of `group` panels of outputs; `next` is the output at which this
// thread goes on, -1 if it does not.
template <class F> void spread(int64_t M, int64_t N, int64_t K, int64_t block, int64_t group, const F& f) {
  int64_t panels = (N + kPanel - 1) / kPanel, blocks = (M + block - 1) / block;
  int threads = threads_for(M * N * K);
  pool::parallel(panels * blocks, chunk_of(panels * blocks, group, threads), threads, [&](int64_t begin, int64_t end, int64_t next) {
    while (begin < end) {  // panels of one block of rows are done together
      int64_t m = begin / panels, p0 = begin % panels, p1 = p0 + (end - begin) < panels ? p0 + (end - begin) : panels;
      begin += p1 - p0;
      int64_t then = begin < end ? begin : next;
      f(m * block, (m + 1) * block < M ? (m + 1) * block : M, p0 * kPanel, p1 * kPanel < N ? p1 * kPanel : N, then < panels * blocks ? then % panels * kPanel : -1);
    }
  });
}
const int32_t* checked_ids(const Tensor& ids, int64_t N);
const void* checked_bias(const Tensor* bias, Dtype d, int64_t N);  // null where there is none

// ---- linear over codes ----------------------------------------------------------------------------------------------

struct CodeLinear {
  CodesArgs codes;
  const void* bias;
  int64_t in, out;
};

CodeLinear code_linear(const Tensor& panels, const Tensor& scales, const Tensor* offsets, const Tensor& ends, const Tensor* exponents, int64_t bits, double zero, const Tensor* bias, Dtype d, int64_t in, int64_t out);
// out [M][w.out], of `d` or float32. is_whole: x holds whole numbers of 8 bits.
void run_codes(const CodeLinear& w, Dtype d, const void* x, int64_t ldx, int64_t M, void* out, bool out_f32, bool is_whole = false);
bool run_gated(const CodeLinear& w, Dtype d, const void* x, int64_t ldx, int64_t M, Act act, void* out);

// Either, its rows of one dtype in and out.
struct Linear {
  std::variant<PackedLinear, CodeLinear> of;

  void run(Dtype d, const void* x, int64_t ldx, int64_t M, void* out) const {
    if (auto* dense = std::get_if<PackedLinear>(&of)) run_linear(*dense, d, x, ldx, M, out, false); else run_codes(std::get<CodeLinear>(of), d, x, ldx, M, out, false);
  }
  // act(first half of the outputs) * second half, by way of `between` [M][outputs] where the kernels take two steps.
  void run_gated(Dtype d, const void* x, int64_t ldx, int64_t M, Act act, void* between, void* out) const;
};

// ---- rows -----------------------------------------------------------------------------------------------------------

// f(i) for each of `rows` rows, each of which moves or computes about `work_of_row`.
template <class F> void each_row(int64_t rows, int64_t work_of_row, const F& f) {
  int threads = threads_for(rows * work_of_row);
  int64_t chunk = (rows + threads * 4 - 1) / (threads * 4);
  pool::parallel(rows, chunk > 0 ? chunk : 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// ---- attention ------------------------------------------------------------------------------------------------------

struct Cache {
  Dtype dtype;                         // of its numbers, or what its bytes become
  const uint16_t* bytes_as = nullptr;  // of 8-bit floats: the bfloat16 of each byte
  int64_t blocks, kv_heads, dim, block_size;
  const Tensor *keys, *values;
  Cache(const Tensor& keys, const Tensor& values);
};

void check_slots(const Cache& c, const Tensor& slots, int64_t tokens);

// Keys and values of `dtype` [tokens][kv_heads][head_dim] with strides of tokens and heads, into checked slots.
struct KVRows {
  Dtype dtype;
  const void *key, *value;
  int64_t tokens, head_dim, key_token, key_head, value_token, value_head;
};
void write_rows(const Cache& c, const KVRows& rows, const int32_t* slots);

// One region of a step: who computes what. Made once, run for each layer that shares its tables and window.
class RegionPlan {
 public:
  RegionPlan(const Cache& c, int64_t heads, int64_t head_dim, int64_t window, const Tensor& tables, const Tensor& seq_lens, const Tensor& starts, int64_t max_q, int64_t tokens);

  // q, out: [tokens][heads][head_dim] of d, q with strides in elements. Rows of no request are set to 0.
  void run(const Cache& c, Dtype d, const void* q, int64_t q_token, int64_t q_head, void* out, float scale, float softcap) const;

 private:
  template <class First, class F> void attend_each(int64_t count, const First& first, const F& f) const;
  void whole(const AttentionArgs& a) const;
  void split(const AttentionArgs& a) const;

  const int32_t* tables_;
  int64_t table_width_, tokens_, heads_, head_dim_, kv_heads_, window_, scratch_, partial_ = 0;
  bool is_full_, is_split_;
  int threads_;
  std::vector<AttentionTile> tiles_;
};
