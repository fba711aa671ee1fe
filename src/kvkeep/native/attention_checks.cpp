// The rules of attention (checks.h): entries, what is written into a bank, and steps.

#include <initializer_list>

#include "rules.h"

bool cap_fits(float cap) {
  RULE(cap >= 0 && cap < __builtin_inff(), "the cap of scores must be positive, or 0 without one");
  return true;
}

namespace {

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
  if (!entries_fit(a) || !cap_fits(a.cap)) return false;
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

}  // namespace

// ---- steps ----------------------------------------------------------------------------------------------------------

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

// ---- the functions of kvkeep.h --------------------------------------------------------------------------------------

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
                  int64_t tokens, int64_t heads, float cap, const KvArray& sinks, const KvArray& out,
                  const KvArray& lse) {
  if (!cap_fits(cap)) return false;
  RULE(is_size(count) && is_size(tokens) && is_size(heads), "a call must have steps, tokens and heads");
  RULE(holds_or_nothing(sinks, KV_FLOAT32, heads), "sinks must be float32 of each head");
  const Tokens shared{tokens, heads, query, key, value, out, lse};
  for (int64_t i = 0; i < count; i++)
    if (!step_fits(*steps[i], shared)) return false;
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
