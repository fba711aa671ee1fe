// Routers of mixtures: which experts a row goes to, and with which weights. A row depends on no other.
#pragma once

#include "elementwise.h"
#include "matmul.h"

namespace {

struct RouterPass {
  const KvRouter& r;
  int64_t rows;
  // In scratch, of each row:
  float* scores = nullptr;    // (padded): of each expert; then zeros
  float* choice = nullptr;    // (padded): the same, as they are compared
  bf16* products = nullptr;   // (experts)
  uint8_t* taken = nullptr;   // (experts): it is chosen, or in a group that is left out

  int64_t experts() const { return r.weight.outputs; }
  int64_t padded() const { return (experts() + 15) / 16 * 16; }
  int64_t scratch_bytes() const { return rows * padded() * (4 + 4 + 2 + 1); }
  void take(void* scratch) {
    scores = (float*)scratch;
    choice = scores + rows * padded();
    products = (bf16*)(choice + rows * padded());
    taken = (uint8_t*)(products + rows * padded());
  }

  // x: (rows, hidden). logits: (rows, experts). weights, chosen: (rows, k).
  void run(const bf16* x, float* logits, float* weights, int64_t* chosen) {
    const int64_t count = experts(), hidden = r.weight.inputs;
    InputRows inputs{x, rows, hidden, hidden};
    if (r.weight.kind == KV_F32) multiply(r.weight, inputs, numbers<float>(r.bias), logits, count);
    else multiply(r.weight, inputs, numbers<bf16>(r.bias), products, count);
    for_each_row(rows, [&](int64_t row) {
      float* of_row = logits + row * count;
      if (r.weight.kind != KV_F32)
        for (int64_t i = 0; i < count; i++) of_row[i] = widen(products[row * count + i]);
      choose(of_row, row * padded(), weights + row * r.k, chosen + row * r.k);
    });
  }

 private:
  void choose(const float* logits, int64_t at, float* weights, int64_t* chosen) const {
    float *score = scores + at, *order = choice + at;
    uint8_t* is_taken = taken + at;
    find_scores(logits, score);
    for (int64_t i = 0; i < experts(); i++) score[i] = rounded(score[i], 2);
    const float* added = numbers<float>(r.choice_bias);
    for (int64_t i = 0; i < experts(); i++) order[i] = added ? score[i] + added[i] : score[i];
    memset(is_taken, 0, size_t(experts()));
    if (r.groups > 1) leave_groups(order, is_taken);
    float total = 0;
    for (int64_t j = 0; j < r.k; j++) {  // of equal ones the first
      int64_t best = -1;
      for (int64_t i = 0; i < experts(); i++)
        if (!is_taken[i] && (best < 0 || order[i] > order[best])) best = i;
      is_taken[best] = 1;
      chosen[j] = best;
      weights[j] = score[best];
      total = total + weights[j];
    }
    total = rounded(total, 2);
    for (int64_t j = 0; j < r.k; j++) {
      if (r.normalised) weights[j] = rounded(weights[j] / total, 2);
      weights[j] = rounded(weights[j] * r.scale, 1);
    }
  }

  // A number that routers round which have at least this value of `rounded`.
  float rounded(float x, int64_t from) const { return r.rounded >= from ? widen(narrow(x)) : x; }

  // Marks the experts of all groups but those of the greatest scores as taken.
  void leave_groups(const float* order, uint8_t* is_taken) const {
    const int64_t size = experts() / r.groups;
    memset(is_taken, 1, size_t(experts()));
    for (int64_t taken = 0; taken < r.taken_groups; taken++) {
      int64_t best = -1;
      float greatest = 0;
      for (int64_t first = 0; first < experts(); first += size) {
        if (!is_taken[first]) continue;
        const float score = score_of_group(order + first, size);
        if (best < 0 || score > greatest) { best = first; greatest = score; }
      }
      memset(is_taken + best, 0, size_t(size));
    }
  }
  float score_of_group(const float* order, int64_t size) const {
    float first = order[0], second = as_float(0xff800000);
    for (int64_t i = 1; i < size; i++) {
      if (order[i] > first) { second = first; first = order[i]; }
      else if (order[i] > second) second = order[i];
    }
    return r.group_scores == 2 ? first + second : first;
  }

  void find_scores(const float* logits, float* score) const {
    float greatest = logits[0];
    for (int64_t i = 1; i < experts(); i++) greatest = logits[i] > greatest ? logits[i] : greatest;
    memcpy(score, logits, size_t(experts()) * 4);
    for (int64_t i = experts(); i < padded(); i++) score[i] = as_float(0xff800000);  // whose exponential is 0
    vf total = vset(0.0f);
    for (int64_t i = 0; i < padded(); i += 16) {
      const vf x = vload(score + i), made = r.scores == KV_SIGMOID ? sigmoid(x) : vexp(x - vset(greatest));
      vstore(score + i, made);
      total = total + made;
    }
    if (r.scores == KV_SIGMOID) return;
    const vf all = vset(sum(total));
    for (int64_t i = 0; i < padded(); i += 16) vstore(score + i, vload(score + i) / all);
  }
};

static KvStatus route(const KvRouter* r, KvArray x, KvArray logits, KvArray weights, KvArray chosen) {
  RouterPass pass{*r, x.length / r->weight.inputs};
  if (!pass.rows) return KV_DONE;
  Needs needs;
  add_needs(r->weight, pass.rows, needs);
  needs.add(KV_SCRATCH_LAYER, pass.scratch_bytes());
  if (!needs.reserve()) return KV_NO_MEMORY;
  void* scratch = kv_scratch(KV_SCRATCH_LAYER, size_t(pass.scratch_bytes()));
  if (!scratch) return KV_FAILED;
  pass.take(scratch);
  with_team(pass.rows <= MAX_DIRECT_ROWS, [&] {
    pass.run(numbers<bf16>(x), numbers<float>(logits), numbers<float>(weights), numbers<int64_t>(chosen));
  });
  return KV_DONE;
}

}  // namespace
