// The rules that calls must keep (checks.h). Lengths are those that the caller states; all else is compared with them.

#include <initializer_list>

#include "checks.h"
#include "numbers.h"
#include "panels.h"

namespace {

typedef __int128 Wide;  // products of sizes do not overflow it

thread_local const char* broken_rule = "";

#define RULE(holds, sentence)  \
  do {                         \
    if (!(holds)) {            \
      broken_rule = sentence;  \
      return false;            \
    }                          \
  } while (false)

// ---- arrays and rows ------------------------------------------------------------------------------------------------

bool has(const KvArray& array) { return array.type != KV_NOTHING; }

// Whether there are `needed` numbers of a type; there may be more.
bool holds(const KvArray& array, int64_t type, Wide needed) {
  return array.type == type && needed >= 0 && needed <= array.length && array.length <= MAX_SIZE &&
         (array.data || !needed);
}
bool holds_or_nothing(const KvArray& array, int64_t type, Wide needed) {
  return has(array) ? holds(array, type, needed) : !array.data;
}

// Whether rows lie within their numbers.
bool lie_within(const KvRows& r) {
  if (!is_size(r.lanes) || !is_size(r.rows) || !is_size(r.width)) return false;
  if (!is_size(r.lane_stride) || !is_size(r.row_stride) || !size_of(r.numbers.type)) return false;
  const bool none = !r.lanes || !r.rows || !r.width;
  const Wide end = Wide(r.lanes - 1) * r.lane_stride + Wide(r.rows - 1) * r.row_stride + r.width;
  return holds(r.numbers, r.numbers.type, none ? 0 : end);
}
bool lie_within(const KvRows& r, int64_t type, int64_t width) {
  return r.numbers.type == type && r.width == width && lie_within(r);
}

// ---- entries --------------------------------------------------------------------------------------------------------

bool rows_of_entries_fit(const KvPiece& p, const KvRows& rows) { return p.first + p.entries <= rows.rows; }

bool plain_fits(const KvPiece& p, int64_t dim, int64_t value_dim) {
  RULE(lie_within(p.keys.rows, KV_BFLOAT16, dim), "keys must be bfloat16 rows as wide as the query");
  RULE(lie_within(p.values.rows, KV_BFLOAT16, value_dim), "values must be bfloat16 rows as wide as the output");
  RULE(rows_of_entries_fit(p, p.keys.rows) && rows_of_entries_fit(p, p.values.rows),
       "entries of a span must lie within the rows of its keys and values");
  return true;
}

bool scales_fit(const KvSide& side, int64_t lanes, int64_t rows, int64_t width) {
  for (const KvRows* one : {&side.scale, &side.offset})
    if (!lie_within(*one, KV_FLOAT16, width) || one->lanes < lanes || one->rows < rows) return false;
  return true;
}

bool group_of_codes_fits(const KvSide& side, int64_t dim) {
  const int64_t bits = side.bits;
  if (bits != 2 && bits != 4 && bits != 8 && bits != 16) return false;
  const int64_t type = bits == 16 ? KV_INT16 : KV_UINT8, codes = dim * KV_TILE_ENTRIES;
  return lie_within(side.rows, type, bits == 16 ? codes : codes * bits / 8);
}

bool grouped_fits(const KvPiece& p, int64_t dim, int64_t value_dim) {
  const int64_t lanes = p.keys.rows.lanes, groups = p.entries / KV_TILE_ENTRIES, group = p.values.group;
  RULE(!p.first && p.entries % KV_TILE_ENTRIES == 0, "grouped entries must be whole groups");
  RULE(group_of_codes_fits(p.keys, dim) && group_of_codes_fits(p.values, value_dim),
       "grouped codes must have 2, 4, 8 or 16 bits and rows of a group");
  RULE(groups <= p.keys.rows.rows && groups <= p.values.rows.rows, "grouped codes must have a row for each group");
  RULE(group > 0 && group % 16 == 0 && value_dim % group == 0,
       "channels of a value that share a scale must be a multiple of 16 and divide its width");
  RULE(scales_fit(p.keys, lanes, groups, dim) &&
           scales_fit(p.values, lanes, groups, value_dim / group * KV_TILE_ENTRIES),
       "grouped codes must have a scale and an offset for each channel of a key and each part of a value");
  RULE(has(p.values.mean) == has(p.values.deviation) &&
           holds_or_nothing(p.values.mean, KV_FLOAT32, Wide(lanes) * value_dim) &&
           holds_or_nothing(p.values.deviation, KV_FLOAT32, Wide(lanes) * value_dim),
       "means and deviations of values must be float32 of each lane and channel");
  return true;
}

bool by_channel_fits(const KvPiece& p, int64_t dim, int64_t value_dim) {
  RULE(dim % 16 == 0 && value_dim % 16 == 0, "codes by channel must be of widths that are multiples of 16");
  RULE(lie_within(p.keys.rows, KV_INT8, dim) && lie_within(p.values.rows, KV_INT8, value_dim),
       "codes by channel must be int8 rows as wide as the query and the output");
  RULE(rows_of_entries_fit(p, p.keys.rows) && rows_of_entries_fit(p, p.values.rows),
       "entries by channel must lie within the rows of their codes");
  RULE(scales_fit(p.keys, p.keys.rows.lanes, 1, dim) && scales_fit(p.values, p.keys.rows.lanes, 1, value_dim),
       "codes by channel must have a scale and an offset for each lane and channel");
  return true;
}

// Indices are read here once more than the kernel needs: a comparison for each, where an estimate takes a vector of
// each 16 channels. To clamp them in the kernel would hide that a sketch is damaged.
bool are_below(const int32_t* indices, int64_t count, int64_t limit) {
  uint32_t greatest = 0;  // a negative one is greater than any limit
  for (int64_t i = 0; i < count; i++) greatest = uint32_t(indices[i]) > greatest ? uint32_t(indices[i]) : greatest;
  return !count || greatest < uint64_t(limit);
}

bool sketched_fits(const KvPiece& p, int64_t dim, int64_t value_dim) {
  const int64_t lanes = p.keys.rows.lanes;
  RULE(!p.first && dim % 16 == 0 && value_dim % 16 == 0, "sketched entries must be of widths that are multiples of 16");
  RULE(lie_within(p.keys.rows, KV_BFLOAT16, dim) && p.keys.rows.row_stride == dim &&
           lie_within(p.values.rows, KV_BFLOAT16, value_dim) && p.values.rows.row_stride == value_dim,
       "cells of a sketch must be bfloat16 rows as wide as the query and the output");
  RULE(p.sums > 0 && is_size(p.sums) && (!p.use_median || p.sums == 1 || p.sums == 3 || p.sums == 5),
       "a sketched entry must have cells: 1, 3 or 5 for a median");
  const Wide indices = Wide(p.sums) * lanes * p.entries;
  RULE(holds(p.cell_indices, KV_INT32, indices), "sketched entries must have an int32 index of each of their cells");
  const int64_t cells = min64(p.keys.rows.rows, p.values.rows.rows);
  RULE(are_below(numbers<int32_t>(p.cell_indices), int64_t(indices), cells), "cells of sketched entries must exist");
  RULE(holds_or_nothing(p.keys.mean, KV_FLOAT32, Wide(lanes) * dim) &&
           holds_or_nothing(p.values.mean, KV_FLOAT32, Wide(lanes) * value_dim),
       "means of a sketch must be float32 of each lane and channel");
  return true;
}

bool piece_fits(const KvPiece& p, int64_t dim, int64_t value_dim) {
  RULE(is_size(p.first) && is_size(p.entries), "a span must not begin before its rows, or end before it begins");
  RULE(p.keys.rows.lanes > 0 && p.keys.rows.lanes == p.values.rows.lanes, "keys and values must have the same lanes");
  switch (p.format) {
    case KV_PLAIN: return plain_fits(p, dim, value_dim);
    case KV_GROUPED: return grouped_fits(p, dim, value_dim);
    case KV_BY_CHANNEL: return by_channel_fits(p, dim, value_dim);
    case KV_SKETCHED: return sketched_fits(p, dim, value_dim);
    default: RULE(false, "entries must be of one of the four formats");
  }
}

bool begins_at_tiles(const KvAttention& a) {
  const int32_t* shift = numbers<int32_t>(a.shift);
  for (int64_t lane = 0; shift && lane < a.lanes; lane++)
    if (shift[lane] % KV_TILE_ENTRIES) return false;
  return true;
}

// An attention but for its queries, heads and results.
bool entries_fit(const KvAttention& a) {
  RULE(is_size(a.lanes) && is_size(a.piece_count) && is_size(a.entries), "an attention must have counts of 0 or more");
  RULE(a.dim > 0 && a.dim % 2 == 0 && a.dim <= KV_MAX_DIM, "keys must be of an even width within KV_MAX_DIM");
  RULE(a.value_dim > 0 && a.value_dim <= KV_MAX_DIM, "values must be of a width within KV_MAX_DIM");
  RULE(a.queries > 0 && is_size(a.queries), "an attention must have queries");
  RULE(a.causal_offset <= MAX_SIZE, "a query must see a number of entries");
  RULE(is_size(a.window) && (!a.window || a.causal_offset >= 0), "a window must end at the entry of a query");
  RULE(a.pieces || !a.piece_count, "an attention must have its pieces");
  int64_t entries = 0;
  bool grouped = false, other = false;
  for (int64_t i = 0; i < a.piece_count; i++) {
    const KvPiece& p = a.pieces[i];
    if (!piece_fits(p, a.dim, a.value_dim)) return false;
    entries += p.entries;
    RULE(entries <= a.entries, "an attention must have the entries of its pieces");
    RULE(p.format != KV_GROUPED || !other, "grouped entries must come before all others");
    (p.format == KV_GROUPED ? grouped : other) = true;
  }
  RULE(entries == a.entries, "an attention must have the entries of its pieces");
  for (const KvArray* one : {&a.first, &a.stop, &a.shift})
    RULE(holds_or_nothing(*one, KV_INT32, a.lanes), "what a lane sees must be int32, one for each lane");
  RULE(!grouped || begins_at_tiles(a), "grouped entries must begin at a tile of a block");
  if (!has(a.mask.numbers)) return true;
  RULE(lie_within(a.mask) && a.mask.numbers.type == KV_UINT8 && a.mask.width >= a.entries &&
           (a.mask.lanes == 1 || a.mask.lanes >= a.lanes) && (a.mask.rows == 1 || a.mask.rows >= a.queries),
       "a mask must be bool, with a place for each lane, query and entry");
  return true;
}

bool attention_fits(const KvAttention& a) {
  if (!entries_fit(a)) return false;
  RULE(a.groups > 0 && is_size(a.groups), "an attention must have query heads");
  const Wide rows = Wide(a.lanes) * a.groups * a.queries;
  RULE(rows <= MAX_SIZE && holds(a.query, KV_BFLOAT16, rows * a.dim), "queries must be bfloat16 of each lane and head");
  RULE(holds_or_nothing(a.sinks, KV_FLOAT32, 1) && (!has(a.sinks) || a.lanes * a.groups % a.sinks.length == 0),
       "sinks must be float32 of each head of a sequence");
  return true;
}

// ---- inserts --------------------------------------------------------------------------------------------------------

bool beside_fits(const KvInsert& e, int64_t lanes) {
  const Wide all = Wide(lanes) * e.columns;
  RULE(!has(e.ranks) || (has(e.slots) && e.columns > 0), "ranks must come with the slots of a column or more");
  RULE(!has(e.ranks) || holds(e.ranks, KV_FLOAT32, all) || holds(e.ranks, KV_INT32, all),
       "ranks must be float32 or int32, one for each lane and column");
  RULE(holds_or_nothing(e.slots, KV_INT32, all) && holds_or_nothing(e.newest, KV_INT32, all),
       "slots must be int32, one for each lane and column");
  RULE(holds_or_nothing(e.scores, KV_FLOAT32, all) && holds_or_nothing(e.extra, KV_FLOAT32, all),
       "scores and counts must be float32, one for each lane and column");
  RULE(has(e.extra) == has(e.newest), "counts of merged tokens must come with the last slot among them");
  RULE(holds_or_nothing(e.new_scores, KV_FLOAT32, lanes), "new scores must be float32, one for each lane");
  return true;
}

bool evicted_fits(const KvInsert& e, int64_t lanes, int64_t evicts) {
  const struct { const KvArray &to, &from; int64_t type; } copied[] = {
      {e.evicted_slots, e.slots, KV_INT32}, {e.evicted_scores, e.scores, KV_FLOAT32},
      {e.evicted_extra, e.extra, KV_FLOAT32}, {e.evicted_newest, e.newest, KV_INT32}};
  for (const auto& one : copied)
    RULE(!has(one.to) || (has(one.from) && holds(one.to, one.type, lanes)),
         "what lies beside an evicted entry must be one number for each lane, of a bank that has it");
  const KvRows &keys = e.evicted_keys, &values = e.evicted_values;
  RULE(has(keys.numbers) == has(values.numbers), "an evicted key must be copied with its value");
  if (!has(keys.numbers)) return !keys.numbers.data && !values.numbers.data;
  RULE(lie_within(keys, e.keys.numbers.type, e.keys.width) && lie_within(values, e.values.numbers.type, e.values.width),
       "evicted entries must be copied to rows of the same width and type");
  RULE(keys.lanes >= lanes && values.lanes >= lanes && e.evicted_row >= 0 && e.evicted_row <= keys.rows - evicts &&
           e.evicted_row <= values.rows - evicts,
       "evicted entries must be copied to a row of each lane");
  return true;
}

// An insert of so many entries into each of so many lanes, of which some evict others, but for the new entries.
bool bank_fits(const KvInsert& e, int64_t lanes, int64_t entries = 1, int64_t evicts = 1) {
  RULE(lie_within(e.keys) && lie_within(e.values), "rows of a bank must lie within its memory");
  RULE(is_size(lanes) && e.keys.lanes >= lanes && e.values.lanes >= lanes, "a bank must have a row for each lane");
  RULE(is_size(e.columns), "a bank must have a number of columns");
  const bool beside = has(e.slots) || has(e.scores) || has(e.extra);
  const int64_t columns = min64(min64(e.keys.rows, e.values.rows), beside ? e.columns : MAX_SIZE);
  RULE(has(e.ranks) ? e.columns <= columns : e.column >= 0 && e.column <= columns - entries,
       "a new entry must take a column of its bank");
  return beside_fits(e, lanes) && evicted_fits(e, lanes, evicts);
}

// ---- steps ----------------------------------------------------------------------------------------------------------

struct Tokens {  // what the steps of a layer share
  int64_t tokens, heads;
  KvArray query, key, value, out, lse;
};

bool step_fits(const KvStep& step, const Tokens& shared) {
  const KvAttention& a = step.attention;
  if (!entries_fit(a)) return false;
  const int64_t lanes = step.token_lanes ? step.token_lanes : a.lanes, tokens = shared.tokens, heads = shared.heads;
  RULE((a.queries == 1 && !a.window) || (a.queries <= a.entries && a.causal_offset == a.entries - a.queries),
       "a step must have one query, or one of each token, which sees the entries up to its own");
  RULE(a.queries == 1 || (!has(step.received) && !has(step.insert.ranks) && !has(step.insert.evicted_slots)),
       "steps of several tokens must not rank, and copy nothing beside evicted entries");
  RULE(lanes > 0 && heads % lanes == 0, "query heads must be a multiple of the lanes of a token");
  RULE(step.first_lane >= 0 && step.first_lane <= lanes - a.lanes, "lanes of a step must be lanes of its token");
  RULE(step.token >= 0 && step.token <= tokens - a.queries, "the tokens of a step must be some of the call");
  RULE(holds(shared.query, KV_BFLOAT16, Wide(tokens) * heads * a.dim),
       "queries must be bfloat16 of each token and head");
  RULE(holds(shared.out, KV_BFLOAT16, Wide(tokens) * heads * a.value_dim) &&
           holds(shared.lse, KV_FLOAT32, Wide(tokens) * heads),
       "outputs must have a place for each token and head");
  RULE(holds(shared.key, KV_BFLOAT16, Wide(tokens) * lanes * a.dim) &&
           holds(shared.value, KV_BFLOAT16, Wide(tokens) * lanes * a.value_dim),
       "new entries must be bfloat16 of each token and lane");
  RULE(!has(step.insert.evicted_keys.numbers) || (step.evicts >= 1 && step.evicts <= a.queries),
       "entries must be evicted by tokens of their step");
  if (!bank_fits(step.insert, a.lanes, a.queries, step.evicts)) return false;
  RULE(step.insert.keys.numbers.type == KV_BFLOAT16 && step.insert.keys.width == a.dim &&
           step.insert.values.numbers.type == KV_BFLOAT16 && step.insert.values.width == a.value_dim,
       "the rows of a bank must be as wide as new entries, and bfloat16");
  RULE(holds_or_nothing(step.received, KV_FLOAT32, Wide(a.lanes) * a.entries),
       "received attention must have a place for each lane and entry");
  return true;
}

// ---- layers ---------------------------------------------------------------------------------------------------------

// Whether matrices that lie beside each other have so many inputs, and outputs in all.
bool matrices_fit(const KvMatrix* matrices, int count, int64_t inputs, Wide outputs) {
  for (int i = 0; i < count && matrices[i].outputs; i++) {
    if (!matrix_fits(matrices[i])) return false;
    RULE(matrices[i].inputs == inputs, "matrices of a layer must have its widths");
    outputs -= matrices[i].outputs;
  }
  RULE(!outputs, "matrices of a layer must have its widths");
  return true;
}

bool router_fits(const KvRouter& r) {
  const KvMatrix& m = r.weight;
  if (!matrix_fits(m)) return false;
  RULE(m.outputs > 0 && (m.kind == KV_BF16 || m.kind == KV_F32), "a router must have a weight without blocks");
  RULE(holds_or_nothing(r.bias, m.kind == KV_F32 ? KV_FLOAT32 : KV_BFLOAT16, m.outputs) &&
           holds_or_nothing(r.choice_bias, KV_FLOAT32, m.outputs),
       "biases of a router must be of each expert, of the type of products, and float32 for the choice");
  RULE(r.scores >= 0 && r.scores <= KV_SIGMOID && r.k > 0 && r.k <= m.outputs,
       "a router must choose experts that exist, in a way that the library has");
  RULE(r.groups > 0 && r.groups <= m.outputs && m.outputs % r.groups == 0 && r.taken_groups > 0 &&
           r.taken_groups <= r.groups && r.k <= r.taken_groups * (m.outputs / r.groups) &&
           (r.group_scores == 1 || (r.group_scores == 2 && r.groups < m.outputs)),
       "groups of experts must have the same size, and those that are taken must have enough experts");
  return true;
}

bool experts_fit(const KvExperts& e) {
  for (int64_t one : {e.experts, e.hidden, e.inner}) RULE(one > 0 && is_size(one), "experts must have widths");
  RULE(e.hidden % 16 == 0 && e.inner % 16 == 0 && (e.gated == 0 || e.gated == 1),
       "experts must have widths that are multiples of 16");
  const Wide outputs = Wide(1 + e.gated) * e.inner, count = e.experts;
  RULE(count * outputs <= MAX_SIZE && count * e.hidden <= MAX_SIZE, "experts must have no more outputs than memory");
  if (!matrices_fit(e.gates, 2, e.hidden, count * outputs)) return false;
  if (!matrices_fit(&e.down, 1, e.inner, count * e.hidden)) return false;
  for (const KvMatrix& one : e.gates)
    RULE(one.outputs % (count * KV_PANEL_OUTPUTS) == 0, "each expert must have whole panels of a matrix");
  RULE(holds_or_nothing(e.gates_bias, KV_BFLOAT16, count * outputs) &&
           holds_or_nothing(e.down_bias, KV_BFLOAT16, count * e.hidden),
       "biases must be bfloat16 of each output");
  RULE(holds(e.gate_values, KV_BFLOAT16, 1 << 16) && holds_or_nothing(e.up_values, KV_BFLOAT16, 1 << 16),
       "what gates and ups become must be bfloat16 of each bfloat16 number");
  return true;
}

bool mlp_fits(const KvMlp& m) {
  RULE(m.hidden > 0 && is_size(m.hidden) && is_size(m.inner) && m.inner % 16 == 0 && (m.gated == 0 || m.gated == 1) &&
           m.activation >= 0 && m.activation <= KV_RELU2,
       "an MLP must have a width that is a multiple of 16, and an activation that the library has");
  RULE(!m.router == !m.experts && (m.inner || m.router), "an MLP must have matrices, or a router and experts");
  if (!matrices_fit(m.gates, 2, m.hidden, (1 + m.gated) * Wide(m.inner))) return false;
  if (!matrices_fit(&m.down, 1, m.inner, m.inner ? m.hidden : 0)) return false;
  if (!matrices_fit(&m.share, 1, m.hidden, m.inner && m.share.outputs ? 1 : 0)) return false;
  for (int i = 0; i < 2; i++)
    RULE(holds_or_nothing(m.gates_bias[i], KV_BFLOAT16, m.gates[i].outputs), "biases must be bfloat16 of each output");
  RULE(holds_or_nothing(m.down_bias, KV_BFLOAT16, m.hidden), "biases must be bfloat16 of each output");
  if (!m.router) return true;
  if (!router_fits(*m.router) || !experts_fit(*m.experts)) return false;
  RULE(m.experts->hidden == m.hidden && m.router->weight.inputs == m.hidden &&
           m.router->weight.outputs == m.experts->experts,
       "the router and the experts of an MLP must have its width");
  return true;
}

bool layer_fits(const KvLayer& l) {
  for (int64_t one : {l.hidden, l.heads, l.kv_heads, l.dim})
    RULE(one > 0 && one <= MAX_SIZE, "a layer must have widths");
  RULE(l.dim % 2 == 0 && (l.gated == 0 || l.gated == 1), "heads must be of an even width");
  RULE(l.rotated >= 0 && l.rotated <= l.dim && l.rotated % 2 == 0 && l.rotation >= 0 &&
           l.rotation <= KV_EXACT_PAIRS,
       "rotated channels must be pairs of a head, in a way that the library has");
  if (!matrices_fit(l.qkv, 3, l.hidden, ((1 + l.gated) * Wide(l.heads) + 2 * Wide(l.kv_heads)) * l.dim)) return false;
  if (!matrices_fit(&l.out, 1, l.heads * l.dim, l.hidden)) return false;
  if (l.mlp && !mlp_fits(*l.mlp)) return false;
  RULE(!l.mlp || l.mlp->hidden == l.hidden, "the MLP of a layer must have its width");
  for (int i = 0; i < 3; i++)
    RULE(holds_or_nothing(l.qkv_bias[i], KV_BFLOAT16, l.qkv[i].outputs), "biases must be bfloat16 of each output");
  RULE(holds_or_nothing(l.out_bias, KV_BFLOAT16, l.hidden), "biases must be bfloat16 of each output");
  RULE(holds_or_nothing(l.sinks, KV_FLOAT32, l.heads), "sinks must be float32 of each head");
  for (const KvArray* norm : {&l.input_norm, &l.post_attention_norm, &l.pre_mlp_norm, &l.post_mlp_norm})
    RULE(holds_or_nothing(*norm, KV_FLOAT32, l.hidden), "weights of norms must be float32 of each channel");
  const auto of_heads = [&](const KvArray& norm, Wide heads) {
    return holds_or_nothing(norm, KV_FLOAT32, norm.length) &&
           (!has(norm) || norm.length == l.dim || norm.length == heads * l.dim);
  };
  RULE(of_heads(l.query_norm, l.gated ? 1 : l.heads) && of_heads(l.key_norm, l.kv_heads),
       "norms of queries and keys must be float32 of the channels of a head, or of all heads");
  return true;
}

bool is_rows_of(const KvArray& x, int64_t width) {
  return holds(x, KV_BFLOAT16, x.length) && x.length % width == 0;
}

}  // namespace

