// Attention over entries that lie in pieces: blocks (blocks.h) combined in order, and how the work is shared.
#pragma once

#include "blocks.h"
#include "insert.h"
#include "kvkeep.h"
#include "runtime.h"

namespace {

constexpr int64_t MIN_PARALLEL_PRODUCTS = 1 << 16;  // with fewer, one thread is faster than several
constexpr int64_t MAX_MIXES_BYTES = 8 << 20;        // of the mixes of all blocks, where blocks are tasks

// Runs body(task) of all tasks: by one thread where there are few products.
template <class F> INLINE void run_tasks(int64_t count, int64_t products, const F& body) {
  if (products < MIN_PARALLEL_PRODUCTS) {
    for (int64_t task = 0; task < count; task++) body(task);
    return;
  }
  parallel_for(count, body);
}

static const float NO_VALUES[KV_MAX_DIM] = {};

// Combines the softmax and the mix of further blocks, `more` and `mix`, into those so far.
static void combine(Softmax& into, float* out, const Softmax& more, const float* mix, int64_t dim) {
  if (more.maximum == MINUS_INFINITY) return;
  if (into.maximum == MINUS_INFINITY) {
    into = more;
    memcpy(out, mix, size_t(dim * 4));
    return;
  }
  const float highest = into.maximum > more.maximum ? into.maximum : more.maximum;
  const float scale = exp1(into.maximum - highest), more_scale = exp1(more.maximum - highest);
  into.sum = into.sum * scale + more.sum * more_scale;
  into.maximum = highest;
  for (int64_t d = 0; d < dim; d++) out[d] = out[d] * scale + mix[d] * more_scale;
}

struct AttentionJob {  // the arguments of kvkeep_attend
  const KvAttention* attention;
  void* out;
  int float_out;
  float *lse, *state;
  int resume;
  int64_t token_heads = 0;  // `place_of`, of out and lse as well

  int64_t rows() const { return attention->groups * attention->queries; }
  int64_t parts() const { return (rows() + PART_ROWS - 1) / PART_ROWS; }
  int64_t products() const {
    const int64_t window = attention->window ? attention->window : attention->entries;
    return attention->lanes * rows() * min64(attention->entries, window) * (attention->dim + attention->value_dim);
  }
  Softmax* softmax_so_far() const { return (Softmax*)state; }
  float* mixes_so_far() const { return state + attention->lanes * rows() * 2; }

  // The numbers of the first block of a lane, and of the one behind its last.
  int64_t first_block(int64_t lane) const {
    return block_of(first_seen(*attention, lane, 0) + shift_of(*attention, lane));
  }
  int64_t stop_block(int64_t lane) const {
    return max64(first_block(lane), block_of(attention->entries - 1 + shift_of(*attention, lane))) + 1;
  }
  int64_t blocks() const {  // of the lane that has the most
    int64_t longest = 1;
    for (int64_t lane = 0; lane < attention->lanes; lane++)
      longest = max64(longest, stop_block(lane) - first_block(lane));
    return longest;
  }

