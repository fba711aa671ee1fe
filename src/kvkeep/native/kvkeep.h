/* The interface of the native library: plain C, which library.py calls through ctypes.
 *
 * Every pointer is to memory of the caller: it must outlive the call, and the library keeps none of them. Tensors are
 * row-major; bfloat16 and float16 are uint16_t. A stride counts elements, or bytes where the comment says so. A lane is
 * one key/value head of one sequence; a group is one of the query heads that share a lane. Kernels that return a
 * KvStatus need scratch memory; one that finds none has written nothing. Other errors are not reported: the caller
 * checks shapes. Kernels may run in several threads at once. */
#ifndef KVKEEP_H
#define KVKEEP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default) /* the library hides all else */

/* ---- constants: library.py has the same, and compares them when it loads the library ----------------------------- */

enum KvConstant {
  KV_NUMERICS = 1,        /* raised whenever the bits that kernels compute change */
  KV_PANEL_OUTPUTS = 16,  /* outputs of a matrix that lie in one panel (panels.h) */
  KV_BLOCK_ENTRIES = 512, /* entries that attention combines at a time */
  KV_TILE_ENTRIES = 32,   /* entries of a tile of a block; entries of a group of codes */
  KV_MAX_DIM = 1024       /* the largest width of a key or a value */
};

enum KvKind { /* how a matrix is stored: bfloat16, or the blocks of a GGUF file, bit for bit */
  KV_BF16, KV_Q4_0, KV_Q4_1, KV_Q5_0, KV_Q5_1, KV_Q8_0, KV_Q4_K, KV_Q5_K, KV_Q6_K, KV_KINDS /* how many kinds */
};

enum KvActivation { /* of a gated MLP */
  KV_SILU,
  KV_GELU_TANH /* the approximation by tanh */
};

typedef enum KvStatus { /* how a kernel ended */
  KV_DONE,
  KV_NO_MEMORY /* there was no memory for it to work in, and it has written nothing */
} KvStatus;

/* ---- matrices and layers ----------------------------------------------------------------------------------------- */

typedef struct KvMatrix {
  const void* panels; /* as kvkeep_pack wrote them; kvkeep_packed_bytes has their size */
  int64_t inputs;     /* columns of the weight */
  int64_t outputs;    /* rows of the weight; 0: there is no matrix */
  int64_t kind;       /* a KvKind */
} KvMatrix;

typedef struct KvLayer {          /* a decoder layer laid out like Llama's */
  KvMatrix qkv[3];                /* query, key and value projections, joined where they are of one kind; in order */
  KvMatrix out;                   /* output projection: (hidden, heads * dim) */
  KvMatrix gates[2];              /* gate and up projections of the MLP, joined where they are of one kind */
  KvMatrix down;                  /* down projection: (hidden, intermediate) */
  const uint16_t* qkv_bias[3];    /* (outputs of the matrix) bfloat16; null: none */
  const uint16_t* out_bias;       /* (hidden) bfloat16; null: none */
  const float* input_norm;        /* weight of the RMSNorm before attention, (hidden) */
  const float* query_norm;        /* of each query head, (dim); null: none */
  const float* key_norm;          /* of each key head, (dim); null: none */
  const float* post_attention_norm; /* of the output projection, before the residual is added, (hidden); null: none */
  const float* pre_mlp_norm;      /* of what enters the MLP, (hidden) */
  const float* post_mlp_norm;     /* of the MLP's output, before the residual is added, (hidden); null: none */
  int64_t hidden;                 /* width of the residual stream */
  int64_t heads;                  /* query heads */
  int64_t kv_heads;               /* key/value heads */
  int64_t dim;                    /* width of a head, even */
  int64_t intermediate;           /* width of the MLP, a multiple of 16 */
  int64_t activation;             /* a KvActivation */
  float eps;                      /* of all norms */
} KvLayer;

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* Entries in one place, of one of four formats:
 *   bfloat16   keys (lanes, entries, key dim), values (lanes, entries, value dim). key_bits is 0, cell_indices is null.
 *   grouped    codes of 2, 4, 8 or 16 bits in groups of KV_TILE_ENTRIES entries: offset + scale * code. A row is a
 *              group. Of keys: for each channel the codes of its entries, one scale and one offset. Of values: for each
 *              `value_group` channels and each entry of the group the codes, one scale and one offset.
 *   by channel signed 8-bit codes (lanes, entries, dim), one scale and one offset for each channel of a lane.
 *              key_bits is 8, value_group is 0.
 *   sketched   bfloat16 cells (lanes, cells, dim): an entry is the median or the mean of `sums` cells. cell_indices is
 *              not null. */
