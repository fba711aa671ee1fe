// What a decoder layer laid out like Llama's does around its attention, and all layers one after the other.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "matmul.h"
#include "mlp.h"

namespace {

// How many numbers the projections of a row have: queries and gates, keys, values.
static int64_t projections(const KvLayer& l) { return ((1 + (l.gated != 0)) * l.heads + 2 * l.kv_heads) * l.dim; }
static int64_t bytes_before_attention(const KvLayer& l, int64_t rows) { return rows * (l.hidden + projections(l)) * 2; }
static int64_t bytes_after_attention(const KvLayer& l, int64_t rows) {
  const int64_t of_side = rows * 3 * l.side_gate.outputs * 2;
  return rows * (1 + (l.order != KV_IN_TURN)) * l.hidden * 2 +
         (l.mlp ? max64(MlpPass{*l.mlp, rows}.scratch_bytes(), of_side) : 0);
}

static void run_before_attention(const KvLayer& l, const bf16* x, int64_t batch, int64_t tokens, const bf16* cos,
                                 const bf16* sin, bool shared_angles, bf16* query, bf16* key, bf16* value,
                                 bf16* gate, bf16* scratch) {
  enum { QUERY, KEY, VALUE };
  const int64_t rows = batch * tokens, dim = l.dim, heads = l.heads, kv_heads = l.kv_heads;
  const int64_t width = projections(l), of_query = l.gated == 1 ? 2 : 1, first_key = of_query * heads;  // in heads
  const KvNorm* const norms[] = {&l.query_norm, &l.key_norm, &l.value_norm};
  const bool of_input = l.input_norm.weight.data;
  bf16 *normed = scratch, *projected = scratch + rows * l.hidden;
  if (of_input) norm_rows(x, l.input_norm, rows, l.hidden, normed, true);
  if (l.input_scale != 1.0f)
    for_each_row(rows, [&](int64_t r) { scale_row(l.input_scale, l.hidden, normed + r * l.hidden); });
  InputRows inputs{of_input ? normed : x, rows, l.hidden, l.hidden};
  for (int64_t i = 0, column = 0; i < 4 && l.qkv[i].outputs; column += l.qkv[i++].outputs)
    multiply(l.qkv[i], inputs, numbers<bf16>(l.qkv_bias[i]), projected + column, width);
  for_each_row(rows, [&](int64_t r) {
    const int64_t b = r / tokens, i = r % tokens, angles = (shared_angles ? i : r) * l.rotated;
    bf16 *row = projected + r * width, *keys = row + first_key * dim, *values = keys + kv_heads * dim;
    const auto normalise = [&](const KvNorm& n, bf16* y) { norm_row(y, nullptr, nullptr, n, n.weight.length, y); };
    if (l.values_are_keys) memcpy(values, keys, size_t(kv_heads * dim) * 2);
    if (l.query_norm.weight.length > dim) normalise(l.query_norm, row);
    if (l.key_norm.weight.length > dim) normalise(l.key_norm, keys);
    for (int64_t h = 0; h < heads + 2 * kv_heads; h++) {
      const int part = h < heads ? QUERY : h < heads + kv_heads ? KEY : VALUE;
      const int64_t number = h - (part > QUERY ? heads : 0) - (part > KEY ? kv_heads : 0);
      bf16* head = row + (l.by_head ? 3 * number + part : part == QUERY ? of_query * h : first_key + h - heads) * dim;
      const auto turn = [&] {
        if (part != VALUE) rotate(head, cos + angles, sin + angles, l.rotated, l.rotation);
      };
      if (part == KEY) scale_row(l.key_scale, dim, head);
      if (l.rotates_first) turn();
      if (norms[part]->weight.length == dim) normalise(*norms[part], head);
      clip_row(l.clip, dim, head);
      if (!l.rotates_first) turn();
      bf16* to = part == QUERY ? query + ((b * heads + h) * tokens + i) * dim
                               : (part == KEY ? key : value) + ((b * kv_heads + number) * tokens + i) * dim;
      memcpy(to, head, dim * 2);
      if (part == QUERY && l.gated == 1) memcpy(gate + (r * heads + h) * dim, head + dim, dim * 2);
    }
    if (l.gated == 2) memcpy(gate + r * heads * dim, values + kv_heads * dim, size_t(heads * dim) * 2);
  });
}

// A row that attention or the MLP has returned becomes what is added to the residual.
INLINE void end_row(const KvNorm& norm, float scale, int64_t hidden, bf16* y) {
  if (norm.weight.data) norm_row(y, nullptr, nullptr, norm, hidden, y);
  scale_row(scale, hidden, y);
}

// The same of attention. added: a row that is added to it; or null.
INLINE void end_attention(const KvLayer& l, const bf16* added, bf16* y) {
  end_row(l.post_attention_norm, l.attention_scale, l.hidden, y);
  if (added) add_row(added, l.hidden, y);
}

// Writes attention's output projection. gate: of a gated layer, what attention's output is multiplied by; it is
// written over.
static void run_projection(const KvLayer& l, const bf16* attended, bf16* gate, int64_t rows, bf16* y) {
  const int64_t width = l.heads * l.dim;
  if (l.gated)
    for_each_row(rows, [&](int64_t r) { open_gates(attended + r * width, width, gate + r * width); });
  InputRows attention_rows{l.gated ? gate : attended, rows, width, width};
  multiply(l.out, attention_rows, numbers<bf16>(l.out_bias), y, l.hidden);
}

static void run_before_mlp(const KvLayer& l, const bf16* attended, bf16* gate, const bf16* added, const bf16* residual,
                           int64_t rows, bf16* y, bf16* normed) {
  const int64_t hidden = l.hidden;
  run_projection(l, attended, gate, rows, normed);
  for_each_row(rows, [&](int64_t r) {
    bf16 *out = normed + r * hidden, *to = y + r * hidden;
    end_attention(l, added ? added + r * hidden : nullptr, out);
    if (l.pre_mlp_norm.weight.data) return norm_row(residual + r * hidden, out, to, l.pre_mlp_norm, hidden, out);
    memmove(to, residual + r * hidden, size_t(hidden) * 2);
    add_row(out, hidden, to);
    memcpy(out, to, size_t(hidden) * 2);
  });
}

// Adds what a layer makes of its side input to y, the residual. projected: (rows, hidden); scratch: (3 * rows, side).
static void run_side(const KvLayer& l, const bf16* side, int64_t rows, bf16* y, bf16* projected, bf16* scratch) {
  const int64_t hidden = l.hidden, width = l.side_gate.outputs;
  bf16 *gates = scratch, *gated = scratch + 2 * rows * width;  // beside the gates of a row, its side input
  InputRows residual{y, rows, hidden, hidden};
  multiply<bf16>(l.side_gate, residual, nullptr, gates, 2 * width);
  for_each_row(rows, [&](int64_t r) {
    memcpy(gates + (2 * r + 1) * width, side + r * width, size_t(width) * 2);
    gate_row(gates + 2 * r * width, width, l.side_activation, true, gated + r * width);
  });
  InputRows gated_rows{gated, rows, width, width};
  multiply<bf16>(l.side_projection, gated_rows, nullptr, projected, hidden);
  for_each_row(rows, [&](int64_t r) {
    end_row(l.side_norm, 1.0f, hidden, projected + r * hidden);
    add_row(projected + r * hidden, hidden, y + r * hidden);
  });
}

static void run_after_attention(const KvLayer& l, const bf16* attended, bf16* gate, const bf16* added,
                                const bf16* side, const bf16* residual, int64_t rows, bf16* y, bf16* scratch) {
  const int64_t hidden = l.hidden;
  const bool in_turn = l.order == KV_IN_TURN;
  bf16 *normed = scratch, *of_attention = normed + rows * hidden, *rest = of_attention + !in_turn * rows * hidden;
  if (in_turn) {
    run_before_mlp(l, attended, gate, added, residual, rows, y, normed);
  } else {
    run_projection(l, attended, gate, rows, of_attention);
    for_each_row(rows, [&](int64_t r) {
      end_attention(l, added ? added + r * hidden : nullptr, of_attention + r * hidden);
      norm_row(residual + r * hidden, nullptr, nullptr, l.pre_mlp_norm, hidden, normed + r * hidden);
    });
  }
  MlpPass{*l.mlp, rows}.run(normed, normed, (char*)rest);
  for_each_row(rows, [&](int64_t r) {
    bf16 *out = normed + r * hidden, *to = y + r * hidden;
    end_row(l.post_mlp_norm, l.mlp_scale, hidden, out);
    if (!in_turn) {
      memmove(to, residual + r * hidden, size_t(hidden) * 2);
      add_row(of_attention + r * hidden, hidden, l.order == KV_SUMMED_FIRST ? out : to);
    }
    add_row(out, hidden, to);
  });
  if (l.side_gate.outputs) run_side(l, side, rows, y, normed, rest);
  if (l.output_scale != 1.0f) for_each_row(rows, [&](int64_t r) { scale_row(l.output_scale, hidden, y + r * hidden); });
}

static void add_needs_before(const KvLayer& l, int64_t rows, Needs& needs) {
  for (const KvMatrix& one : l.qkv) add_needs(one, rows, needs);
}
static void add_needs_after(const KvLayer& l, int64_t rows, Needs& needs) {
  add_needs(l.out, rows, needs);
  if (l.mlp) add_needs(*l.mlp, rows, needs);
  add_needs(l.side_gate, rows, needs);
  add_needs(l.side_projection, rows, needs);
}

// ---- the interface of kvkeep.h --------------------------------------------------------------------------------------

static KvStatus before_attention(const KvLayer* l, KvArray x, int64_t batch, KvArray cos, KvArray sin, KvArray query,
                                 KvArray key, KvArray value, KvArray gate) {
  const int64_t rows = x.length / l->hidden, bytes = bytes_before_attention(*l, rows);
  Needs needs;
  add_needs_before(*l, rows, needs);
  needs.add(KV_SCRATCH_LAYER, bytes);
  if (!needs.reserve()) return KV_NO_MEMORY;
  bf16* scratch = (bf16*)kv_scratch(KV_SCRATCH_LAYER, size_t(bytes));
  if (!scratch) return KV_FAILED;
  with_team(rows <= MAX_DIRECT_ROWS, [&] {
    run_before_attention(*l, numbers<bf16>(x), batch, rows / batch, numbers<bf16>(cos), numbers<bf16>(sin),
                         cos.length < rows * l->rotated, numbers<bf16>(query), numbers<bf16>(key), numbers<bf16>(value),
                         numbers<bf16>(gate), scratch);
  });
  return KV_DONE;
}

static KvStatus before_mlp(const KvLayer* l, KvArray attended, KvArray gate, KvArray added, KvArray residual,
                           KvArray y, KvArray normed) {
  const int64_t rows = residual.length / l->hidden;
  Needs needs;
  add_needs(l->out, rows, needs);
  if (!needs.reserve()) return KV_NO_MEMORY;
  with_team(rows <= MAX_DIRECT_ROWS, [&] {
    run_before_mlp(*l, numbers<bf16>(attended), numbers<bf16>(gate), numbers<bf16>(added), numbers<bf16>(residual),
                   rows, numbers<bf16>(y), numbers<bf16>(normed));
  });
  return KV_DONE;
}

static KvStatus after_attention(const KvLayer* l, KvArray attended, KvArray gate, KvArray added, KvArray side,
                                KvArray residual, KvArray y) {
  const int64_t rows = residual.length / l->hidden, bytes = bytes_after_attention(*l, rows);
  Needs needs;
  add_needs_after(*l, rows, needs);
  needs.add(KV_SCRATCH_LAYER, bytes);
  if (!needs.reserve()) return KV_NO_MEMORY;
  bf16* scratch = (bf16*)kv_scratch(KV_SCRATCH_LAYER, size_t(bytes));
  if (!scratch) return KV_FAILED;
  with_team(rows <= MAX_DIRECT_ROWS, [&] {
    run_after_attention(*l, numbers<bf16>(attended), numbers<bf16>(gate), numbers<bf16>(added), numbers<bf16>(side),
                        numbers<bf16>(residual), rows, numbers<bf16>(y), scratch);
  });
  return KV_DONE;
}

static KvStatus run_layers(const KvLayer* const* layers, KvStep* const* const* steps, int64_t count,
                           const int64_t* step_counts, KvArray cos, KvArray sin, KvArray residual, KvArray normed) {
  const KvLayer& l = *layers[0];
  const int64_t tokens = residual.length / l.hidden;
  bf16* x = numbers<bf16>(residual);
  const int64_t queries = l.heads * l.dim, keys = l.kv_heads * l.dim;
  int64_t inside = 0, gates = 0;
  for (int64_t i = 0; i < count; i++) {
    inside = max64(inside, bytes_before_attention(*layers[i], tokens));
    inside = max64(inside, bytes_after_attention(*layers[i], tokens));
    gates = max64(gates, (layers[i]->gated != 0) * queries);
  }
  const int64_t bytes = inside + tokens * ((2 * queries + 2 * keys + gates) * 2 + l.heads * 4);
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
  bf16* gate = value + tokens * keys;                                     // (tokens, heads * dim), of gated layers
  bf16* scratch = gate + tokens * gates;
  with_team(tokens <= MAX_DIRECT_ROWS, [&] {
    for (int64_t i = 0; i < count; i++) {
      const KvLayer& layer = *layers[i];
      run_before_attention(layer, x, tokens, 1, numbers<bf16>(cos), numbers<bf16>(sin), false, query, key, value, gate,
                           scratch);
      run_steps(steps[i], step_counts[i], query, key, value, tokens, l.heads, 1, layer.scaling, layer.cap,
                numbers<float>(layer.sinks), attended, lse);
      if (layer.mlp) run_after_attention(layer, attended, gate, nullptr, nullptr, x, tokens, x, scratch);
      else run_before_mlp(layer, attended, gate, nullptr, x, tokens, x, numbers<bf16>(normed));
    }
  });
  return KV_DONE;
}

}  // namespace