// ---- the functions of kvkeep.h --------------------------------------------------------------------------------------

const char* kvkeep_broken_rule(void) { return broken_rule; }

bool matrix_fits(const KvMatrix& m) {
  RULE(is_kind(m.kind), "a matrix must be of a kind that the library has");
  RULE(m.inputs > 0 && is_size(m.inputs) && m.inputs % LAYOUTS[m.kind].unit == 0 && is_size(m.outputs),
       "a matrix must have whole blocks of inputs");
  RULE(holds(m.panels, KV_UINT8, Wide(panels_of(m.outputs)) * panel_bytes(m.kind, m.inputs)),
       "a matrix must have all of its panels");
  return true;
}

bool file_rows_fit(const KvMatrix& m, const KvArray& rows, int64_t row_bytes) {
  const int64_t row = m.inputs / LAYOUTS[m.kind].unit * LAYOUTS[m.kind].block_bytes;
  RULE(is_size(row_bytes) && row <= row_bytes && holds(rows, KV_UINT8, Wide(m.outputs) * row_bytes),
       "rows of blocks must have all blocks of a matrix");
  return true;
}

bool outputs_fit(const KvMatrix& m, const KvArray& outputs, const KvArray& rows) {
  RULE(holds(outputs, KV_INT64, outputs.length), "numbers of rows must be int64");
  RULE(holds(rows, KV_FLOAT32, Wide(outputs.length) * m.inputs), "rows of a matrix must be written to float32");
  for (int64_t i = 0; i < outputs.length; i++)
    RULE(numbers<int64_t>(outputs)[i] >= 0 && numbers<int64_t>(outputs)[i] < m.outputs, "rows of a matrix must exist");
  return true;
}