typedef struct KvPiece {
  const uint16_t* keys;         /* bfloat16, codes or cells of the keys */
  const uint16_t* values;       /* of the values */
  int64_t entries;              /* how many entries; grouped: a multiple of KV_TILE_ENTRIES */
  int64_t lanes;                /* of the piece; lane l of the query reads lane l % lanes */
  int64_t key_lane_stride;      /* of keys, from lane to lane; bytes where they are codes */
  int64_t key_row_stride;       /* of keys, from row to row; bytes where they are codes; unused where sketched */
  int64_t value_lane_stride;    /* of values, as of keys */
  int64_t value_row_stride;     /* of values, as of keys */
  const uint16_t* key_scale;    /* float16; grouped: (lanes, groups, dim), by channel: (lanes, dim) */
  const uint16_t* key_offset;   /* float16, shaped like key_scale */
  const uint16_t* value_scale;  /* float16; grouped: (lanes, groups, dim / value_group, KV_TILE_ENTRIES) */
  const uint16_t* value_offset; /* float16, shaped like value_scale */
  const float* value_mean;      /* (lanes, dim): added to values; grouped or sketched; null: none */
  const float* value_deviation; /* (lanes, dim): what a grouped value is multiplied by before the mean is added */
  int64_t key_bits;             /* of a code of the keys; 0: no codes */
  int64_t value_bits;           /* of a code of the values */
  int64_t value_group;          /* grouped: channels of a value that share a scale, a multiple of 16; else 0 */
  int64_t key_scale_stride;     /* elements of key_scale and key_offset from lane to lane */
  int64_t value_scale_stride;   /* elements of value_scale and value_offset from lane to lane */
  const int32_t* cell_indices;  /* (sums, lanes, entries): the cells of an entry; null: not sketched */
  const float* key_mean;        /* (lanes, dim): added to sketched keys; null: none */
  int64_t sums;                 /* cells of an entry; 1, 3 or 5 where use_median */
  int64_t use_median;           /* 1: the median of the cells, 0: their mean */
} KvPiece;

typedef struct KvAttention {   /* queries, and what they attend to */
  const uint16_t* query;       /* (lanes, groups, queries, dim) bfloat16 */
  const KvPiece* pieces;       /* (piece_count), in the order of the text; grouped codes before all others */
  const int32_t* first;        /* (lanes): the first entry that is seen; null: 0 */
  const int32_t* stop;         /* (lanes): the entry behind the last that is seen; null: all are seen */
  const int32_t* shift;        /* (lanes): added to an entry's number to give its place in the blocks; null: 0 */
  const uint8_t* mask;         /* (lanes or 1, queries or 1, entries): 1 is seen; null: none */
  int64_t lanes;               /* of the query */
  int64_t groups;              /* query heads of a lane */
  int64_t queries;             /* of each head */
  int64_t dim;                 /* width of queries and keys, even, at most KV_MAX_DIM */
  int64_t value_dim;           /* width of values, at most KV_MAX_DIM */
  int64_t piece_count;         /* how many pieces */
  int64_t entries;             /* of all pieces */
  int64_t causal_offset;       /* query m sees the entries before causal_offset + m + 1; negative: all of them */
  int64_t mask_lane_stride;    /* of the mask, from lane to lane; 0: one for all */
  int64_t mask_query_stride;   /* of the mask, from query to query; 0: one for all */
  float scaling;               /* what scores are multiplied by */
} KvAttention;

typedef struct KvInsert {          /* a new entry of each lane, and the column of a bank that it takes */
  const void* ranks;               /* (lanes, columns): the column of the lowest takes it; null: `column` does */
  int64_t integer_ranks;           /* 1: ranks are int32, 0: float32 */
  int64_t oldest_first;            /* 1: of equal ranks the lowest slot is taken, 0: the first column */
  int64_t columns;                 /* of ranks, slots, scores, extra and newest */
  int64_t column;                  /* of the new entry, where there are no ranks */
  int64_t new_slot;                /* of the new entry: its place in the text */
  char* keys;                      /* (lanes, columns) rows of key_bytes, written to */
  char* values;                    /* (lanes, columns) rows of value_bytes, written to */
  int64_t key_lane_bytes;          /* of keys, from lane to lane */
  int64_t key_bytes;               /* of one key */
  int64_t value_lane_bytes;        /* of values, from lane to lane */
  int64_t value_bytes;             /* of one value */
  int32_t* slots;                  /* (lanes, columns): of each entry, -1 where there is none; null: no ranks either */
  float* scores;                   /* (lanes, columns); null: entries have none */
  float* extra;                    /* (lanes, columns): tokens that were merged into an entry; null: none were */
  int32_t* newest;                 /* (lanes, columns): the last slot among these; null with `extra` */
  const float* new_scores;         /* (lanes): of the new entry; null: 0 */
  char* evicted_keys;              /* (lanes) rows that the evicted key is copied to; null: entries are discarded */
  char* evicted_values;            /* (lanes) rows that the evicted value is copied to; null with evicted_keys */
  int64_t evicted_key_lane_bytes;  /* of evicted_keys, from lane to lane */
  int64_t evicted_value_lane_bytes; /* of evicted_values, from lane to lane */
  int32_t* evicted_slots;          /* (lanes): written, where there are slots; null: not wanted */
  float* evicted_scores;           /* (lanes): written, where there are scores; null: not wanted */
  float* evicted_extra;            /* (lanes): written, where there is `extra`; null: not wanted */
  int32_t* evicted_newest;         /* (lanes): written, where there is `newest`; null: not wanted */
} KvInsert;

