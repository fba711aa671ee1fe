// The structures of kvkeep.h as they lie in this library, field by field: library.py compares them with its own.

#include <stddef.h>

#include "kvkeep.h"

namespace {

#define STRUCTURE(type) {#type, "", 0, sizeof(type)}
#define FIELD(type, name) {#type, #name, offsetof(type, name), sizeof(type::name)}

const KvField FIELDS[] = {
    STRUCTURE(KvMatrix),
    FIELD(KvMatrix, panels), FIELD(KvMatrix, inputs), FIELD(KvMatrix, outputs), FIELD(KvMatrix, kind),

    STRUCTURE(KvLayer),
    FIELD(KvLayer, qkv), FIELD(KvLayer, out), FIELD(KvLayer, gates), FIELD(KvLayer, down),
    FIELD(KvLayer, qkv_bias), FIELD(KvLayer, out_bias),
    FIELD(KvLayer, before), FIELD(KvLayer, query_norm), FIELD(KvLayer, key_norm), FIELD(KvLayer, after_attention),
    FIELD(KvLayer, before_mlp), FIELD(KvLayer, after_mlp),
    FIELD(KvLayer, hidden), FIELD(KvLayer, heads), FIELD(KvLayer, kv_heads), FIELD(KvLayer, dim),
    FIELD(KvLayer, inner), FIELD(KvLayer, gate), FIELD(KvLayer, eps),

    STRUCTURE(KvPiece),
    FIELD(KvPiece, keys), FIELD(KvPiece, values), FIELD(KvPiece, count), FIELD(KvPiece, lanes),
    FIELD(KvPiece, key_lane), FIELD(KvPiece, key_row), FIELD(KvPiece, value_lane), FIELD(KvPiece, value_row),
    FIELD(KvPiece, key_scale), FIELD(KvPiece, key_offset), FIELD(KvPiece, value_scale), FIELD(KvPiece, value_offset),
    FIELD(KvPiece, mean), FIELD(KvPiece, deviation), FIELD(KvPiece, key_bits), FIELD(KvPiece, value_bits),
    FIELD(KvPiece, width), FIELD(KvPiece, key_scale_lane), FIELD(KvPiece, value_scale_lane),
    FIELD(KvPiece, places), FIELD(KvPiece, key_mean), FIELD(KvPiece, sums), FIELD(KvPiece, median),

    STRUCTURE(KvAttention),
    FIELD(KvAttention, query), FIELD(KvAttention, pieces), FIELD(KvAttention, first), FIELD(KvAttention, stop),
    FIELD(KvAttention, shift), FIELD(KvAttention, mask), FIELD(KvAttention, lanes), FIELD(KvAttention, groups),
    FIELD(KvAttention, queries), FIELD(KvAttention, dim), FIELD(KvAttention, value_dim), FIELD(KvAttention, count),
    FIELD(KvAttention, entries), FIELD(KvAttention, past), FIELD(KvAttention, mask_lane),
    FIELD(KvAttention, mask_query), FIELD(KvAttention, scaling),

    STRUCTURE(KvInsert),
    FIELD(KvInsert, ranks), FIELD(KvInsert, whole), FIELD(KvInsert, oldest), FIELD(KvInsert, columns),
    FIELD(KvInsert, at), FIELD(KvInsert, slot), FIELD(KvInsert, keys), FIELD(KvInsert, values),
    FIELD(KvInsert, key_lane), FIELD(KvInsert, key_bytes), FIELD(KvInsert, value_lane), FIELD(KvInsert, value_bytes),
    FIELD(KvInsert, slots), FIELD(KvInsert, scores), FIELD(KvInsert, extra), FIELD(KvInsert, newest),
    FIELD(KvInsert, new_scores), FIELD(KvInsert, left_keys), FIELD(KvInsert, left_values),
    FIELD(KvInsert, left_key_lane), FIELD(KvInsert, left_value_lane), FIELD(KvInsert, left_slots),
    FIELD(KvInsert, left_scores), FIELD(KvInsert, left_extra), FIELD(KvInsert, left_newest),

    STRUCTURE(KvStep),
    FIELD(KvStep, attention), FIELD(KvStep, insert), FIELD(KvStep, received), FIELD(KvStep, greatest),
    FIELD(KvStep, token),
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const KvField* kvkeep_fields(int64_t* count) {
  *count = sizeof FIELDS / sizeof *FIELDS;
  return FIELDS;
}