bool product_fits(const KvMatrix& m, const KvArray& x, const KvArray& bias, const KvArray& y, int64_t y_stride) {
  if (!matrix_fits(m)) return false;
  const int64_t type = m.kind == KV_F32 && x.type == KV_FLOAT32 ? KV_FLOAT32 : KV_BFLOAT16;
  RULE(holds(x, type, x.length) && x.length % m.inputs == 0,
       "inputs of a matrix must be rows of its width, in bfloat16, or in float32 if the matrix is");
  RULE(holds_or_nothing(bias, type, m.outputs), "biases must be of each output, and of the type of inputs");
  const Wide rows = x.length / m.inputs;
  RULE(is_size(y_stride) && y_stride >= m.outputs &&
           holds(y, type, rows && m.outputs ? (rows - 1) * y_stride + m.outputs : 0),
       "outputs of a matrix must be of the type of its inputs, with a place for each");
  return true;
}

bool norm_fits(const KvArray& x, const KvArray& weight, const KvArray& y) {
  RULE(weight.length > 0 && holds(weight, KV_FLOAT32, weight.length), "weights of norms must be float32");
  RULE(is_rows_of(x, weight.length) && holds(y, KV_BFLOAT16, x.length),
       "a norm must read and write bfloat16 rows as wide as its weights");
  return true;
}

