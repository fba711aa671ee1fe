// The experts of a layer. A pair is a row and an expert that is chosen for it. Pairs lie by expert: a pass reads each
// matrix once. They take each step together: threads share the panels of all experts.
#pragma once

#include "elementwise.h"
#include "matmul.h"

namespace {

constexpr int64_t BATCH_PAIRS = 1024;  // that take their steps together, and have scratch
constexpr int64_t SUM_COLUMNS = 512;   // of a row that a task sums

struct Pair {
  int64_t place;            // of its row and expert in `chosen`
  int64_t tile, tile_rows;  // its tile (inputs.h): the first pair, and how many
};
struct PairsOfExpert { int64_t expert, first, count; };

struct PreparedPairs {  // the inputs of pairs, in tiles that begin anew with each expert
  void* data = nullptr;
  int64_t inputs = 0;
  bool is_rounded = false;
  bool shared = false;  // they are those of one row, for all experts

  void* tile(int64_t pair) const {
    return (char*)data + (shared ? 0 : InputRows::bytes_of(is_rounded, pair, inputs));
  }
  InputRows rows_of(const PairsOfExpert& p) const {
    return {nullptr, p.count, inputs, inputs, tile(p.first), is_rounded};
  }
};

struct ExpertPass {
  const KvExperts& e;
  const bf16* x;          // (rows, hidden)
  const int64_t* chosen;  // (rows, k)
  const float* weights;   // (rows, k)
  bf16* y;                // (rows, hidden)
  int64_t rows, k;
  // In scratch. Of all pairs:
  int64_t* ends = nullptr;          // (experts): behind those of each
  int64_t* places = nullptr;        // (rows * k): as in Pair
  int64_t* pairs_of_row = nullptr;  // (rows, k)
  int64_t* counts = nullptr;        // (rows): of pairs
  float* sums = nullptr;            // (rows, hidden)
  // Of a batch, whose first pair has number 0:
  Pair* pairs = nullptr;            // (batch)
  PairsOfExpert* groups = nullptr;  // (group_count)
  bf16* outputs = nullptr;          // (batch, width): of the first matrices
  bf16* found = nullptr;            // (batch, hidden): of the last one
  int64_t group_count = 0;

  int64_t batch() const { return min64(rows * k, BATCH_PAIRS); }
  int64_t width() const { return (1 + e.gated) * e.inner; }
  int64_t panels_of_expert(const KvMatrix& m) const { return m.outputs / e.experts / PANEL; }
  bool direct() const { return rows <= MAX_DIRECT_ROWS; }

  int64_t scratch_bytes() const {
    return (e.experts + 2 * rows * k + rows) * 8 + rows * e.hidden * 4 +
           batch() * (int64_t(sizeof(Pair) + sizeof(PairsOfExpert)) + (width() + e.hidden) * 2);
  }
  void take(void* scratch) {
    ends = (int64_t*)scratch;
    places = ends + e.experts;
    pairs_of_row = places + rows * k;
    counts = pairs_of_row + rows * k;
    pairs = (Pair*)(counts + rows);
    groups = (PairsOfExpert*)(pairs + batch());
    sums = (float*)(groups + batch());
    outputs = (bf16*)(sums + rows * e.hidden);
    found = outputs + batch() * width();
  }

  // Sorts all pairs by expert; those of an expert, and of a row, stay in their order.
  int64_t sort() {
    memset(ends, 0, size_t(e.experts) * 8);
    memset(counts, 0, size_t(rows) * 8);
    for (int64_t i = 0; i < rows * k; i++)
      if (exists(chosen[i])) ends[chosen[i]]++;
    int64_t count = 0;
    for (int64_t i = 0; i < e.experts; i++) { const int64_t more = ends[i]; ends[i] = count; count += more; }
    for (int64_t i = 0; i < rows * k; i++)
      if (exists(chosen[i])) places[ends[chosen[i]]++] = i;
    for (int64_t i = 0; i < count; i++) {
      const int64_t row = places[i] / k;
      pairs_of_row[row * k + counts[row]++] = i;
    }
    return count;
  }
  bool exists(int64_t expert) const { return expert >= 0 && expert < e.experts; }

  void find_groups(int64_t first, int64_t last) {
    group_count = 0;
    for (int64_t i = 0; i < e.experts; i++) {
      const int64_t begin = max64(first, i ? ends[i - 1] : 0), count = min64(last, ends[i]) - begin;
      if (count <= 0) continue;
      groups[group_count++] = {i, begin - first, count};
      for (int64_t r = 0; r < count; r++) {
        const int64_t before = r / ROW_TILE * ROW_TILE;
        pairs[begin - first + r] = {places[begin + r], begin - first + before, min64(ROW_TILE, count - before)};
      }
    }
  }

  // Returns the rows row_of(pair) of `count` pairs as a matrix reads them.
  template <class F>
  PreparedPairs prepare(const KvMatrix& m, int64_t count, bool shared, const F& row_of) {
    const bool round = has_blocks(m.kind);
    const size_t bytes = size_t(InputRows::bytes_of(round, count, m.inputs));
    const PreparedPairs made{kv_scratch(InputRows::kind_of(round), bytes), m.inputs, round, shared};
    if (made.data)
      parallel_for(count, [&](int64_t i) {
        const Pair one = shared ? Pair{0, 0, 1} : pairs[i];
        prepare_row(row_of(i), m.inputs, round, made.tile(one.tile), i - one.tile, one.tile_rows);
      });
    return made;
  }