typedef struct KvStep {  /* one token of a session in one layer */
  KvAttention attention; /* of one query, after the insert; the call writes its query, groups and scaling */
  KvInsert insert;       /* of the token's entry */
  float* received;       /* (lanes, entries), written: the attention that each entry received; null: not wanted */
  int64_t reduce_max;    /* of the heads of a lane, 1: `received` is the maximum, 0: the mean */
  int64_t token;         /* the token's row in the call */
  int64_t first_lane;    /* the first of these lanes among those of the token; others may have another step */
  int64_t token_lanes;   /* lanes of the token: its KV heads; 0: those of the attention */
} KvStep;

/* ---- the library ------------------------------------------------------------------------------------------------- */

typedef struct KvField { /* a field of a structure, as the library was compiled with it */
  const char* structure; /* static; the name of the structure */
  const char* name;      /* static; the name of the field; empty: the structure itself */
  int64_t offset;        /* bytes from the start of the structure */
  int64_t size;          /* bytes */
} KvField;

typedef struct KvNumber { /* a constant, as the library was compiled with it */
  const char* name;       /* static; as this header has it */
  int64_t value;          /* its value */
} KvNumber;

/* Returns the fields of all structures above, a static array, and writes how many there are to `count`. */
const KvField* kvkeep_fields(int64_t* count);
/* Returns the constants above, a static array, and writes how many there are to `count`. */
const KvNumber* kvkeep_constants(int64_t* count);
/* Returns the names of the paths that this processor runs, best first, separated by spaces; the string is static. */
const char* kvkeep_paths(void);
/* Takes the path of that name, for all later calls; returns 1, or 0 where this processor does not run it. */
int kvkeep_choose(const char* name);
/* Returns the name of the path in use; the string is static. */
const char* kvkeep_path(void);
/* Lets loops run in the OpenMP threads of the process: GOMP_parallel and omp_get_max_threads of the runtime that torch
 * has loaded. With null pointers, or without this call, the library starts threads. No kernel may run meanwhile. */
void kvkeep_use_openmp(void* gomp_parallel, void* omp_get_max_threads);
/* Sets how many threads loops run in where OpenMP is not used, the caller's among them. */
void kvkeep_set_threads(int count);

/* ---- matrices ---------------------------------------------------------------------------------------------------- */

/* Returns the bytes of the panels of such a matrix; 0 where there is no such kind, or where `inputs` is no multiple of
 * the block's length. */
int64_t kvkeep_packed_bytes(int64_t kind, int64_t inputs, int64_t outputs);
/* Writes the panels of a matrix. rows: (outputs) rows of blocks, `row_bytes` apart. panels: kvkeep_packed_bytes.
 * Returns 1, or 0 where a scale or an offset of a block is infinite or NaN, or where there is no such kind. */
int kvkeep_pack(int64_t kind, int64_t inputs, int64_t outputs, const uint8_t* rows, int64_t row_bytes, uint8_t* panels);
/* Writes the rows of blocks that a matrix was packed from, bit for bit; nothing where there is no such kind. */
void kvkeep_unpack(const KvMatrix* matrix, uint8_t* rows, int64_t row_bytes);
/* Writes `count` rows of the weight, those of `outputs`, to rows (count, inputs); nothing where there is no such
 * kind. */
void kvkeep_rows(const KvMatrix* matrix, const int64_t* outputs, int64_t count, float* rows);
/* Writes y = x W^T + bias. x: (rows, inputs). bias: (outputs) or null. y: (rows, outputs), rows y_stride apart. */
KvStatus kvkeep_product(const KvMatrix* matrix, const uint16_t* x, int64_t rows, const uint16_t* bias, uint16_t* y,
                        int64_t y_stride);

/* ---- layers without attention ------------------------------------------------------------------------------------ */