bool angles_fit(const KvArray& positions, const KvArray& frequencies, const KvArray& cos, const KvArray& sin) {
  RULE(holds(positions, KV_INT64, positions.length), "positions must be int64");
  RULE(holds(frequencies, KV_FLOAT32, frequencies.length), "frequencies must be float32");
  const Wide all = 2 * Wide(positions.length) * frequencies.length;
  RULE(holds(cos, KV_BFLOAT16, all) && holds(sin, KV_BFLOAT16, all),
       "cosines and sines must be bfloat16 of each position and channel");
  return true;
}

static bool gate_fits(const KvLayer& l, Wide rows, const KvArray& gate) {
  RULE(!l.gated || holds(gate, KV_BFLOAT16, rows * l.heads * l.dim), "gates must be bfloat16 of each token and head");
  return true;
}

bool before_attention_fits(const KvLayer& l, const KvArray& x, int64_t batch, const KvArray& cos, const KvArray& sin,
                           const KvArray& query, const KvArray& key, const KvArray& value,
                           const KvArray& gate) {
  if (!layer_fits(l)) return false;
  RULE(is_rows_of(x, l.hidden), "the input of a layer must be bfloat16 rows of its width");
  const Wide rows = x.length / l.hidden;
  RULE(batch > 0 && rows % batch == 0, "each row of a batch must have the same number of tokens");
  RULE(!l.rotated || (cos.length == sin.length &&
                      (cos.length == rows * l.rotated || cos.length == rows / batch * l.rotated) &&
                      holds(cos, KV_BFLOAT16, cos.length) && holds(sin, KV_BFLOAT16, sin.length)),
       "cosines and sines must be bfloat16 of each token and channel");
  RULE(holds(query, KV_BFLOAT16, rows * l.heads * l.dim) && holds(key, KV_BFLOAT16, rows * l.kv_heads * l.dim) &&
           holds(value, KV_BFLOAT16, rows * l.kv_heads * l.dim),
       "queries, keys and values must be bfloat16 of each token and head");
  return gate_fits(l, rows, gate);
}

