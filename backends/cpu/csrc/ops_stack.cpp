// decoder_layers: consecutive decoder layers in one call. The same kernels in the same order as the ops one by one, so the same bits;
// what is saved is Python, dispatch, allocation and checks, some hundred times a step.
#include <algorithm>
#include <memory>
#include <vector>

#include "stages.h"

namespace {

// What oarlock_cpu/stack.py lays out for each layer. The weights that a layer has follow one another: the norms in kNorms's order, then
// the linears in kLinears's, each as panels, bias, and where it is of codes, scales, offsets, ends and exponents.
enum NormName { kAttentionNorm, kQNorm, kKNorm, kAttentionPostNorm, kMlpNorm, kMlpPostNorm, kNorms };
enum LinearName { kQkv, kO, kGateUp, kDown, kLinears };
enum Shape { kHeads, kKvHeads, kHeadDim, kWindow, kGroup, kTable, kIsInterleaved, kAct, kInner, kCache, kNormMask, kFirstLinear, kShapes = kFirstLinear + kLinears };
enum Number { kScale, kSoftcap, kEps, kFirstZero, kNumbers = kFirstZero + kLinears };
// Of a linear: bits of a code, 0 where it is dense; then what it has.
constexpr int64_t kBits = 15, kHasBias = 16, kHasOffsets = 32;

struct Given {
  const std::vector<Tensor>& all;
  size_t at = 0;
  const Tensor& next() {
    STD_TORCH_CHECK(at < all.size(), "decoder_layers: weights, shapes and numbers must be those of as many layers");
    return all[at++];
  }
};

struct Norm {
  const void* weight = nullptr;  // null: none
  Dtype dtype = Dtype::f32;
};

Norm norm_of(const Tensor& weight, int64_t size) {
  STD_TORCH_CHECK(weight.is_contiguous() && weight.numel() == size, "decoder_layers: a norm's weight must hold one number for each of ", size);
  return {weight.const_data_ptr(), dtype_of(weight, "norm")};
}

Linear linear_of(Given& w, int64_t shape, double zero, Dtype d, int64_t in, int64_t out) {
  const Tensor& panels = w.next();
  const Tensor* bias = shape & kHasBias ? &w.next() : nullptr;
  if (!(shape & kBits)) return {packed_linear(panels, bias, d, in, out)};
  const Tensor& scales = w.next();
  const Tensor* offsets = shape & kHasOffsets ? &w.next() : nullptr;
  const Tensor &ends = w.next(), &exponents = w.next();
  return {code_linear(panels, scales, offsets, ends, &exponents, shape & kBits, zero, bias, d, in, out)};
}

// What all layers over one KV group share in a step.
struct Group {
  const int32_t* slots;
  struct Region {
    int64_t begin, end;
    std::unique_ptr<RegionPlan> plan;
  };
  std::vector<Region> regions;
};

struct Layer {
  const int64_t* shape;
  float scale, softcap, eps;
  Act act;
  Norm norms[kNorms];
  Linear linears[kLinears];
  int64_t qkv_size() const { return (shape[kHeads] + 2 * shape[kKvHeads]) * shape[kHeadDim]; }
};

Layer layer_of(Given& w, const int64_t* shape, const double* numbers, Dtype d, int64_t hidden) {
  Layer l{shape, static_cast<float>(numbers[kScale]), static_cast<float>(numbers[kSoftcap]), static_cast<float>(numbers[kEps]), static_cast<Act>(shape[kAct])};
  int64_t head_dim = shape[kHeadDim], heads = shape[kHeads] * head_dim, inner = shape[kInner];
  STD_TORCH_CHECK(heads > 0 && inner > 0 && shape[kAct] >= 0 && shape[kAct] <= 3, "decoder_layers: a layer has no heads, no feed-forward or an unknown activation");
  for (int n = 0; n < kNorms; ++n)
    if (shape[kNormMask] >> n & 1) l.norms[n] = norm_of(w.next(), n == kQNorm || n == kKNorm ? head_dim : hidden);
  STD_TORCH_CHECK(l.norms[kAttentionNorm].weight && l.norms[kMlpNorm].weight, "decoder_layers: a layer lacks a norm");
  const int64_t sizes[kLinears][2] = {{hidden, l.qkv_size()}, {heads, hidden}, {hidden, 2 * inner}, {inner, hidden}};
  for (int n = 0; n < kLinears; ++n) l.linears[n] = linear_of(w, shape[kFirstLinear + n], numbers[kFirstZero + n], d, sizes[n][0], sizes[n][1]);
  return l;
}

struct Step {
  Dtype dtype;
  int64_t tokens, hidden, element;
  const int32_t* positions;
  char *x, *normed, *qkv, *attended, *gate_up, *act;  // rows of `dtype`
  float* residual;
  bool has_residual;