  // Multiplies by all experts' parts of matrices that lie side by side. width: their outputs of an expert.
  void multiply_all(const KvMatrix* matrices, const PreparedPairs* inputs, const bf16* bias, bf16* out, int64_t width) {
    if (!inputs->data) return;
    const int64_t panels = width / PANEL, total = group_count * panels;
    const int64_t tasks = product_tasks(total, panel_bytes(matrices->kind, matrices->inputs), direct());
    parallel_for(tasks, [&](int64_t t) {
      for (int64_t at = total * t / tasks, last = total * (t + 1) / tasks; at < last;) {
        const PairsOfExpert& group = groups[at / panels];
        int64_t panel = at % panels, column = 0, i = 0, count = panels_of_expert(matrices[0]);
        for (; panel >= count; count = panels_of_expert(matrices[++i])) { panel -= count; column += count * PANEL; }
        KvMatrix part = matrices[i];
        part.outputs = count * PANEL;
        part.panels.data = numbers<uint8_t>(part.panels) + group.expert * count * panel_bytes(part.kind, part.inputs);
        const int64_t end = min64(count, panel + last - at);
        multiply_panels(part, panel, end, inputs[i].rows_of(group),
                        bias ? bias + group.expert * width + column : nullptr, out + group.first * width + column,
                        width);
        at += end - panel;
      }
    });
  }

  // Replaces what the first matrices return of a pair by the inputs of the last one.
  void activate(bf16* row) const {
    const bf16 *gates = numbers<bf16>(e.gate_values), *ups = numbers<bf16>(e.up_values);
    for (int64_t i = 0; i < e.inner; i++) {
      row[i] = gates[row[i]];
      if (!e.gated) continue;
      const bf16 up = row[e.inner + i];
      row[i] = narrow(widen(row[i]) * widen(ups ? ups[up] : up));
    }
  }

  // Adds what the batch of pairs first .. last - 1 has found to columns of a row, in the order of experts.
  void add_columns(int64_t row, int64_t begin, int64_t end, int64_t first, int64_t last) {
    float* sum = sums + row * e.hidden;
    bf16 rounded[16];
    for (int64_t i = 0; i < counts[row]; i++) {
      const int64_t pair = pairs_of_row[row * k + i];
      if (pair < first || pair >= last) continue;
      const bf16* from = found + (pair - first) * e.hidden;
      const vf weight = vset(weights[places[pair]]);
      for (int64_t c = begin; c < end; c += 16) {
        vstore_bf16(rounded, vload_bf16(from + c) * weight);
        vstore(sum + c, vload(sum + c) + vload_bf16(rounded));
      }
    }
  }

  void run() {
    memset(sums, 0, size_t(rows * e.hidden) * 4);
    const int64_t all = sort(), blocks = (e.hidden + SUM_COLUMNS - 1) / SUM_COLUMNS;
    for (int64_t first = 0; first < all; first += BATCH_PAIRS) {
      const int64_t last = min64(all, first + BATCH_PAIRS), count = last - first;
      find_groups(first, last);
      PreparedPairs inputs[2];
      const auto from_x = [&](int64_t i) { return x + (rows == 1 ? 0 : pairs[i].place / k) * e.hidden; };
      for (int i = 0; i < 2 && e.gates[i].outputs; i++)
        inputs[i] = i && has_blocks(e.gates[1].kind) == inputs[0].is_rounded
                        ? inputs[0]
                        : prepare(e.gates[i], rows == 1 ? 1 : count, rows == 1, from_x);
      multiply_all(e.gates, inputs, numbers<bf16>(e.gates_bias), outputs, width());
      const PreparedPairs inner = prepare(e.down, count, false, [&](int64_t i) {
        activate(outputs + i * width());
        return outputs + i * width();
      });
      multiply_all(&e.down, &inner, numbers<bf16>(e.down_bias), found, e.hidden);
      parallel_for(rows * blocks, [&](int64_t task) {
        const int64_t begin = task % blocks * SUM_COLUMNS;
        add_columns(task / blocks, begin, min64(e.hidden, begin + SUM_COLUMNS), first, last);
      });
    }
    for_each_row(rows, [&](int64_t r) {
      for (int64_t c = r * e.hidden; c < (r + 1) * e.hidden; c += 16) vstore_bf16(y + c, vload(sums + c));
    });
  }
};

static void add_needs(const KvExperts& e, int64_t pairs, Needs& needs) {
  for (const KvMatrix& one : e.gates) add_needs(one, min64(pairs, BATCH_PAIRS), needs);
  add_needs(e.down, min64(pairs, BATCH_PAIRS), needs);
}

static KvStatus run_experts(const KvExperts* e, KvArray x, KvArray chosen, KvArray weights, KvArray y) {
  const int64_t rows = x.length / e->hidden;
  if (!rows) return KV_DONE;
  ExpertPass pass{*e, numbers<bf16>(x), numbers<int64_t>(chosen), numbers<float>(weights), numbers<bf16>(y), rows,
                  chosen.length / rows};
  Needs needs;
  add_needs(*e, rows * pass.k, needs);
  needs.add(KV_SCRATCH_LAYER, pass.scratch_bytes());
  if (!needs.reserve()) return KV_NO_MEMORY;
  void* scratch = kv_scratch(KV_SCRATCH_LAYER, size_t(pass.scratch_bytes()));
  if (!scratch) return KV_FAILED;
  pass.take(scratch);
  with_team(pass.direct(), [&] { pass.run(); });
  return KV_DONE;
}

}  // namespace