bool before_mlp_fits(const KvLayer& l, const KvArray& attended, const KvArray& gate, const KvArray& residual,
                     const KvArray& y, const KvArray& normed) {
  if (!layer_fits(l)) return false;
  RULE(is_rows_of(residual, l.hidden) && holds(y, KV_BFLOAT16, residual.length),
       "input and output of a layer must be bfloat16 rows of its width");
  const Wide rows = residual.length / l.hidden;
  RULE(holds(attended, KV_BFLOAT16, rows * l.heads * l.dim),
       "the attention of a layer must be bfloat16 of each token and head");
  RULE(holds(normed, KV_BFLOAT16, residual.length), "what enters an MLP must be bfloat16 rows of its width");
  return gate_fits(l, rows, gate);
}

bool after_attention_fits(const KvLayer& l, const KvArray& attended, const KvArray& gate, const KvArray& residual,
                          const KvArray& y) {
  RULE(l.mlp, "a layer must have its MLP");
  return before_mlp_fits(l, attended, gate, residual, y, y);
}

bool mlp_fits(const KvMlp& m, const KvArray& x, const KvArray& y) {
  if (!mlp_fits(m)) return false;
  RULE(is_rows_of(x, m.hidden) && holds(y, KV_BFLOAT16, x.length),
       "an MLP must read and write bfloat16 rows of its width");
  return true;
}