  // normed = norm(x), or norm(x + residual); the residual becomes the sum.
  void add_norm(const Norm& n, float eps) {
    const Kernels* k = kernels();
    each_row(tokens, hidden * 6, [&](int64_t i) {
      const char* row = x + i * hidden * element;
      float* sum = residual + i * hidden;
      if (has_residual) return k->rms_norm(dtype, n.dtype, row, sum, n.weight, normed + i * hidden * element, sum, hidden, eps);
      k->rms_norm(dtype, n.dtype, row, nullptr, n.weight, normed + i * hidden * element, nullptr, hidden, eps);
      k->widen(dtype, row, sum, hidden, hidden);
    });
    has_residual = true;
  }

  void norm_in_place(const Norm& n, char* rows, float eps) {
    if (!n.weight) return;
    each_row(tokens, hidden * 4, [&, k = kernels()](int64_t i) {
      char* row = rows + i * hidden * element;
      k->rms_norm(dtype, n.dtype, row, nullptr, n.weight, row, nullptr, hidden, eps);
    });
  }

  // Queries and keys in place: normed where the layer norms heads, then rotated.
  void turn_heads(const Layer& l, const float* angles, int64_t half) {
    int64_t heads = l.shape[kHeads], kv_heads = l.shape[kKvHeads], dim = l.shape[kHeadDim], size = l.qkv_size();
    if (!l.norms[kQNorm].weight && !angles) return;
    each_row(tokens, (heads + kv_heads) * dim * 6, [&, k = kernels()](int64_t t) {
      for (int64_t h = 0; h < heads + kv_heads; ++h) {
        char* head = qkv + (t * size + h * dim) * element;
        const Norm& n = l.norms[h < heads ? kQNorm : kKNorm];
        if (n.weight) k->rms_norm(dtype, n.dtype, head, nullptr, n.weight, head, nullptr, dim, l.eps);
        if (angles) k->rotary(dtype, head, head, angles + positions[t] * 2 * half, half, dim - 2 * half, l.shape[kIsInterleaved]);
      }
    });
  }

  void attend(const Layer& l, const Cache& cache, const Group& group) {
    int64_t heads = l.shape[kHeads], kv_heads = l.shape[kKvHeads], dim = l.shape[kHeadDim], size = l.qkv_size();
    const char *keys = qkv + heads * dim * element, *values = keys + kv_heads * dim * element;
    write_rows(cache, {dtype, keys, values, tokens, dim, size, dim, size, dim}, group.slots);
    for (const Group::Region& r : group.regions)
      r.plan->run(cache, dtype, qkv + r.begin * size * element, size, dim, attended + r.begin * heads * dim * element, l.scale, l.softcap);
  }

  void feed_forward(const Layer& l) {
    l.linears[kGateUp].run_gated(dtype, normed, hidden, tokens, l.act, gate_up, act);
    l.linears[kDown].run(dtype, act, l.shape[kInner], tokens, x);
  }