  // Writes the result of row number `row` of all lanes, once its sink is combined with all blocks.
  void finish(Softmax softmax, float* mix, int64_t row) const {
    const int64_t dim = attention->value_dim, place = place_of(*attention, token_heads, row);
    const KvArray& sinks = attention->sinks;
    if (sinks.data)
      combine(softmax, mix, {numbers<float>(sinks)[row / attention->queries % sinks.length], 1.0f}, NO_VALUES, dim);
    const bool empty = softmax.maximum == MINUS_INFINITY;
    lse[place] = empty ? MINUS_INFINITY : softmax.maximum + log1(softmax.sum);
    const float factor = empty ? 0.0f : 1.0f / softmax.sum;
    auto value = [&](int64_t d) { return empty ? 0.0f : mix[d] * factor; };
    int64_t d = 0;
    if (float_out) {
      for (; d < dim; d++) ((float*)out)[place * dim + d] = value(d);
      return;
    }
    bf16* to = (bf16*)out + place * dim;
    if (!empty)
      for (; d + 16 <= dim; d += 16) vstore_bf16(to + d, vload(mix + d) * vset(factor));
    for (; d < dim; d++) to[d] = narrow(value(d));
  }
};

// Attends for a part of a lane's rows, over all blocks in order.
static void attend_part(const AttentionJob& job, int64_t lane, int64_t part) {
  const KvAttention& a = *job.attention;
  const int64_t dim = a.value_dim, row = part * PART_ROWS, rows = min64(PART_ROWS, job.rows() - row);
  const int64_t start = lane * job.rows() + row;
  Softmax local[PART_ROWS];
  Softmax* softmax = job.state ? job.softmax_so_far() + start : local;
  float* mixes = job.state ? job.mixes_so_far() + start * dim
                           : (float*)kv_scratch(KV_SCRATCH_MIXES, size_t(rows * dim * 4));
  if (!mixes) return;
  if (!job.state)
    for (int64_t r = 0; r < rows; r++) local[r] = {MINUS_INFINITY, 0.0f};
  BlockAttention part_rows(a, lane, row, rows, job.token_heads);
  for (int64_t block = job.first_block(lane), stop = job.stop_block(lane); block < stop; block++)
    part_rows.attend(block, [&](int64_t r, const Softmax& more, const float* mix) {
      combine(softmax[r], mixes + r * dim, more, mix, dim);
    });
  if (job.out)
    for (int64_t r = 0; r < rows; r++) job.finish(softmax[r], mixes + r * dim, start + r);
}

static size_t bytes_by_blocks(const AttentionJob& job) {
  const size_t bytes = size_t(job.attention->value_dim) * 4 + sizeof(Softmax);
  return size_t(job.attention->lanes * job.rows() * job.blocks()) * bytes;
}

// Attends with blocks as tasks, where there are few rows; then combines them in order.
static void attend_blocks(const AttentionJob& job) {
  const KvAttention& a = *job.attention;
  const int64_t rows = job.rows(), dim = a.value_dim, blocks = job.blocks(), all = a.lanes * rows;
  float* mixes = (float*)kv_scratch(KV_SCRATCH_BLOCKS, bytes_by_blocks(job));
  if (!mixes) return;
  Softmax* found = (Softmax*)(mixes + all * blocks * dim);
  for (int64_t i = 0; i < all * blocks; i++) found[i] = {MINUS_INFINITY, 0.0f};
  run_tasks(a.lanes * blocks, job.products(), [&](int64_t task) {
    const int64_t lane = task / blocks, block = task % blocks;
    for (int64_t row = 0; row < rows; row += PART_ROWS) {
      BlockAttention part_rows(a, lane, row, min64(PART_ROWS, rows - row), job.token_heads);
      part_rows.attend(job.first_block(lane) + block, [&](int64_t r, const Softmax& softmax, const float* mix) {
        const int64_t place = (lane * rows + row + r) * blocks + block;
        found[place] = softmax;
        memcpy(mixes + place * dim, mix, size_t(dim * 4));
      });
    }
  });
  for (int64_t r = 0; r < all; r++) {
    const Softmax* of_row = found + r * blocks;
    float* mixes_of_row = mixes + r * blocks * dim;
    Softmax local = of_row[0];
    Softmax& softmax = job.state ? job.softmax_so_far()[r] : local;
    float* mix = job.state ? job.mixes_so_far() + r * dim : mixes_of_row;
    for (int64_t block = job.state ? 0 : 1; block < blocks; block++)
      combine(softmax, mix, of_row[block], mixes_of_row + block * dim, dim);
    if (job.out) job.finish(softmax, mix, r);
  }
}

struct PartTask {
  const AttentionJob* job;
  int64_t lane, part;
};

// Sums of some attentions, which say how their work is shared and what they need.
struct Work {
  int64_t parts = 0, blocks = 1, products = 0;  // `blocks`: of the longest
  size_t mixes = 0;                             // bytes of the mixes of blocks, of the largest
  Needs& needs;