bool route_fits(const KvRouter& r, const KvArray& x, const KvArray& logits, const KvArray& weights,
                const KvArray& chosen) {
  if (!router_fits(r)) return false;
  RULE(is_rows_of(x, r.weight.inputs), "a router must read bfloat16 rows of its width");
  const Wide rows = x.length / r.weight.inputs;
  RULE(holds(logits, KV_FLOAT32, rows * r.weight.outputs) && holds(weights, KV_FLOAT32, rows * r.k) &&
           holds(chosen, KV_INT64, rows * r.k),
       "a router must write products and weights in float32, and numbers of experts in int64");
  return true;
}

bool experts_fit(const KvExperts& e, const KvArray& x, const KvArray& chosen, const KvArray& weights,
                 const KvArray& y) {
  if (!experts_fit(e)) return false;
  RULE(is_rows_of(x, e.hidden) && holds(y, KV_BFLOAT16, x.length),
       "experts must read and write bfloat16 rows of their width");
  const int64_t rows = x.length / e.hidden;
  RULE(holds(chosen, KV_INT64, chosen.length) && holds(weights, KV_FLOAT32, chosen.length) &&
           (rows ? chosen.length % rows == 0 : !chosen.length),
       "each row must have the same number of chosen experts, int64, and of weights, float32");
  return true;
}