  void run(const Layer& l, const Cache& cache, const Group& group, const float* angles, int64_t half) {
    add_norm(l.norms[kAttentionNorm], l.eps);
    l.linears[kQkv].run(dtype, normed, hidden, tokens, qkv);
    turn_heads(l, angles, half);
    attend(l, cache, group);
    l.linears[kO].run(dtype, attended, l.shape[kHeads] * l.shape[kHeadDim], tokens, x);
    norm_in_place(l.norms[kAttentionPostNorm], x, l.eps);
    add_norm(l.norms[kMlpNorm], l.eps);
    feed_forward(l);
    norm_in_place(l.norms[kMlpPostNorm], x, l.eps);
  }
};

// step_tensors, group by group: slots, then block_tables, seq_lens and query_start_loc of each region.
// step_shapes, group by group: number of regions, then first token, end and max_q of each.
std::vector<Group> groups_of(const std::vector<Tensor>& tensors, const std::vector<int64_t>& shapes, const std::vector<Layer>& layers, const std::vector<Cache>& caches, int64_t tokens) {
  std::vector<Group> groups;
  size_t t = 0, s = 0;
  while (s < shapes.size()) {
    int64_t number = groups.size(), count = shapes[s++];
    STD_TORCH_CHECK(count >= 0 && t + 1 + 3 * count <= tensors.size() && s + 3 * count <= shapes.size(), "decoder_layers: step_tensors do not fit step_shapes");
    Group g{nullptr, {}};
    const Tensor& slots = tensors[t++];
    const Layer* first = nullptr;
    const Cache* cache = nullptr;
    for (const Layer& l : layers) {
      if (l.shape[kGroup] != number) continue;
      const Cache& c = caches[l.shape[kCache]];
      if (!first) first = &l, cache = &c;
      STD_TORCH_CHECK(l.shape[kHeads] == first->shape[kHeads] && l.shape[kHeadDim] == first->shape[kHeadDim] && l.shape[kWindow] == first->shape[kWindow] && c.blocks == cache->blocks &&
                          c.kv_heads == l.shape[kKvHeads] && c.kv_heads == cache->kv_heads && c.block_size == cache->block_size && c.dtype == cache->dtype && c.bytes_as == cache->bytes_as,
                      "decoder_layers: layers of one KV group must have one shape");
    }
    if (first) check_slots(*cache, slots, tokens), g.slots = ints(slots, "slots");
    int64_t covered = 0;
    for (int64_t r = 0; r < count; ++r, t += 3, s += 3) {
      int64_t begin = shapes[s], end = shapes[s + 1];
      STD_TORCH_CHECK(begin == covered && end >= begin && end <= tokens, "decoder_layers: regions must cover the tokens in order");
      covered = end;
      if (!first) continue;
      auto plan = std::make_unique<RegionPlan>(*cache, first->shape[kHeads], first->shape[kHeadDim], first->shape[kWindow], tensors[t], tensors[t + 1], tensors[t + 2], shapes[s + 2], end - begin);
      g.regions.push_back({begin, end, std::move(plan)});
    }
    STD_TORCH_CHECK(!first || covered == tokens, "decoder_layers: regions must cover the tokens in order");
    groups.push_back(std::move(g));
  }
  return groups;
}

std::tuple<Tensor, Tensor> decoder_layers(const Tensor& x_in, const OptionalTensor& residual_in, std::vector<Tensor> weights, std::vector<int64_t> shapes, std::vector<double> numbers,
                                          std::vector<Tensor> kv, const Tensor& positions, std::vector<Tensor> tables, std::vector<Tensor> step_tensors, std::vector<int64_t> step_shapes) {
  Dtype d = dtype_of(x_in, "x");
  STD_TORCH_CHECK(x_in.dim() == 2 && positions.numel() == x_in.size(0), "decoder_layers: x [num_tokens, hidden_size] and a position for each token expected");
  int64_t count = shapes.size() / kShapes, tokens = x_in.size(0), hidden = x_in.size(1), element = size_of(d);
  STD_TORCH_CHECK(static_cast<int64_t>(shapes.size()) == count * kShapes && static_cast<int64_t>(numbers.size()) == count * kNumbers && kv.size() % 2 == 0,
                  "decoder_layers: weights, shapes and numbers must be those of as many layers");
  std::vector<Cache> caches;
  for (size_t i = 0; i < kv.size(); i += 2) caches.emplace_back(kv[i], kv[i + 1]);
  std::vector<Layer> layers;
  Given given{weights};
  int64_t widest_qkv = 0, widest_heads = 0, inner = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Layer& l = layers.emplace_back(layer_of(given, &shapes[i * kShapes], &numbers[i * kNumbers], d, hidden));
    STD_TORCH_CHECK(l.shape[kCache] >= 0 && l.shape[kCache] < static_cast<int64_t>(caches.size()) && (caches[l.shape[kCache]].bytes_as || caches[l.shape[kCache]].dtype == d) && l.shape[kTable] < static_cast<int64_t>(tables.size()),
                    "decoder_layers: a layer names a cache or a table that is not there");
    widest_qkv = std::max(widest_qkv, l.qkv_size()), widest_heads = std::max(widest_heads, l.shape[kHeads] * l.shape[kHeadDim]), inner = std::max(inner, l.shape[kInner]);
  }
  STD_TORCH_CHECK(given.at == weights.size(), "decoder_layers: weights, shapes and numbers must be those of as many layers");
  const int32_t* at = ints(positions, "positions");
  for (const Tensor& table : tables) {
    floats(table, "table");
    STD_TORCH_CHECK(table.dim() == 3 && table.size(1) == 2, "decoder_layers: a rotary table must be [max_len, 2, rot / 2]");
    for (int64_t t = 0; t < tokens; ++t) STD_TORCH_CHECK(at[t] >= 0 && at[t] < table.size(0), "rotary: position ", at[t], " is outside the table of ", table.size(0));
  }
  std::vector<Group> groups = groups_of(step_tensors, step_shapes, layers, caches, tokens);
  for (const Layer& l : layers) STD_TORCH_CHECK(l.shape[kGroup] >= 0 && l.shape[kGroup] < static_cast<int64_t>(groups.size()), "decoder_layers: a layer names a KV group that is not there");

