/* The library's interface: plain C, called through ctypes (library.py). Pointers are to memory of the caller, which
 * must outlive the call; strides count elements unless bytes are said; tensors are row-major, bfloat16 as uint16_t. */
#ifndef KVKEEP_H
#define KVKEEP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- matrices ---------------------------------------------------------------------------------------------------- */

enum KvKind { /* how a matrix is stored: the kinds of blocks of GGUF files whose bits are kept, or bfloat16 */
  KV_BF16, KV_Q4_0, KV_Q4_1, KV_Q5_0, KV_Q5_1, KV_Q8_0, KV_Q4_K, KV_Q5_K, KV_Q6_K, KV_KINDS
};

typedef struct KvMatrix {
  const void* panels; /* as kvkeep_pack wrote them: panels of 16 outputs */
  int64_t inputs, outputs, kind;
} KvMatrix;

typedef struct KvLayer { /* a decoder layer laid out like Llama's; a null pointer: there is none */
  KvMatrix qkv[3], out, gates[2], down; /* several where their kinds differ; without outputs: there is no more */
  const uint16_t *qkv_bias[3], *out_bias;
  const float *before, *query_norm, *key_norm, *after_attention, *before_mlp, *after_mlp; /* weights of norms */
  int64_t hidden, heads, kv_heads, dim, inner;
  int64_t gate; /* 0 silu, 1 gelu by tanh */
  float eps;
} KvLayer;

/* ---- attention --------------------------------------------------------------------------------------------------- */

typedef struct KvPiece { /* entries (lanes, count, dim) of bfloat16 */
  const uint16_t *keys, *values;
  int64_t count, lanes; /* lane l of the query reads lane l % lanes */
  int64_t key_lane, key_row, value_lane, value_row;
  /* Or codes of 2, 4, 8 or 16 bits in groups of 32 entries, offset + scale * code; rows are groups then, strides bytes.
   * keys: for each channel the codes, a scale and an offset of 32 entries; values: by parts of `width` channels, for
   * each entry the codes, a scale and an offset of a part. Scales and offsets are float16, their strides elements.
   * Values may be of channels made even: times a deviation, plus a mean, (lanes, dim) float32 each. */
  const uint16_t *key_scale, *key_offset, *value_scale, *value_offset;
  const float *mean, *deviation;
  int64_t key_bits, value_bits, width, key_scale_lane, value_scale_lane;
  /* Or codes of 8 bits with a sign, (lanes, count, dim), strides bytes; `width` is 0, scales and offsets are of a
   * lane's channels, (lanes, dim) float16.
   * Or cells of a sketch, (lanes, cells, dim) of bfloat16, `places` (sums, lanes, count) of them to an entry: their
   * median (of 1, 3 or 5) or mean, plus a mean of all, (lanes, dim) float32, if there is one; `mean` is that of
   * values. */
  const int32_t* places;
  const float* key_mean;
  int64_t sums, median;
} KvPiece;

typedef struct KvAttention {
  const uint16_t* query; /* (lanes, groups, queries, dim) */
  const KvPiece* pieces;
  const int32_t* first; /* by lane: the first entry that is seen; null: 0 */
  const int32_t* stop;  /* by lane: the first entry that is not seen; null: all are */
  const int32_t* shift; /* by lane: what is added to an entry's number for its place in blocks; null: 0 */
  const uint8_t* mask;  /* (.., entries), 1 is seen; null: none */
  int64_t lanes, groups, queries, dim, value_dim, count, entries;
  int64_t past; /* query m sees entries before past + m + 1; negative: all */
  int64_t mask_lane, mask_query;
  float scaling;
} KvAttention;

typedef struct KvInsert { /* a new entry of each lane, and the column that it takes */
  /* ranks, slots, scores, extra, newest: (lanes, columns). The column is that of the least rank; without ranks it is
   * `at`. keys, values: rows of so many bytes, a lane's `.._lane` bytes apart. left_keys ..: where what was there is
   * copied to; null: it is discarded. Null as well: slots, where there are no ranks; scores, where nothing has any; new
   * scores, where they are 0; extra and newest, where nothing was merged. */
  const void* ranks;
  int64_t whole; /* ranks are int32, else float32 */
  int64_t oldest, columns, at;
  int64_t slot; /* of the new entry */
  char *keys, *values;
  int64_t key_lane, key_bytes, value_lane, value_bytes;
  int32_t* slots;
  float *scores, *extra;
  int32_t* newest;
  const float* new_scores;
  char *left_keys, *left_values;
  int64_t left_key_lane, left_value_lane;
  int32_t* left_slots;
  float *left_scores, *left_extra;
  int32_t* left_newest;
} KvInsert;

/* One new entry of each lane of a session's layer, and what its query attends to once it is there. */
typedef struct KvStep {
  KvAttention attention; /* of one query that sees everything; query, groups and scaling come with the call */
  KvInsert insert;
  float* received; /* (lanes, entries): the attention that entries received; null: not wanted */
  int64_t greatest; /* the maximum over the heads of a lane instead of the mean */
  int64_t token; /* its place in the row */
} KvStep;

/* Raised whenever the bits that kernels compute change; library.py has the same number. */
#define KVKEEP_NUMERICS 1

/* ---- the library ------------------------------------------------------------------------------------------------- */

typedef struct KvField { /* a field of a structure; without a name the structure itself */
  const char *structure, *name;
  int64_t offset, size;
} KvField;