bool delta_net_fits(const KvDeltaNet& n, const KvArray& inputs, const KvArray& gate, const KvArray& beta,
                    const KvArray& decay, const KvArray& state, const KvArray& out) {
  RULE(n.key_heads > 0 && is_size(n.value_heads) && n.value_heads > 0 && n.value_heads % n.key_heads == 0,
       "value heads of a delta net must be a multiple of its key heads");
  RULE(n.key_dim > 0 && is_size(n.key_dim) && n.key_dim % 16 == 0 && n.value_dim > 0 && is_size(n.value_dim) &&
           n.value_dim % 16 == 0,
       "keys and values of a delta net must be of widths that are multiples of 16");
  const Wide values = Wide(n.value_heads) * n.value_dim, channels = 2 * Wide(n.key_heads) * n.key_dim + values;
  RULE(channels <= MAX_SIZE && n.taps > 0 && is_size(n.taps) && holds(n.conv, KV_FLOAT32, n.taps * channels),
       "the convolution of a delta net must have a float32 weight for each tap and channel");
  RULE(holds(n.rate, KV_FLOAT32, n.value_heads) && holds(n.step_bias, KV_FLOAT32, n.value_heads) &&
           holds(n.norm, KV_FLOAT32, n.value_dim),
       "rates, biases and the norm of a delta net must be float32 of each head or channel");
  RULE(is_rows_of(beta, n.value_heads), "betas of a delta net must be bfloat16 of each token and head");
  const Wide tokens = beta.length / n.value_heads;
  RULE(holds(decay, KV_BFLOAT16, beta.length) && holds(gate, KV_BFLOAT16, tokens * values) &&
           holds(out, KV_BFLOAT16, tokens * values),
       "decays, gates and outputs of a delta net must be bfloat16 of each token");
  RULE(holds(inputs, KV_BFLOAT16, (tokens + n.taps - 1) * channels),
       "inputs of a delta net must be bfloat16 of each token, and of those before them that its convolution reads");
  RULE(holds(state, KV_FLOAT32, values * n.key_dim), "the state of a delta net must be float32 of each head");
  return true;
}

bool mamba2_fits(const KvMamba2& s, const KvArray& inputs, const KvArray& gate, const KvArray& steps,
                 const KvArray& state, const KvArray& out) {
  RULE(s.groups > 0 && is_size(s.heads) && s.heads > 0 && s.heads % s.groups == 0,
       "heads of a Mamba-2 layer must be a multiple of its groups");
  RULE(s.head_dim > 0 && is_size(s.head_dim) && s.head_dim % 4 == 0 && s.state_dim > 0 && is_size(s.state_dim) &&
           s.state_dim % 16 == 0 && Wide(s.heads / s.groups) * s.head_dim % 16 == 0,
       "a head of a Mamba-2 layer must have a multiple of 4 channels, its groups and states one of 16");
  const Wide inner = Wide(s.heads) * s.head_dim, channels = inner + 2 * Wide(s.groups) * s.state_dim;
  RULE(channels <= MAX_SIZE && s.taps > 0 && is_size(s.taps) && holds(s.conv, KV_FLOAT32, s.taps * channels) &&
           holds_or_nothing(s.conv_bias, KV_FLOAT32, channels),
       "the convolution of a Mamba-2 layer must have a float32 weight for each tap and channel");
  RULE(holds(s.rate, KV_FLOAT32, s.heads) && holds(s.step_bias, KV_FLOAT32, s.heads) &&
           holds(s.skip, KV_FLOAT32, s.heads) && holds_or_nothing(s.norm, KV_FLOAT32, inner),
       "rates, biases, skips and the norm of a Mamba-2 layer must be float32 of each head or channel");
  RULE(is_rows_of(steps, s.heads), "steps of a Mamba-2 layer must be bfloat16 of each token and head");
  const Wide tokens = steps.length / s.heads;
  RULE(holds(gate, KV_BFLOAT16, tokens * inner) && holds(out, KV_BFLOAT16, tokens * inner),
       "gates and outputs of a Mamba-2 layer must be bfloat16 of each token");
  RULE(holds(inputs, KV_BFLOAT16, (tokens + s.taps - 1) * channels),
       "inputs of a Mamba-2 layer must be bfloat16 of each token, and of those before them that its convolution reads");
  RULE(holds(state, KV_FLOAT32, inner * s.state_dim), "the state of a Mamba-2 layer must be float32 of each head");
  return true;
}

bool attend_fits(const KvAttention& a, const KvArray& out, const KvArray& lse, const KvArray& state, int resume) {
  if (!attention_fits(a)) return false;
  const Wide rows = Wide(a.lanes) * a.groups * a.queries;
  RULE(has(out) == has(lse) && (has(out) || has(state)), "an attention must have an output, or a state");
  RULE(!has(out) || holds(out, KV_BFLOAT16, rows * a.value_dim) || holds(out, KV_FLOAT32, rows * a.value_dim),
       "an output must be bfloat16 or float32, with a place for each query and channel");
  RULE(holds_or_nothing(lse, KV_FLOAT32, rows), "log-sum-exps must be float32 of each query");
  RULE(holds_or_nothing(state, KV_FLOAT32, rows * (2 + a.value_dim)),
       "the state of an attention must have two numbers and the width of values for each query");
  RULE(has(state) || !resume, "an attention that resumes must have a state");
  return true;
}