  Tensor x = new_like(x_in, {tokens, hidden}), residual = new_like(x_in, {tokens, hidden}, ScalarType::Float);
  Tensor from = packed(x_in);
  std::copy_n(bytes(from), tokens * hidden * element, writable(x));
  float* sums = static_cast<float*>(residual.mutable_data_ptr());
  if (residual_in) {
    Tensor before = packed(*residual_in);
    STD_TORCH_CHECK(before.numel() == tokens * hidden, "decoder_layers: x and residual must agree");
    std::copy_n(floats(before, "residual"), tokens * hidden, sums);
  }
  Tensor normed = new_like(x, {tokens, hidden}), qkv = new_like(x, {tokens, widest_qkv}), attended = new_like(x, {tokens, widest_heads});
  Tensor gate_up = new_like(x, {tokens, 2 * inner}), act = new_like(x, {tokens, inner});
  Step step{d, tokens, hidden, element, at, writable(x), writable(normed), writable(qkv), writable(attended), writable(gate_up), writable(act), sums, residual_in.has_value()};
  for (const Layer& l : layers) {
    const Tensor* table = l.shape[kTable] < 0 ? nullptr : &tables[l.shape[kTable]];
    int64_t half = table ? table->size(2) : 0;
    STD_TORCH_CHECK(2 * half <= l.shape[kHeadDim], "decoder_layers: a rotary table is wider than a head");
    step.run(l, caches[l.shape[kCache]], groups[l.shape[kGroup]], table ? static_cast<const float*>(table->const_data_ptr()) : nullptr, half);
  }
  return {x, residual};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oarlock_cpu, m) {
  m.def("decoder_layers(Tensor x, Tensor? residual, Tensor[] weights, int[] shapes, float[] numbers, Tensor(a!)[] caches, Tensor positions, Tensor[] tables, Tensor[] step_tensors, int[] step_shapes) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(oarlock_cpu, CPU, m) { m.impl("decoder_layers", TORCH_BOX(&decoder_layers)); }