/* The fields of all structures above as the library was compiled with them, which a caller compares with its own. */
const KvField* kvkeep_fields(int64_t* count);
/* KVKEEP_NUMERICS of what was compiled. */
int64_t kvkeep_numerics(void);
/* Names of the paths that this processor runs, best first, separated by spaces. */
const char* kvkeep_paths(void);
/* Takes the path of that name; returns 0 where there is none on this processor. */
int kvkeep_choose(const char* name);
/* The path in use. */
const char* kvkeep_path(void);
/* Lets loops run in the OpenMP threads of the process: GOMP_parallel and omp_get_max_threads of the runtime that torch
 * has loaded. Without it the library has threads of its own. */
void kvkeep_use_openmp(void* gomp_parallel, void* omp_get_max_threads);
/* How many threads of its own the library works with. */
void kvkeep_set_threads(int count);

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

/* Bytes of the panels of such a matrix; 0 where there is no such kind, or its inputs are no whole blocks. */
int64_t kvkeep_packed_bytes(int64_t kind, int64_t inputs, int64_t outputs);
/* Writes panels of rows of a GGUF file's blocks (or of bfloat16); rows: `outputs` of `row_bytes` each. Returns 0 where
 * a scale or an offset of a block is infinite or NaN, or where there is no such kind. */
int kvkeep_pack(int64_t kind, int64_t inputs, int64_t outputs, const uint8_t* rows, int64_t row_bytes, uint8_t* panels);
/* The other way round: rows of blocks, as the file had them. It writes nothing for a matrix of no kind. */
void kvkeep_unpack(const KvMatrix* matrix, uint8_t* rows, int64_t row_bytes);
/* Some outputs of the matrix as float32 (count, inputs). It writes nothing for a matrix of no kind. */
void kvkeep_rows(const KvMatrix* matrix, const int64_t* outputs, int64_t count, float* rows);

/* y = x W^T + bias. x: (rows, inputs); bias: (outputs) or null; y: rows `across` elements apart. */
void kvkeep_product(const KvMatrix* matrix, const uint16_t* x, int64_t rows, const uint16_t* bias, uint16_t* y,
                    int64_t across);
/* RMSNorm of rows, times `weight`. */
void kvkeep_norm(const uint16_t* x, const float* weight, float eps, int64_t rows, int64_t width, uint16_t* y);
/* Cosines and sines of position * frequency, times scaling, each (count, 2 * half): the halves repeat. */
void kvkeep_angles(const int64_t* positions, int64_t count, const float* frequencies, int64_t half, float scaling,
                   uint16_t* cos, uint16_t* sin);

/* What enters attention: x (batch * n, hidden) is normalised, projected and turned; query, key, value: (batch, heads,
 * n, dim). cos, sin: (batch or 1, n, dim), `shared` where 1. */
void kvkeep_enter_layer(const KvLayer* layer, const uint16_t* x, int64_t batch, int64_t n, const uint16_t* cos,
                        const uint16_t* sin, int shared, uint16_t* query, uint16_t* key, uint16_t* value);
/* What leaves the layer: attention (rows, heads * dim), residual and y (rows, hidden), which may be one. */
void kvkeep_leave_layer(const KvLayer* layer, const uint16_t* attention, const uint16_t* residual, int64_t rows,
                        uint16_t* y);

/* out: (lanes, groups, queries, value_dim), bfloat16 or float32; lse: (lanes, groups, queries) float32. state: null, or
 * room for what is combined so far, 2 + value_dim floats a query, from which a later call goes on (`resumes`) with the
 * next whole blocks. A call that is not the last (`out` is null) leaves the state only. */
void kvkeep_attend(const KvAttention* attention, void* out, int floats, float* lse, float* state, int resumes);
/* Attention over all entries of lanes whose rows lie behind each other, in one piece, without a mask: what a step does.
 * With `received` also what they received of all queries. */
void kvkeep_attend_rows(const uint16_t* query, const uint16_t* keys, const uint16_t* values, int64_t key_lane,
                        int64_t value_lane, int64_t lanes, int64_t groups, int64_t queries, int64_t dim,
                        int64_t value_dim, int64_t entries, float scaling, uint16_t* out, float* lse, float* received,
                        int greatest);
/* The attention that entries received of the last `last` queries: the mean over groups of the sum (or, with `greatest`,
 * the maximum over all) of exp(score - lse). out: (lanes, entries) float32. */
void kvkeep_received(const KvAttention* attention, const float* lse, int64_t last, int greatest, float* out);
/* Puts a new entry into each lane; new_keys, new_values: of the lanes, one behind the other. */
void kvkeep_insert(const KvInsert* insert, int64_t lanes, const char* new_keys, const char* new_values);

/* A token of each of `count` sessions in one layer: its entry is kept, and then it attends. query: (tokens, heads,
 * dim); key, value: (kv heads, tokens, dim), or (tokens, kv heads, dim) `by_token`; out: (tokens, heads, value_dim) and
 * lse: (tokens, heads), of these tokens only. */
void kvkeep_attend_sessions(KvStep* const* steps, int64_t count, const uint16_t* query, const uint16_t* key,
                            const uint16_t* value, int64_t tokens, int64_t heads, int by_token, float scaling,
                            uint16_t* out, float* lse);
/* `count` layers laid out alike, one after the other, for tokens of sessions whose entries are kept and attended in all
 * of them: steps and scaling by layer. cos, sin: (tokens, dim). x: (tokens, hidden), in place. */
void kvkeep_run_layers(const KvLayer* const* layers, KvStep* const* const* steps, const float* scaling, int64_t count,
                       int64_t sessions, int64_t tokens, const uint16_t* cos, const uint16_t* sin, uint16_t* x);

#ifdef __cplusplus
}
#endif
#endif