  explicit Work(Needs& needs) : needs(needs) {}
  void add(const AttentionJob& job) {
    const KvAttention& a = *job.attention;
    parts += a.lanes * job.parts();
    products += job.products();
    blocks = max64(blocks, job.blocks());
    mixes = size_t(max64(int64_t(mixes), int64_t(bytes_by_blocks(job))));
    add_needs(a, needs);
    needs.add(KV_SCRATCH_MIXES, min64(PART_ROWS, job.rows()) * a.value_dim * 4);
  }
  // Whether tasks are blocks, because parts of the rows of a lane are too few for all threads.
  bool by_blocks() const { return mixes <= size_t(MAX_MIXES_BYTES) && parts < 4 * kv_threads() && blocks > 1; }
  void end() const {
    needs.add(KV_SCRATCH_TASKS, parts * int64_t(sizeof(PartTask)));  // always: in a team, there may be fewer threads
    if (by_blocks()) needs.add(KV_SCRATCH_BLOCKS, int64_t(mixes));
  }
};

// Runs some attentions, whose needs are reserved.
static void attend_jobs(const AttentionJob* jobs, int64_t count) {
  Needs needs;
  Work work(needs);
  for (int64_t j = 0; j < count; j++) {
    const AttentionJob& job = jobs[j];
    work.add(job);
    if (job.state && !job.resume)
      for (int64_t r = 0; r < job.attention->lanes * job.rows(); r++)
        job.softmax_so_far()[r] = {MINUS_INFINITY, 0.0f};
  }
  if (work.by_blocks()) {
    for (int64_t j = 0; j < count; j++) attend_blocks(jobs[j]);
    return;
  }
  PartTask* tasks = (PartTask*)kv_scratch(KV_SCRATCH_TASKS, size_t(work.parts) * sizeof(PartTask));
  if (!tasks) return;
  PartTask* task = tasks;
  for (int64_t j = 0; j < count; j++)
    for (int64_t lane = 0; lane < jobs[j].attention->lanes; lane++)
      for (int64_t part = 0; part < jobs[j].parts(); part++) *task++ = {jobs + j, lane, part};
  run_tasks(work.parts, work.products, [&](int64_t t) {
    attend_part(*tasks[t].job, tasks[t].lane, tasks[t].part);
  });
}

// Writes what the entries of one block of a lane received.
static void receive_block(const KvAttention& a, const float* lse, int64_t last, bool reduce_max, float* out,
                          int64_t lane, int64_t block) {
  const int64_t rows = a.groups * a.queries, base = block * BLOCK_ENTRIES;
  const int64_t entries = min64(BLOCK_ENTRIES, a.entries - base);
  float* into = out + lane * a.entries + base;
  for (int64_t i = 0; i < entries; i++) into[i] = 0.0f;
  for (int64_t row = 0; row < rows; row += PART_ROWS) {
    const int64_t count = min64(PART_ROWS, rows - row);
    const Span span = seen_by_last_queries(a, lane, row, count, last, base);
    if (span.low >= span.high) continue;
    BlockAttention part_rows(a, lane, row, count);
    part_rows.receive(base, entries, lse + lane * rows + row, last, reduce_max, into);
  }
  if (!reduce_max)
    for (int64_t i = 0; i < entries; i++) into[i] /= float(a.groups);
}

// ---- the interface of kvkeep.h --------------------------------------------------------------------------------------

static KvStatus attend(const KvAttention* a, KvArray out, KvArray lse, KvArray state, int resume) {
  const AttentionJob job{a, out.data, out.type == KV_FLOAT32, numbers<float>(lse), numbers<float>(state), resume};
  Needs needs;
  Work work(needs);
  work.add(job);
  work.end();
  if (!needs.reserve()) return KV_NO_MEMORY;
  attend_jobs(&job, 1);
  return KV_DONE;
}

static KvStatus received(const KvAttention* a, KvArray lse, int64_t last, int reduce_max, KvArray out) {
  Needs needs;
  add_needs(*a, needs);
  if (!needs.reserve()) return KV_NO_MEMORY;
  const int64_t blocks = (a->entries + BLOCK_ENTRIES - 1) / BLOCK_ENTRIES;
  run_tasks(a->lanes * blocks, a->lanes * a->groups * a->queries * a->entries * a->dim, [&](int64_t task) {
    receive_block(*a, numbers<float>(lse), last, reduce_max != 0, numbers<float>(out), task / blocks, task % blocks);
  });
  return KV_DONE;
}

static int64_t lanes_of_token(const KvStep& step) {
  return step.token_lanes ? step.token_lanes : step.attention.lanes;
}

// Adds what the steps of a layer need; it writes their groups.
static void add_needs(KvStep* const* steps, int64_t count, int64_t heads, Needs& needs) {
  needs.add(KV_SCRATCH_JOBS, count * int64_t(sizeof(AttentionJob)));
  Work work(needs);
  for (int64_t i = 0; i < count; i++) {
    KvAttention& a = steps[i]->attention;
    a.groups = heads / lanes_of_token(*steps[i]);
    work.add({&a, nullptr, 0, nullptr, nullptr, 0});
  }
  work.end();
}

// Runs the steps of a layer, whose needs are reserved.
static void run_steps(KvStep* const* steps, int64_t count, const bf16* query, const bf16* key, const bf16* value,
                      int64_t tokens, int64_t heads, int by_token, float scaling, float cap, const float* sinks,
                      bf16* out, float* lse) {
  AttentionJob* jobs = (AttentionJob*)kv_scratch(KV_SCRATCH_JOBS, size_t(count) * sizeof(AttentionJob));
  if (!jobs) return;
  int64_t wanted = 0;  // the largest number of lanes of a step whose received attention is wanted
  for (int64_t i = 0; i < count; i++) {
    KvAttention& a = steps[i]->attention;
    const int64_t token = steps[i]->token, first = steps[i]->first_lane, lanes = lanes_of_token(*steps[i]);
    const int64_t row = token * heads + first * a.groups;
    a.query.data = (void*)(query + row * a.dim);
    a.scaling = scaling;
    a.cap = cap;
    a.sinks = sinks ? KvArray{(void*)(sinks + first * a.groups), a.lanes * a.groups, KV_FLOAT32} : KvArray{};
    jobs[i] = {&a, out + row * a.value_dim, 0, lse + row, nullptr, 0, heads};
    if (steps[i]->received.data) wanted = max64(wanted, a.lanes);
    KvInsert insert = steps[i]->insert;
    void* const evicted = insert.evicted_keys.numbers.data;
    const int64_t first_evicting = token + a.queries - steps[i]->evicts;
    for (int64_t at = token; at < token + a.queries; at++, insert.column++, insert.new_slot++) {
      insert.evicted_keys.numbers.data = at < first_evicting ? nullptr : evicted;
      insert.evicted_row += at > first_evicting;
      for (int64_t lane = 0; lane < a.lanes; lane++) {
        const int64_t place = by_token ? at * lanes + first + lane : (first + lane) * tokens + at;
        const bf16 *new_key = key + place * a.dim, *new_value = value + place * a.value_dim;
        insert_in_lane(insert, lane, (const char*)new_key, (const char*)new_value);
      }
    }
    steps[i]->written = steps[i]->number;
  }
  attend_jobs(jobs, count);
  if (!wanted) return;
  parallel_for(count * wanted, [&](int64_t task) {
    const KvStep& step = *steps[task / wanted];
    const int64_t lane = task % wanted;
    if (!step.received.data || lane >= step.attention.lanes) return;
    const float* lse_of_step = jobs[task / wanted].lse;
    const int64_t blocks = (step.attention.entries + BLOCK_ENTRIES - 1) / BLOCK_ENTRIES;
    for (int64_t block = 0; block < blocks; block++)
      receive_block(step.attention, lse_of_step, 1, step.reduce_max != 0, numbers<float>(step.received), lane, block);
  });
}

static KvStatus attend_sessions(KvStep* const* steps, int64_t count, KvArray query, KvArray key, KvArray value,
                                int64_t tokens, int64_t heads, int by_token, float scaling, float cap, KvArray sinks,
                                KvArray out, KvArray lse) {
  Needs needs;
  add_needs(steps, count, heads, needs);
  if (!needs.reserve()) return KV_NO_MEMORY;
  run_steps(steps, count, numbers<bf16>(query), numbers<bf16>(key), numbers<bf16>(value), tokens, heads, by_token,
            scaling, cap, numbers<float>(sinks), numbers<bf16>(out), numbers<float>(lse));
  return KV_DONE;
}

}  // namespace
