// The structures and constants of kvkeep.h as this library was compiled with them: library.py compares its copy.

#include <stddef.h>

#include "kvkeep.h"

namespace {

#define STRUCTURE(type) {#type, "", 0, sizeof(type)}
#define FIELD(type, name) {#type, #name, offsetof(type, name), sizeof(type::name)}
#define NUMBER(name) {#name, name}

const KvField FIELDS[] = {
    STRUCTURE(KvMatrix),
    FIELD(KvMatrix, panels), FIELD(KvMatrix, inputs), FIELD(KvMatrix, outputs), FIELD(KvMatrix, kind),

    STRUCTURE(KvLayer),
    FIELD(KvLayer, qkv), FIELD(KvLayer, out), FIELD(KvLayer, gates), FIELD(KvLayer, down), FIELD(KvLayer, qkv_bias),
    FIELD(KvLayer, out_bias), FIELD(KvLayer, input_norm), FIELD(KvLayer, query_norm), FIELD(KvLayer, key_norm),
    FIELD(KvLayer, post_attention_norm), FIELD(KvLayer, pre_mlp_norm), FIELD(KvLayer, post_mlp_norm),
    FIELD(KvLayer, hidden), FIELD(KvLayer, heads), FIELD(KvLayer, kv_heads), FIELD(KvLayer, dim),
    FIELD(KvLayer, intermediate), FIELD(KvLayer, activation), FIELD(KvLayer, eps),

    STRUCTURE(KvPiece),
    FIELD(KvPiece, keys), FIELD(KvPiece, values), FIELD(KvPiece, entries), FIELD(KvPiece, lanes),
    FIELD(KvPiece, key_lane_stride), FIELD(KvPiece, key_row_stride), FIELD(KvPiece, value_lane_stride),
    FIELD(KvPiece, value_row_stride), FIELD(KvPiece, key_scale), FIELD(KvPiece, key_offset),
    FIELD(KvPiece, value_scale), FIELD(KvPiece, value_offset), FIELD(KvPiece, value_mean),
    FIELD(KvPiece, value_deviation), FIELD(KvPiece, key_bits), FIELD(KvPiece, value_bits), FIELD(KvPiece, value_group),
    FIELD(KvPiece, key_scale_stride), FIELD(KvPiece, value_scale_stride), FIELD(KvPiece, cell_indices),
    FIELD(KvPiece, key_mean), FIELD(KvPiece, sums), FIELD(KvPiece, use_median),

    STRUCTURE(KvAttention),
    FIELD(KvAttention, query), FIELD(KvAttention, pieces), FIELD(KvAttention, first), FIELD(KvAttention, stop),
    FIELD(KvAttention, shift), FIELD(KvAttention, mask), FIELD(KvAttention, lanes), FIELD(KvAttention, groups),
    FIELD(KvAttention, queries), FIELD(KvAttention, dim), FIELD(KvAttention, value_dim),
    FIELD(KvAttention, piece_count), FIELD(KvAttention, entries), FIELD(KvAttention, causal_offset),
    FIELD(KvAttention, mask_lane_stride), FIELD(KvAttention, mask_query_stride), FIELD(KvAttention, scaling),

    STRUCTURE(KvInsert),
    FIELD(KvInsert, ranks), FIELD(KvInsert, integer_ranks), FIELD(KvInsert, oldest_first), FIELD(KvInsert, columns),
    FIELD(KvInsert, column), FIELD(KvInsert, new_slot), FIELD(KvInsert, keys), FIELD(KvInsert, values),
    FIELD(KvInsert, key_lane_bytes), FIELD(KvInsert, key_bytes), FIELD(KvInsert, value_lane_bytes),
    FIELD(KvInsert, value_bytes), FIELD(KvInsert, slots), FIELD(KvInsert, scores), FIELD(KvInsert, extra),
    FIELD(KvInsert, newest), FIELD(KvInsert, new_scores), FIELD(KvInsert, evicted_keys),
    FIELD(KvInsert, evicted_values), FIELD(KvInsert, evicted_key_lane_bytes),
    FIELD(KvInsert, evicted_value_lane_bytes), FIELD(KvInsert, evicted_slots), FIELD(KvInsert, evicted_scores),
    FIELD(KvInsert, evicted_extra), FIELD(KvInsert, evicted_newest),

    STRUCTURE(KvStep),
    FIELD(KvStep, attention), FIELD(KvStep, insert), FIELD(KvStep, received), FIELD(KvStep, reduce_max),
    FIELD(KvStep, token), FIELD(KvStep, first_lane), FIELD(KvStep, token_lanes),
};

const KvNumber NUMBERS[] = {
    NUMBER(KV_NUMERICS), NUMBER(KV_PANEL_OUTPUTS), NUMBER(KV_BLOCK_ENTRIES), NUMBER(KV_TILE_ENTRIES),
    NUMBER(KV_MAX_DIM),
    NUMBER(KV_BF16), NUMBER(KV_Q4_0), NUMBER(KV_Q4_1), NUMBER(KV_Q5_0), NUMBER(KV_Q5_1), NUMBER(KV_Q8_0),
    NUMBER(KV_Q4_K), NUMBER(KV_Q5_K), NUMBER(KV_Q6_K),
    NUMBER(KV_SILU), NUMBER(KV_GELU_TANH), NUMBER(KV_DONE), NUMBER(KV_NO_MEMORY),
};

}  // namespace

const KvField* kvkeep_fields(int64_t* count) {
  *count = sizeof FIELDS / sizeof *FIELDS;
  return FIELDS;
}

const KvNumber* kvkeep_constants(int64_t* count) {
  *count = sizeof NUMBERS / sizeof *NUMBERS;
  return NUMBERS;
}