bool received_fits(const KvAttention& a, const KvArray& lse, const KvArray& received) {
  if (!attention_fits(a)) return false;
  RULE(holds(lse, KV_FLOAT32, Wide(a.lanes) * a.groups * a.queries), "log-sum-exps must be float32 of each query");
  RULE(holds(received, KV_FLOAT32, Wide(a.lanes) * a.entries),
       "received attention must have a place for each lane and entry");
  return true;
}

bool insert_fits(const KvInsert& e, const KvArray& new_keys, const KvArray& new_values) {
  if (!bank_fits(e, e.keys.lanes)) return false;
  const Wide keys = Wide(e.keys.lanes) * e.keys.width, values = Wide(e.keys.lanes) * e.values.width;
  RULE(holds(new_keys, e.keys.numbers.type, keys) && new_keys.length == keys &&
           holds(new_values, e.values.numbers.type, values) && new_values.length == values,
       "new entries must have the width and type of a bank's rows, one for each lane");
  return true;
}

bool sessions_fit(KvStep* const* steps, int64_t count, const KvArray& query, const KvArray& key, const KvArray& value,
                  int64_t tokens, int64_t heads, const KvArray& sinks, const KvArray& out, const KvArray& lse) {
  RULE(is_size(count) && is_size(tokens) && is_size(heads), "a call must have steps, tokens and heads");
  RULE(holds_or_nothing(sinks, KV_FLOAT32, heads), "sinks must be float32 of each head");
  const Tokens shared{tokens, heads, query, key, value, out, lse};
  for (int64_t i = 0; i < count; i++)
    if (!step_fits(*steps[i], shared)) return false;
  return true;
}

bool layers_fit(const KvLayer* const* layers, KvStep* const* const* steps, int64_t count, const int64_t* step_counts,
                const KvArray& cos, const KvArray& sin, const KvArray& x, const KvArray& normed) {
  RULE(count > 0 && is_size(count), "a call must have layers");
  const KvLayer& first = *layers[0];
  if (!layer_fits(first)) return false;
  RULE(is_rows_of(x, first.hidden), "the input of a layer must be bfloat16 rows of its width");
  const int64_t tokens = x.length / first.hidden, dim = first.dim;
  RULE(holds_or_nothing(normed, KV_BFLOAT16, x.length), "what enters an MLP must be bfloat16 rows of its width");
  char memory = 0;  // of the library itself, which reserves what lies between the parts of a layer
  const auto reserved = [&](int64_t type, Wide length) { return KvArray{&memory, int64_t(length), type}; };
  const Wide queries = Wide(tokens) * first.heads, keys = Wide(tokens) * first.kv_heads * dim;
  RULE(queries * dim <= MAX_SIZE && keys <= MAX_SIZE, "a call must have no more tokens than memory holds");
  const Tokens shared{tokens, first.heads, reserved(KV_BFLOAT16, queries * dim), reserved(KV_BFLOAT16, keys),
                      reserved(KV_BFLOAT16, keys), reserved(KV_BFLOAT16, queries * dim), reserved(KV_FLOAT32, queries)};
  for (int64_t layer = 0; layer < count; layer++) {
    const KvLayer& l = *layers[layer];
    if (layer && !layer_fits(l)) return false;
    RULE(l.mlp || (layer == count - 1 && has(normed)), "a layer must have its MLP");
    RULE(l.hidden == first.hidden && l.heads == first.heads && l.kv_heads == first.kv_heads && l.dim == dim,
         "layers of a call must have the same heads");
    const Wide angles = Wide(tokens) * l.rotated;
    RULE(!angles || (cos.length == angles && holds(cos, KV_BFLOAT16, angles) && holds(sin, KV_BFLOAT16, angles)),
         "cosines and sines must be bfloat16 of each token and rotated channel");
    RULE(is_size(step_counts[layer]), "a layer must have a number of steps");
    for (int64_t i = 0; i < step_counts[layer]; i++) {
      const KvStep& step = *steps[layer][i];
      if (!step_fits(step, shared)) return false;
      RULE(step.attention.dim == dim && step.attention.value_dim == dim &&
               (step.token_lanes ? step.token_lanes : step.attention.lanes) == first.kv_heads,
           "steps must have the heads of their layer");
    }
  }
  return true;
}

bool blocks_fit(const KvRows& r, int64_t first, int64_t blocks, int64_t block_rows, const KvArray& digests) {
  RULE(lie_within(r) && is_size(first) && is_size(blocks) && is_size(block_rows), "rows must lie within their memory");
  const Wide block = Wide(block_rows) * r.row_stride;
  const Wide end = Wide(r.lanes - 1) * r.lane_stride + (first + blocks) * block;
  RULE((first + blocks) * Wide(block_rows) <= r.rows && block * size_of(r.numbers.type) % 8 == 0,
       "blocks must be rows, and multiples of 8 bytes");
  RULE(!r.lanes || end <= r.numbers.length, "blocks must lie within their memory");
  RULE(holds(digests, KV_INT64, Wide(r.lanes) * blocks), "digests must be int64 of each lane and block");
  return true;
}
