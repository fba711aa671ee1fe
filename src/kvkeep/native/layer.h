// What a decoder layer laid out like Llama's does around its attention, and all layers one after the other.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "matmul.h"
#include "router.h"

namespace {

// Scratch of each row, in elements of bfloat16.
static int64_t elements_before_attention(const KvLayer& l) { return l.hidden + (l.heads + 2 * l.kv_heads) * l.dim; }
static int64_t elements_after_attention(const KvLayer& l) { return l.hidden + 3 * l.intermediate; }

// The mixture of a layer: its router, and then its experts.
struct MixturePass {
  RouterPass router;
  ExpertPass experts;

  MixturePass(const KvLayer& l, int64_t rows)
      : router{*l.router, rows}, experts{*l.experts, nullptr, nullptr, nullptr, nullptr, rows, l.router->k} {}

  int64_t scratch_bytes() const {
    return 64 + router.rows * (router.r.k * 16 + router.experts() * 4) + router.scratch_bytes() + 64 +
           experts.scratch_bytes();
  }
  // Writes the sum of what the experts return over their inputs, (rows, hidden).
  void run(bf16* rows, char* scratch) {
    int64_t* chosen = (int64_t*)aligned(scratch);
    float* weights = (float*)(chosen + router.rows * router.r.k);
    float* logits = weights + router.rows * router.r.k;
    float* beside = logits + router.rows * router.experts();
    router.take(beside);
    router.run(rows, logits, weights, chosen);
    experts.x = experts.y = rows;
    experts.chosen = chosen;
    experts.weights = weights;
    experts.take(aligned((char*)beside + router.scratch_bytes()));
    experts.run();
  }
  static char* aligned(char* at) { return at + (64 - uintptr_t(at) % 64) % 64; }
};

static int64_t bytes_after_attention(const KvLayer& l, int64_t rows) {
  return rows * elements_after_attention(l) * 2 + (l.router ? MixturePass(l, rows).scratch_bytes() : 0);
}

static void run_before_attention(const KvLayer& l, const bf16* x, int64_t batch, int64_t tokens, const bf16* cos,
                                 const bf16* sin, bool shared_angles, bf16* query, bf16* key, bf16* value,
                                 bf16* scratch) {
  const int64_t rows = batch * tokens, dim = l.dim, heads = l.heads, kv_heads = l.kv_heads;
  const int64_t width = (heads + 2 * kv_heads) * dim;
  const float* of_input = numbers<float>(l.input_norm);
  bf16 *normed = scratch, *projected = scratch + rows * l.hidden;
  if (of_input) norm_rows(x, of_input, l.eps, rows, l.hidden, normed, true);
  InputRows inputs{of_input ? normed : x, rows, l.hidden, l.hidden};
  for (int64_t i = 0, column = 0; i < 3 && l.qkv[i].outputs; column += l.qkv[i++].outputs)
    multiply(l.qkv[i], inputs, numbers<bf16>(l.qkv_bias[i]), projected + column, width);
  for_each_row(rows, [&](int64_t r) {
    const int64_t b = r / tokens, i = r % tokens, angles = (shared_angles ? i : r) * l.rotated;
    const auto normalise = [&](const KvArray& weight, bf16* y) {
      norm_row(y, nullptr, nullptr, numbers<float>(weight), l.eps, weight.length, y);
    };
    if (l.query_norm.length > dim) normalise(l.query_norm, projected + r * width);
    if (l.key_norm.length > dim) normalise(l.key_norm, projected + r * width + heads * dim);
    for (int64_t h = 0; h < heads + 2 * kv_heads; h++) {
      bf16* head = projected + r * width + h * dim;
      const bool is_query = h < heads, is_key = !is_query && h < heads + kv_heads;
      const KvArray of_head = is_query ? l.query_norm : is_key ? l.key_norm : KvArray{};
      const auto turn = [&] {
        if (is_query || is_key) rotate(head, cos + angles, sin + angles, l.rotated, l.rotation);
      };
      if (l.rotates_first) turn();
      if (of_head.length == dim) normalise(of_head, head);
      if (!l.rotates_first) turn();
      bf16* to = is_query ? query + ((b * heads + h) * tokens + i) * dim
                 : is_key ? key + ((b * kv_heads + h - heads) * tokens + i) * dim
                          : value + ((b * kv_heads + h - heads - kv_heads) * tokens + i) * dim;
      memcpy(to, head, dim * 2);
    }
  });
}

static void run_before_mlp(const KvLayer& l, const bf16* attended, const bf16* residual, int64_t rows, bf16* y,
                           bf16* normed) {
  const int64_t hidden = l.hidden, width = l.heads * l.dim;
  const float *after_attention = numbers<float>(l.post_attention_norm), *before_mlp = numbers<float>(l.pre_mlp_norm);
  InputRows attention_rows{attended, rows, width, width};
  multiply(l.out, attention_rows, numbers<bf16>(l.out_bias), normed, hidden);
  for_each_row(rows, [&](int64_t r) {
    bf16 *out = normed + r * hidden, *to = y + r * hidden;
    if (after_attention) norm_row(out, nullptr, nullptr, after_attention, l.eps, hidden, out);
    scale_row(l.residual_scale, hidden, out);
    if (before_mlp) return norm_row(residual + r * hidden, out, to, before_mlp, l.eps, hidden, out);
    memmove(to, residual + r * hidden, size_t(hidden) * 2);
    add_row(out, hidden, to);
    memcpy(out, to, size_t(hidden) * 2);
  });
}

// Adds what the MLP returns to the residual stream.
static void add_mlp(const KvLayer& l, bf16* outputs, int64_t rows, bf16* y) {
  const float* after_mlp = numbers<float>(l.post_mlp_norm);
  for_each_row(rows, [&](int64_t r) {
    bf16 *out = outputs + r * l.hidden, *to = y + r * l.hidden;
    if (after_mlp) norm_row(out, nullptr, nullptr, after_mlp, l.eps, l.hidden, out);
    scale_row(l.residual_scale, l.hidden, out);
    add_row(out, l.hidden, to);
  });
}

static void run_after_attention(const KvLayer& l, const bf16* attended, const bf16* residual, int64_t rows, bf16* y,
                                bf16* scratch) {
  const int64_t hidden = l.hidden, intermediate = l.intermediate;
  bf16 *normed = scratch, *gates = normed + rows * hidden, *gated = gates + rows * 2 * intermediate;
  run_before_mlp(l, attended, residual, rows, y, normed);
  if (l.router) {
    MixturePass(l, rows).run(normed, (char*)gates);
    return add_mlp(l, normed, rows, y);
  }
  InputRows mlp_rows{normed, rows, hidden, hidden};
  for (int64_t i = 0, column = 0; i < 2 && l.gates[i].outputs; column += l.gates[i++].outputs)
    multiply<bf16>(l.gates[i], mlp_rows, nullptr, gates + column, 2 * intermediate);
  for_each_row(rows, [&](int64_t r) {
    gate_row(gates + r * 2 * intermediate, intermediate, l.activation, gated + r * intermediate);
  });
  InputRows down_rows{gated, rows, intermediate, intermediate};
  multiply<bf16>(l.down, down_rows, nullptr, normed, hidden);
  add_mlp(l, normed, rows, y);
}

static void add_needs_before(const KvLayer& l, int64_t rows, Needs& needs) {
  for (const KvMatrix& one : l.qkv) add_needs(one, rows, needs);
}
static void add_needs_after(const KvLayer& l, int64_t rows, Needs& needs) {
  add_needs(l.out, rows, needs);
  for (const KvMatrix& one : l.gates) add_needs(one, rows, needs);
  add_needs(l.down, rows, needs);
  if (!l.router) return;
  add_needs(l.router->weight, rows, needs);
  add_needs(*l.experts, rows * l.router->k, needs);
}

// ---- the interface of kvkeep.h --------------------------------------------------------------------------------------

static KvStatus before_attention(const KvLayer* l, KvArray x, int64_t batch, KvArray cos, KvArray sin, KvArray query,
                                 KvArray key, KvArray value) {
  const int64_t rows = x.length / l->hidden, bytes = rows * elements_before_attention(*l) * 2;
  Needs needs;
  add_needs_before(*l, rows, needs);
  needs.add(KV_SCRATCH_LAYER, bytes);
  if (!needs.reserve()) return KV_NO_MEMORY;
  bf16* scratch = (bf16*)kv_scratch(KV_SCRATCH_LAYER, size_t(bytes));
  if (!scratch) return KV_FAILED;
  with_team(rows <= MAX_DIRECT_ROWS, [&] {
    run_before_attention(*l, numbers<bf16>(x), batch, rows / batch, numbers<bf16>(cos), numbers<bf16>(sin),
                         cos.length < rows * l->rotated, numbers<bf16>(query), numbers<bf16>(key), numbers<bf16>(value),
                         scratch);
  });
  return KV_DONE;
}

static KvStatus before_mlp(const KvLayer* l, KvArray attended, KvArray residual, KvArray y, KvArray normed) {
  const int64_t rows = residual.length / l->hidden;
  Needs needs;
  add_needs(l->out, rows, needs);
  if (!needs.reserve()) return KV_NO_MEMORY;
  with_team(rows <= MAX_DIRECT_ROWS, [&] {
    run_before_mlp(*l, numbers<bf16>(attended), numbers<bf16>(residual), rows, numbers<bf16>(y),
                   numbers<bf16>(normed));
  });
  return KV_DONE;
}

static KvStatus after_attention(const KvLayer* l, KvArray attended, KvArray residual, KvArray y) {
  const int64_t rows = residual.length / l->hidden, bytes = bytes_after_attention(*l, rows);
  Needs needs;
  add_needs_after(*l, rows, needs);
  needs.add(KV_SCRATCH_LAYER, bytes);
  if (!needs.reserve()) return KV_NO_MEMORY;
  bf16* scratch = (bf16*)kv_scratch(KV_SCRATCH_LAYER, size_t(bytes));
  if (!scratch) return KV_FAILED;
  with_team(rows <= MAX_DIRECT_ROWS, [&] {
    run_after_attention(*l, numbers<bf16>(attended), numbers<bf16>(residual), rows, numbers<bf16>(y), scratch);
  });
  return KV_DONE;
}

static KvStatus run_layers(const KvLayer* const* layers, KvStep* const* const* steps, const float* scaling,
                           int64_t count, const int64_t* step_counts, KvArray cos, KvArray sin, KvArray residual,
                           KvArray normed) {
  const KvLayer& l = *layers[0];
  const int64_t tokens = residual.length / l.hidden;
  bf16* x = numbers<bf16>(residual);
  const int64_t queries = l.heads * l.dim, keys = l.kv_heads * l.dim;
  int64_t inside = tokens * elements_before_attention(l) * 2;
  for (int64_t i = 0; i < count; i++) inside = max64(inside, bytes_after_attention(*layers[i], tokens));
  const int64_t bytes = inside + tokens * ((2 * queries + 2 * keys) * 2 + l.heads * 4);
  Needs needs;  // of all layers: an entry that was written cannot be taken back
  needs.add(KV_SCRATCH_LAYER, bytes);
  for (int64_t i = 0; i < count; i++) {
    add_needs_before(*layers[i], tokens, needs);
    add_needs(steps[i], step_counts[i], l.heads, needs);
    add_needs_after(*layers[i], tokens, needs);
  }
  if (!needs.reserve()) return KV_NO_MEMORY;
  float* lse = (float*)kv_scratch(KV_SCRATCH_LAYER, size_t(bytes));  // (tokens, heads)
  if (!lse) return KV_FAILED;
  bf16* query = (bf16*)(lse + tokens * l.heads);                                  // (tokens, heads * dim)
  bf16* attended = query + tokens * queries;                              // (tokens, heads * dim)
  bf16* key = attended + tokens * queries;                                // (tokens, kv_heads * dim)
  bf16* value = key + tokens * keys;                                      // (tokens, kv_heads * dim)
  bf16* scratch = value + tokens * keys;
  with_team(tokens <= MAX_DIRECT_ROWS, [&] {
    for (int64_t i = 0; i < count; i++) {
      run_before_attention(*layers[i], x, tokens, 1, numbers<bf16>(cos), numbers<bf16>(sin), false, query, key, value,
                           scratch);
      run_steps(steps[i], step_counts[i], query, key, value, tokens, l.heads, 1, scaling[i], nullptr, attended,
                lse);
      const KvLayer& layer = *layers[i];
      if (layer.intermediate || layer.router) run_after_attention(layer, attended, x, tokens, x, scratch);
      else run_before_mlp(layer, attended, x, tokens, x, numbers<bf16>(normed));
    }
  });
  return KV_DONE;
}

}  // namespace