/* Writes the RMSNorm of each row, times `weight` (width). x, y: (rows, width); they may be the same. */
void kvkeep_norm(const uint16_t* x, const float* weight, float eps, int64_t rows, int64_t width, uint16_t* y);
/* Writes cosines and sines of position * frequency, times scaling. positions: (count). frequencies: (half). cos, sin:
 * (count, 2 * half): the second half repeats the first. */
void kvkeep_angles(const int64_t* positions, int64_t count, const float* frequencies, int64_t half, float scaling,
                   uint16_t* cos, uint16_t* sin);
/* Runs a layer up to its attention: norm, projections, rotary embedding. x: (batch * tokens, hidden). cos, sin: (batch,
 * tokens, dim), or (tokens, dim) for all with `shared_angles`. query, key, value: (batch, heads, tokens, dim),
 * written. */
KvStatus kvkeep_before_attention(const KvLayer* layer, const uint16_t* x, int64_t batch, int64_t tokens,
                                 const uint16_t* cos, const uint16_t* sin, int shared_angles, uint16_t* query,
                                 uint16_t* key, uint16_t* value);
/* Runs a layer from its attention on: output projection, residual, MLP, residual. attended: (rows, heads * dim).
 * residual, y: (rows, hidden); they may be the same. */
KvStatus kvkeep_after_attention(const KvLayer* layer, const uint16_t* attended, const uint16_t* residual, int64_t rows,
                                uint16_t* y);

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* Attends. out: (lanes, groups, queries, value_dim), float32 with `float_out`, else bfloat16. lse: the log-sum-exp of
 * the scores, (lanes, groups, queries); -inf, and zeros in out, for a query that sees nothing. An attention may take
 * several calls, each of the next whole blocks: `state` is then (lanes * groups * queries * (2 + value_dim)) floats,
 * which every call but the first resumes with `resume`; out and lse are null in every call but the last. */
KvStatus kvkeep_attend(const KvAttention* attention, void* out, int float_out, float* lse, float* state, int resume);
/* Writes the attention that entries received from the last `last` queries: exp(score - lse), summed over the queries
 * and averaged over the groups; with `reduce_max` the maximum over both. lse: as kvkeep_attend wrote it, perhaps over
 * more entries. received: (lanes, entries). */
KvStatus kvkeep_received(const KvAttention* attention, const float* lse, int64_t last, int reduce_max, float* received);
/* Writes a new entry into each lane, and copies the one that it evicts. new_keys, new_values: (lanes) rows of
 * insert->key_bytes and insert->value_bytes. */
void kvkeep_insert(const KvInsert* insert, int64_t lanes, const char* new_keys, const char* new_values);
/* Runs the attention of one layer for one token of each of some sessions: inserts its entry, then attends. A token's
 * lanes may be divided between several of the `count` steps. query: (tokens, heads, dim). key, value: (kv heads,
 * tokens, dim), or (tokens, kv heads, dim) with `by_token`. out: (tokens, heads, value_dim) and lse: (tokens, heads):
 * the rows of these sessions' tokens are written, and no others. */
KvStatus kvkeep_attend_sessions(KvStep* const* steps, int64_t count, const uint16_t* query, const uint16_t* key,
                                const uint16_t* value, int64_t tokens, int64_t heads, int by_token, float scaling,
                                uint16_t* out, float* lse);
/* Runs `count` layers of the same shapes, one after the other, for the tokens of some sessions. layers: (count). steps:
 * (count), tables of step_counts[i] steps. scaling: (count), of attention. cos, sin: (tokens, dim). x: (tokens,
 * hidden), read and written. */
KvStatus kvkeep_run_layers(const KvLayer* const* layers, KvStep* const* const* steps, const float* scaling,
                           int64_t count, const int64_t* step_counts, int64_t tokens, const uint16_t* cos,
                           const uint16_t* sin, uint16_t* x);

/* ---- files in memory --------------------------------------------------------------------------------------------- */

/* Maps a file, whose first `bytes` bytes are reserved on its disk, for reading and writing; null where the system maps
 * no more. Where the file cannot be read later, its memory becomes zeros, and kvkeep_is_lost says so. */
void* kvkeep_map_file(int descriptor, int64_t bytes);
/* Ends a mapping that began at `start`. */
void kvkeep_unmap_file(void* start);
/* Returns how many mapped files could not be read so far, in the whole process. */
int64_t kvkeep_lost_files(void);
/* Returns whether the mapped file that has `address` could not be read. */
int kvkeep_is_lost(const void* address);
/* Writes a digest of each block of rows: digests (lanes, blocks). block_bytes is a multiple of 8. */
void kvkeep_digests(const void* rows, int64_t lanes, int64_t lane_bytes, int64_t blocks, int64_t block_bytes,
                    uint64_t* digests);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
