// What follows the attention of a layer: an MLP, a mixture of experts, or both.
#pragma once

#include "elementwise.h"
#include "experts.h"
#include "matmul.h"
#include "router.h"

namespace {

// A router, and then its experts.
struct MixturePass {
  RouterPass router;
  ExpertPass experts;

  MixturePass(const KvMlp& m, int64_t rows)
      : router{*m.router, rows}, experts{*m.experts, nullptr, nullptr, nullptr, nullptr, rows, m.router->k} {}

  int64_t scratch_bytes() const {
    return 64 + router.rows * (router.r.k * 16 + router.experts() * 4) + router.scratch_bytes() + 64 +
           experts.scratch_bytes();
  }
  // Writes the sum of what the experts return. x, y: (rows, hidden); they may be the same.
  void run(const bf16* x, bf16* y, char* scratch) {
    int64_t* chosen = (int64_t*)aligned(scratch);
    float* weights = (float*)(chosen + router.rows * router.r.k);
    float* logits = weights + router.rows * router.r.k;
    float* beside = logits + router.rows * router.experts();
    router.take(beside);
    router.run(x, logits, weights, chosen);
    experts.x = x;
    experts.y = y;
    experts.chosen = chosen;
    experts.weights = weights;
    experts.take(aligned((char*)beside + router.scratch_bytes()));
    experts.run();
  }
  static char* aligned(char* at) { return at + (64 - uintptr_t(at) % 64) % 64; }
};

struct MlpPass {
  const KvMlp& m;
  int64_t rows;

  int64_t width() const { return (1 + m.gated) * m.inner; }
  int64_t beside() const { return m.router && m.inner ? rows * m.hidden : 0; }  // what the MLP beside a mixture returns
  int64_t scratch_bytes() const {
    return 2 * beside() + max64(m.inner ? rows * (width() + m.inner + 1) * 2 : 0,
                                m.router ? MixturePass(m, rows).scratch_bytes() : 0);
  }
  // x, y: (rows, hidden); they may be the same.
  void run(const bf16* x, bf16* y, char* scratch) const {
    bf16* of_mlp = m.router ? (bf16*)scratch : y;
    if (m.inner) run_mlp(x, of_mlp, (bf16*)scratch + beside());
    if (!m.router) return;
    MixturePass(m, rows).run(x, y, scratch + 2 * beside());
    if (m.inner) for_each_row(rows, [&](int64_t r) { add_row(of_mlp + r * m.hidden, m.hidden, y + r * m.hidden); });
  }

 private:
  void run_mlp(const bf16* x, bf16* y, bf16* scratch) const {
    bf16 *gates = scratch, *gated = gates + rows * width(), *shares = gated + rows * m.inner;
    InputRows inputs{x, rows, m.hidden, m.hidden};
    for (int64_t i = 0, column = 0; i < 2 && m.gates[i].outputs; column += m.gates[i++].outputs)
      multiply(m.gates[i], inputs, numbers<bf16>(m.gates_bias[i]), gates + column, width());
    if (m.share.outputs) multiply<bf16>(m.share, inputs, nullptr, shares, 1);
    for_each_row(rows, [&](int64_t r) {
      scale_row(m.gate_scale, m.inner, gates + r * width());
      gate_row(gates + r * width(), m.inner, m.activation, m.gated, gated + r * m.inner);
    });
    InputRows down_rows{gated, rows, m.inner, m.inner};
    multiply(m.down, down_rows, numbers<bf16>(m.down_bias), y, m.hidden);
    if (!m.share.outputs && m.scale == 1.0f) return;
    for_each_row(rows, [&](int64_t r) {
      scale_row(m.scale, m.hidden, y + r * m.hidden);
      if (!m.share.outputs) return;
      bf16 share[16];
      vstore_bf16(share, sigmoid(vset(widen(shares[r]))));
      scale_row(widen(share[0]), m.hidden, y + r * m.hidden);
    });
  }
};

static void add_needs(const KvMlp& m, int64_t rows, Needs& needs) {
  for (const KvMatrix& one : m.gates) add_needs(one, rows, needs);
  add_needs(m.down, rows, needs);
  add_needs(m.share, rows, needs);
  if (!m.router) return;
  add_needs(m.router->weight, rows, needs);
  add_needs(*m.experts, rows * m.router->k, needs);
}

static KvStatus mlp(const KvMlp* m, KvArray x, KvArray y) {
  const MlpPass pass{*m, x.length / m->hidden};
  if (!pass.rows) return KV_DONE;
  Needs needs;
  add_needs(*m, pass.rows, needs);
  needs.add(KV_SCRATCH_LAYER, pass.scratch_bytes());
  if (!needs.reserve()) return KV_NO_MEMORY;
  char* scratch = (char*)kv_scratch(KV_SCRATCH_LAYER, size_t(pass.scratch_bytes()));
  if (!scratch) return KV_FAILED;
  with_team(pass.rows <= MAX_DIRECT_ROWS, [&] { pass.run(numbers<bf16>(x), numbers<bf16>(y), scratch); });
  return KV_DONE;
}

}  // namespace
