/* The interface of the native library: plain C, which library.py calls through ctypes.
 *
 * This header is its only declaration: Python reads it when it is imported (structures.py), and the library says of
 * which declarations it was compiled (kvkeep_interface).
 *
 * Memory is the caller's: it must outlive the call, and the library keeps none of it. It comes as a KvArray or as
 * KvRows, with its length and the type of its numbers. Every function that takes them compares all sizes with each
 * other before it writes anything (checks.h). Where one does not fit, it returns KV_BAD_CALL and has written nothing.
 * Tables of structures must have as many as the call says. Tensors are row-major; strides count numbers. A lane is one
 * key/value head of one sequence; a group is one of the query heads that share a lane. Kernels may run in several
 * threads at once. */
#ifndef KVKEEP_H
#define KVKEEP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default) /* the library hides all else */

/* ---- constants --------------------------------------------------------------------------------------------------- */

enum KvConstant {
  KV_NUMERICS = 1,        /* raised whenever the bits that kernels compute change */
  KV_PANEL_OUTPUTS = 16,  /* outputs of a matrix that lie in one panel (panels.h) */
  KV_BLOCK_ENTRIES = 512, /* entries that attention combines at a time */
  KV_TILE_ENTRIES = 32,   /* entries of a tile of a block; entries of a group of codes */
  KV_MAX_DIM = 1024       /* the largest width of a key or a value */
};

enum KvKind { /* how a matrix is stored: bfloat16, float16, float32, or the blocks of a GGUF file, bit for bit */
  KV_BF16, KV_Q4_0, KV_Q4_1, KV_Q5_0, KV_Q5_1, KV_Q8_0, KV_Q4_K, KV_Q5_K, KV_Q6_K, KV_IQ4_NL,
  KV_IQ4_XS, KV_MXFP4, KV_Q2_K, KV_Q3_K, KV_F16, KV_IQ2_XXS, KV_IQ2_XS, KV_IQ2_S, KV_IQ3_XXS,
  KV_IQ3_S, KV_IQ1_S, KV_IQ1_M, KV_TQ1_0, KV_TQ2_0, KV_F32,
  KV_KINDS /* how many kinds */
};

enum KvActivation { /* of an MLP */
  KV_SILU,
  KV_GELU_TANH, /* the approximation by tanh */
  KV_RELU2,     /* the square of what is positive */
  KV_GELU       /* by the error function */
};

enum KvScores { /* what a router makes of its products */
  KV_SOFTMAX, /* over all experts */
  KV_SIGMOID  /* of each */
};

enum KvRotation { /* which of the rotated channels are rotated together */
  KV_HALVES,     /* i and i + rotated / 2; products are rounded before they are added */
  KV_PAIRS,      /* 2 i and 2 i + 1, in the same way */
  KV_EXACT_PAIRS, /* 2 i and 2 i + 1; only the sum is rounded */
  KV_SPREAD_PAIRS /* as KV_EXACT_PAIRS, with the angle of both at 2 i and 2 i + 1 instead of i and i + rotated / 2 */
};

enum KvOrder { /* of attention and MLP in a layer */
  KV_IN_TURN,      /* the MLP reads the norm of the residual to which attention was added */
  KV_SIDE_BY_SIDE, /* both read norms of the residual that enters the layer; attention is added to it, then the MLP */
  KV_SUMMED_FIRST  /* the same, but attention and MLP are added to each other first */
};

enum KvFormat { /* of the entries of a KvPiece */
  KV_PLAIN,      /* bfloat16: keys (lanes, entries, dim), values (lanes, entries, value_dim) */
  KV_GROUPED,    /* codes of 2, 4, 8 or 16 bits in groups of KV_TILE_ENTRIES entries: offset + scale * code. A row is a
                    group. Of keys: for each channel the codes of its entries, one scale and one offset. Of values: for
                    each `group` channels and each entry of the group the codes, one scale and one offset */
  KV_BY_CHANNEL, /* signed 8-bit codes (lanes, entries, dim), one scale and one offset for each channel of a lane */
  KV_SKETCHED    /* bfloat16 cells (lanes, cells, dim): an entry is the median or the mean of `sums` cells */
};

enum KvType { /* of the numbers of a KvArray */
  KV_NOTHING,  /* there is no array */
  KV_UINT8, KV_INT8, KV_INT16, KV_INT32, KV_INT64, KV_FLOAT16, KV_BFLOAT16, KV_FLOAT32, KV_FLOAT64
};

typedef enum KvStatus { /* how a call ended */
  KV_DONE,
  KV_NO_MEMORY,  /* there was no memory to work in; it has written nothing */
  KV_BAD_CALL,   /* sizes do not fit each other (kvkeep_broken_rule); it has written nothing */
  KV_NOT_FINITE, /* a scale or an offset of a matrix is infinite or NaN */
  KV_FAILED      /* a kernel wanted more memory than it had reserved; what it has written means nothing */
} KvStatus;

/* ---- numbers in memory ------------------------------------------------------------------------------------------- */

typedef struct KvArray { /* numbers one after the other */
  void* data;            /* where they begin */
  int64_t length;        /* how many */
  int64_t type;          /* a KvType; KV_NOTHING: there is no array */
} KvArray;

typedef struct KvRows { /* rows of each lane */
  KvArray numbers;      /* from the first number on, at least to the last one of the last row */
  int64_t lanes;        /* how many */
  int64_t rows;         /* of a lane */
  int64_t width;        /* numbers of a row, one after the other */
  int64_t lane_stride;  /* from lane to lane */
  int64_t row_stride;   /* from row to row */
} KvRows;

/* ---- matrices and layers ----------------------------------------------------------------------------------------- */

typedef struct KvMatrix {
  KvArray panels;     /* uint8, as kvkeep_pack wrote them; kvkeep_packed_bytes has their size */
  int64_t inputs;     /* columns of the weight */
  int64_t outputs;    /* rows of the weight; 0: there is no matrix */
  int64_t kind;       /* a KvKind */
} KvMatrix;

typedef struct KvNorm { /* of rows */
  KvArray weight;     /* (width) float32; nothing: there is no norm */
  KvArray bias;       /* (width) float32, added; or nothing */
  int64_t centred;    /* 1: a LayerNorm, which subtracts the mean of a row first, 0: an RMSNorm */
  float eps;          /* added to the mean square */
} KvNorm;

typedef struct KvRouter { /* chooses experts for each row */
  KvMatrix weight;        /* (experts, hidden); products are float32 if it is KV_F32, else rounded to bfloat16 */
  KvArray bias;           /* (experts), added to products, in their type; or nothing */
  KvArray choice_bias;    /* (experts) float32, added to scores only where they are compared; or nothing */
  int64_t scores;         /* a KvScores */
  int64_t k;              /* experts of a row, those of the greatest scores; of equal ones the first */
  int64_t groups;         /* into which experts are divided, one after the other; 1: they are not */
  int64_t taken_groups;   /* from which experts are chosen: those of the greatest scores; of equal ones the first */
  int64_t group_scores;   /* 1: a group's score is the greatest of its experts, 2: the sum of the greatest two */
  int64_t normalised;     /* 1: weights, the scores of these, are divided by their sum */
  int64_t rounded;        /* 1: weights are rounded to bfloat16; 2: so are scores, their sum and each result */
  float scale;            /* what weights are multiplied by */
} KvRouter;

typedef struct KvExperts { /* the experts of a layer. A matrix has the outputs of each expert, one after the other */
  KvMatrix gates[2];       /* gates before ups, joined where they are of one kind; or only ups */
  KvMatrix down;           /* (experts * hidden, inner) */
  KvArray gates_bias;      /* (experts, outputs of the gates of one) bfloat16; or nothing */
  KvArray down_bias;       /* (experts, hidden) bfloat16; or nothing */
  KvArray gate_values;     /* (65536) bfloat16: what a gate becomes, or an up without gates: the number whose bits are i
                              becomes gate_values[i] */
  KvArray up_values;       /* the same of ups, which gates are multiplied by; nothing: they stay as they are */
  int64_t experts;         /* how many */
  int64_t hidden;          /* width of the residual stream, a multiple of 16 */
  int64_t inner;           /* width of an expert, a multiple of 16 */
  int64_t gated;           /* 1: there are gates, 0: only ups */
} KvExperts;

typedef struct KvMlp {     /* an MLP, a mixture of experts, or a mixture and an MLP beside it: outputs are added */
  KvMatrix gates[2];       /* of an MLP: gate and up projections, joined if they are of one kind; or only ups */
  KvMatrix down;           /* down projection: (hidden, inner) */
  KvArray gates_bias[2];   /* (outputs of the matrix) bfloat16; or nothing */
  KvArray down_bias;       /* (hidden) bfloat16; or nothing */
  KvMatrix share;          /* (1, hidden): the MLP's output is multiplied by the sigmoid of its product; or nothing */
  const KvRouter* router;  /* of a mixture; or null */
  const KvExperts* experts; /* null with it */
  int64_t hidden;          /* width of inputs and outputs */
  int64_t inner;           /* width of the MLP, a multiple of 16; 0: there is none */
  int64_t gated;           /* 1: there are gates, 0: only ups */
  int64_t activation;      /* a KvActivation */
  float gate_scale;        /* factor of gates, or of ups without gates, before their activation */
  float scale;             /* factor of the MLP's output */
} KvMlp;

typedef struct KvLayer {          /* a decoder layer laid out like Llama's */
  KvMatrix qkv[4];                /* query, key, value and gate projections, as far as the layer has them, joined where
                                     they are of one kind; in order */
  int64_t gated;                  /* gates, whose sigmoid is a factor of attention's output. 0: there are none; 1: those
                                     of a head, (dim), follow its queries; 2: those of all heads follow values */
  int64_t by_head;                /* 1: query, key and value of each head follow each other, 0: all queries are first */
  int64_t values_are_keys;        /* 1: values are copies of projected keys, and have no projection */
  KvMatrix out;                   /* output projection: (hidden, heads * dim) */
  const KvMlp* mlp;               /* what follows attention; null: the caller runs it */
  KvArray qkv_bias[4];            /* (outputs of the matrix) bfloat16; or nothing */
  KvArray out_bias;               /* (hidden) bfloat16; or nothing */
  KvArray sinks;                  /* (heads) float32: those of its attention (KvAttention); or nothing */
  KvNorm input_norm;              /* before attention, (hidden); or nothing, as the others */
  KvNorm query_norm;              /* of each query head, (dim), or without gates of all, (heads * dim) */
  KvNorm key_norm;                /* of each key head, (dim), or of all at once, (kv_heads * dim) */
  KvNorm value_norm;              /* of each value head, (dim) */
  KvNorm post_attention_norm;     /* of the output projection, before the residual is added, (hidden) */
  KvNorm pre_mlp_norm;            /* of what enters the MLP, (hidden) */
  KvNorm post_mlp_norm;           /* of the MLP's output, before the residual is added, (hidden) */
  KvMatrix side_gate;             /* of a layer with a side input, a vector of each token: gates from the residual after
                                     the MLP, (side, hidden); or nothing. Their activation times the side input is
                                     projected, and added to the residual */
  KvMatrix side_projection;       /* (hidden, side); or nothing, as side_gate */
  KvNorm side_norm;               /* of side_projection's output, (hidden) */
  int64_t side_activation;        /* a KvActivation */
  int64_t hidden;                 /* width of the residual stream */
  int64_t heads;                  /* query heads */
  int64_t kv_heads;               /* key/value heads; 0: the layer reads the entries of another one */
  int64_t dim;                    /* width of a head, even */
  int64_t rotated;                /* channels of a query or key that are rotated, its first ones, even; 0: none */
  int64_t rotation;               /* a KvRotation */
  int64_t order;                  /* a KvOrder; in turn, where the caller runs the MLP */
  int64_t rotates_first;          /* 1: queries and keys are rotated before their norms, 0: after them */
  float clip;                     /* the bound of queries, keys and values before they are rotated; 0: none */
  float input_scale;              /* factor of the norm before attention; 1 without one */
  float key_scale;                /* factor of keys before they are rotated */
  float attention_scale;          /* factor of attention's output before it is added */
  float mlp_scale;                /* factor of the MLP's output before it is added */
  float output_scale;             /* factor of the layer's output; 1 where the caller runs the MLP */
  float scaling;                  /* of attention, as KvAttention has it */
  float cap;                      /* the same */
} KvLayer;

typedef struct KvDeltaNet { /* a gated delta net (Qwen3-Next, Qwen 3.5), without its projections */
  KvArray conv;             /* (taps, channels) float32: the convolution's weights, those of the oldest input first */
  KvArray rate;             /* (value_heads) float32: exp(A_log) */
  KvArray step_bias;        /* (value_heads) float32: added to what says how fast a state decays */
  KvArray norm;             /* (value_dim) float32: weight of the RMSNorm of what a head returns */
  int64_t taps;             /* inputs of the convolution */
  int64_t key_heads;        /* of queries and keys; value_heads is a multiple */
  int64_t value_heads;      /* of values and states */
  int64_t key_dim;          /* a multiple of 16 */
  int64_t value_dim;        /* a multiple of 16 */
  float eps;                /* of the norm */
} KvDeltaNet;

typedef struct KvMamba2 { /* a Mamba-2 layer, without its projections */
  KvArray conv;           /* (taps, channels) float32: the convolution's weights, those of the oldest input first */
  KvArray conv_bias;      /* (channels) float32, or nothing */
  KvArray rate;           /* (heads) float32: exp(A_log) */
  KvArray step_bias;      /* (heads) float32: dt_bias, added to dt before softplus */
  KvArray skip;           /* (heads) float32: D: factor of the input that is added to the output */
  KvArray norm;           /* (heads * head_dim) float32: weight of the RMSNorm of each group; or nothing: no norm */
  int64_t taps;           /* inputs of the convolution */
  int64_t heads;          /* a multiple of groups */
  int64_t head_dim;       /* a multiple of 4; heads * head_dim / groups is a multiple of 16 */
  int64_t groups;         /* of heads that share B and C, and a norm */
  int64_t state_dim;      /* a multiple of 16 */
  int64_t gate_first;     /* 1: gate before the norm; 0: after it */
  float eps;              /* of the norm */
  float smallest_step;    /* lower bound of dt (time_step_limit) */
  float greatest_step;    /* upper bound of dt */
} KvMamba2;

/* ---- attention --------------------------------------------------------------------------------------------------- */

typedef struct KvSide { /* the keys or the values of a piece */
  KvRows rows;          /* bfloat16, codes or cells, as the format says; grouped: uint8, or int16 for 16 bits */
  KvRows scale;         /* float16; grouped: (lanes, groups, dim) of keys, (lanes, groups, dim / group *
                           KV_TILE_ENTRIES) of values; by channel: (lanes, 1, dim) */
  KvRows offset;        /* float16, as scale */
  KvArray mean;         /* (lanes, dim) float32, added to sketched entries and grouped values; or nothing */
  KvArray deviation;    /* (lanes, dim) float32: what a grouped value is multiplied by before the mean is added */
  int64_t bits;         /* grouped: of a code */
  int64_t group;        /* grouped: channels of a value that share a scale, a multiple of 16 */
} KvSide;

typedef struct KvPiece { /* entries in one place; lane l of the query reads lane l % lanes */
  int64_t format;        /* a KvFormat */
  int64_t first;         /* the row of the first entry, where rows are entries; else 0 */
  int64_t entries;       /* how many entries; grouped: a multiple of KV_TILE_ENTRIES */
  KvSide keys;           /* of these entries */
  KvSide values;         /* of the same lanes as the keys */
  KvArray cell_indices;  /* sketched: (sums, lanes, entries) int32, the cells of an entry */
  int64_t sums;          /* sketched: cells of an entry; 1, 3 or 5 where use_median */
  int64_t use_median;    /* 1: the median of the cells, 0: their mean */
} KvPiece;

typedef struct KvAttention { /* queries, and what they attend to */
  KvArray query;             /* (lanes, groups, queries, dim) bfloat16 */
  KvPiece* pieces;           /* (piece_count), in the order of the text; grouped ones before all others */
  KvArray first;             /* (lanes) int32: the first entry that is seen; nothing: 0 */
  KvArray stop;              /* (lanes) int32: the entry behind the last that is seen; nothing: all are seen */
  KvArray shift;             /* (lanes) int32: added to an entry's number to give its place in the blocks; nothing: 0;
                                a multiple of KV_TILE_ENTRIES if pieces are grouped */
  KvRows mask;               /* (lanes or 1, queries or 1, entries or more) uint8: 1 is seen; or nothing */
  KvArray sinks;             /* (heads) float32: a score of each head that takes a share of the softmax and brings no
                                value. Head h of all lanes has number h % heads; nothing: there are none */
  int64_t lanes;             /* of the query */
  int64_t groups;            /* query heads of a lane */
  int64_t queries;           /* of each head */
  int64_t dim;               /* width of queries and keys, even, at most KV_MAX_DIM */
  int64_t value_dim;         /* width of values, at most KV_MAX_DIM */
  int64_t piece_count;       /* how many pieces */
  int64_t entries;           /* of all pieces */
  int64_t causal_offset;     /* query m sees the entries before causal_offset + m + 1; negative: all of them */
  int64_t window;            /* how many of these a query sees, the last ones; 0: all of them */
  float scaling;             /* what products of queries and keys are multiplied by: scores */
  float cap;                 /* scores become cap * tanh(score / cap); 0: they stay as they are */
} KvAttention;

typedef struct KvInsert {  /* a new entry of each lane, and the column of a bank that it takes */
  KvRows keys;             /* written: the column's row of each lane */
  KvRows values;           /* written, as keys */
  KvArray ranks;           /* (lanes, columns) float32 or int32: the column of the lowest takes it; nothing: `column` */
  int64_t oldest_first;    /* 1: of equal ranks the lowest slot is taken, 0: the first column */
  int64_t columns;         /* of ranks, slots, scores, extra and newest */
  int64_t column;          /* of the new entry, where there are no ranks */
  int64_t new_slot;        /* of the new entry: its place in the text */
  KvArray slots;           /* (lanes, columns) int32: of each entry, -1 where there is none; nothing: no ranks either */
  KvArray scores;          /* (lanes, columns) float32; or nothing */
  KvArray extra;           /* (lanes, columns) float32: tokens that were merged into an entry; or nothing */
  KvArray newest;          /* (lanes, columns) int32: the last slot among these; nothing with `extra` */
  KvArray new_scores;      /* (lanes) float32: of the new entry; nothing: 0 */
  KvRows evicted_keys;     /* the evicted key is copied to row `evicted_row`; nothing: entries are discarded */
  KvRows evicted_values;   /* as evicted_keys, and nothing with them */
  int64_t evicted_row;     /* the row of the evicted entry */
  KvArray evicted_slots;   /* (lanes) int32: written, where there are slots; nothing: not wanted */
  KvArray evicted_scores;  /* (lanes) float32: written, where there are scores; nothing: not wanted */
  KvArray evicted_extra;   /* (lanes) float32: written, where there is `extra`; nothing: not wanted */
  KvArray evicted_newest;  /* (lanes) int32: written, where there is `newest`; nothing: not wanted */
} KvInsert;

typedef struct KvStep {  /* the next token of a session in one layer, or several */
  KvAttention attention; /* after the insert, with a query for each token; of several, each sees the entries up to its
                            own. The call writes its query, groups, scaling, cap and sinks */
  KvInsert insert;       /* of the first token's entry; those of further ones take the next columns and slots. Of
                            several tokens, nothing beside evicted entries is copied */
  KvArray received;      /* (lanes, entries) float32, written: the attention that each entry received; or nothing */
  int64_t reduce_max;    /* of the heads of a lane, 1: `received` is the maximum, 0: the mean */
  int64_t evicts;        /* how many of the tokens evict an entry, where it is copied: the last ones, to rows from
                            `evicted_row` on */
  int64_t token;         /* the first token's row in the call; further ones have the next rows */
  int64_t first_lane;    /* the first of these lanes among those of a token; others may have another step */
  int64_t token_lanes;   /* lanes of a token: its KV heads; 0: those of the attention */
  int64_t number;        /* of the pass */
  int64_t written;       /* written: `number`, once the entries are written, and those that they evict are copied */
} KvStep;

/* ---- the library ------------------------------------------------------------------------------------------------- */

/* Returns the SHA-256 of the declarations of this header as the library was compiled with them, as CMakeLists.txt and
 * structures.py compute it; the string is static. */
const char* kvkeep_interface(void);
/* Returns the rule that the last call of this thread broke which returned KV_BAD_CALL; the string is static. */
const char* kvkeep_broken_rule(void);
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
/* Writes the panels of a matrix. rows: uint8, (outputs) rows of blocks, `row_bytes` apart. panels: uint8,
 * kvkeep_packed_bytes. Returns KV_NOT_FINITE where a scale or an offset of a block is infinite or NaN. */
KvStatus kvkeep_pack(int64_t kind, int64_t inputs, int64_t outputs, KvArray rows, int64_t row_bytes, KvArray panels);
/* Writes the rows of blocks that a matrix was packed from, bit for bit. rows: as for kvkeep_pack. */
KvStatus kvkeep_unpack(const KvMatrix* matrix, KvArray rows, int64_t row_bytes);
/* Writes rows of the weight, those of `outputs` (n) int64, to rows (n, inputs) float32. */
KvStatus kvkeep_rows(const KvMatrix* matrix, KvArray outputs, KvArray rows);
/* Writes y = x W^T + bias. x: (n, inputs). bias: (outputs), or nothing. y: (n, outputs), rows y_stride apart. All are
 * bfloat16; with a matrix of KV_F32, all may be float32. */
KvStatus kvkeep_product(const KvMatrix* matrix, KvArray x, KvArray bias, KvArray y, int64_t y_stride);

/* ---- layers without attention ------------------------------------------------------------------------------------ */

/* Writes the norm of each row. x, y: (n, width) bfloat16; they may be the same. */
KvStatus kvkeep_norm(const KvNorm* norm, KvArray x, KvArray y);
/* Writes cosines and sines of position * frequency, times scaling. positions: (n) int64. frequencies: (half) float32.
 * cos, sin: (n, 2 * half) bfloat16: the second half repeats the first. */
KvStatus kvkeep_angles(KvArray positions, KvArray frequencies, float scaling, KvArray cos, KvArray sin);
/* Runs a layer up to its attention: norm, projections, rotary embedding. x: (batch * tokens, hidden). cos, sin: (batch,
 * tokens, rotated), or (tokens, rotated) for all. query, key, value: (batch, heads, tokens, dim), written. gate:
 * (batch * tokens, heads * dim), written, if the layer is gated. All are bfloat16. */
KvStatus kvkeep_before_attention(const KvLayer* layer, KvArray x, int64_t batch, KvArray cos, KvArray sin,
                                 KvArray query, KvArray key, KvArray value, KvArray gate);
/* Runs a layer from its attention to its MLP: output projection, residual, norm. attended: (n, heads * dim). gate: the
 * same of a gated layer, as kvkeep_before_attention wrote it; its memory is used. added: (n, hidden), added to the
 * output of attention before that is added to the residual; or nothing. residual, y: (n, hidden), the residual stream;
 * they may be the same. normed: (n, hidden), written. All are bfloat16. Of a layer whose attention and MLP come in
 * turn. */
KvStatus kvkeep_before_mlp(const KvLayer* layer, KvArray attended, KvArray gate, KvArray added, KvArray residual,
                           KvArray y, KvArray normed);
/* Runs a layer from its attention on: output projection, residual, MLP, residual, side input. side: (n, side) bfloat16,
 * if the layer reads a side input. Other arguments are those of kvkeep_before_mlp. */
KvStatus kvkeep_after_attention(const KvLayer* layer, KvArray attended, KvArray gate, KvArray added, KvArray side,
                                KvArray residual, KvArray y);
/* Runs an MLP. x, y: (n, hidden) bfloat16; they may be the same. */
KvStatus kvkeep_mlp(const KvMlp* mlp, KvArray x, KvArray y);
/* Chooses experts for each row. x: (n, hidden) bfloat16. logits: (n, experts) float32, written: products of the weight.
 * weights: (n, k) float32, written. chosen: (n, k) int64, written. */
KvStatus kvkeep_route(const KvRouter* router, KvArray x, KvArray logits, KvArray weights, KvArray chosen);
/* Writes the sum of what the chosen experts return for each row, times their weights. x, y: (n, hidden) bfloat16; they
 * may be the same. chosen: (n, k) int64; numbers of no expert are left out. weights: (n, k) float32. What an expert
 * returns is rounded to bfloat16, and so is its product with the weight; these are added in float32, in the order of
 * experts. */
KvStatus kvkeep_run_experts(const KvExperts* experts, KvArray x, KvArray chosen, KvArray weights, KvArray y);
/* Runs a gated delta net between its projections, token by token. inputs: (taps - 1 + tokens, channels): queries, keys
 * and values of the last tokens before these, and of these. gate, out: (tokens, value_heads * value_dim). beta, decay:
 * (tokens, value_heads). All are bfloat16. state: (value_heads, key_dim, value_dim) float32, read and written. */
KvStatus kvkeep_delta_net(const KvDeltaNet* net, KvArray inputs, KvArray gate, KvArray beta, KvArray decay,
                          KvArray state, KvArray out);
/* Runs a Mamba-2 layer between its projections, token by token. inputs: (taps - 1 + tokens, channels), the
 * inputs of heads and B and C of groups, of the last tokens before these, and of these. gate, out: (tokens, heads *
 * head_dim). steps: (tokens, heads); -inf for a token that changes no state. All are bfloat16. state: (heads,
 * head_dim, state_dim) float32, read and written. */
KvStatus kvkeep_mamba2(const KvMamba2* space, KvArray inputs, KvArray gate, KvArray steps, KvArray state, KvArray out);

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* Attends. out: (lanes, groups, queries, value_dim), float32 or bfloat16. lse: the log-sum-exp of the scores, sinks
 * among them, (lanes, groups, queries) float32; without sinks -inf, and zeros in out, for a query that sees nothing. An
 * attention may take several calls, each of the next whole blocks: `state` is then (lanes * groups * queries * (2 +
 * value_dim)) float32, which every call but the first resumes with `resume`; out and lse are nothing in every call but
 * the last. */
KvStatus kvkeep_attend(const KvAttention* attention, KvArray out, KvArray lse, KvArray state, int resume);
/* Writes the attention that entries received from the last `last` queries: exp(score - lse), summed over the queries
 * and averaged over the groups; with `reduce_max` the maximum over both. lse: as kvkeep_attend wrote it, perhaps over
 * more entries. received: (lanes, entries) float32. */
KvStatus kvkeep_received(const KvAttention* attention, KvArray lse, int64_t last, int reduce_max, KvArray received);
/* Writes a new entry into each lane, and copies the one that it evicts. new_keys, new_values: (lanes) rows of the
 * widths and types of insert->keys and insert->values. */
KvStatus kvkeep_insert(const KvInsert* insert, KvArray new_keys, KvArray new_values);
/* Moves steps of a session that evict nothing to other tokens, the first of which has this slot: entries take columns
 * that many further on or back as slots, the last pieces end there, and so does what queries see. Sets what differs in
 * each call, too: the first token's row, and the number of the pass. */
void kvkeep_move_steps(KvStep* const* steps, int64_t count, int64_t slot, int64_t token, int64_t number);
/* Runs the attention of one layer for the next tokens of each of some sessions: inserts their entries, then attends.
 * The lanes of a token may be divided between several of the `count` steps. query: (tokens, heads, dim). key, value:
 * (kv heads, tokens, dim), or (tokens, kv heads, dim) with `by_token`. sinks: of each head, (heads) float32; or
 * nothing. out: (tokens, heads, value_dim). All others are bfloat16. lse: (tokens, heads) float32. The rows of these
 * sessions' tokens are written to out and lse, and no others. */
KvStatus kvkeep_attend_sessions(KvStep* const* steps, int64_t count, KvArray query, KvArray key, KvArray value,
                                int64_t tokens, int64_t heads, int by_token, float scaling, float cap, KvArray sinks,
                                KvArray out, KvArray lse);
/* Runs `count` layers of the same heads, one after the other, for the tokens of some sessions. layers: (count), with
 * entries of their own and no side input. steps: (count), tables of step_counts[i] steps. cos, sin: (tokens,
 * rotated) bfloat16, for all layers that rotate. x: (tokens, hidden) bfloat16, read and written. normed: nothing; or,
 * where the last layer has no MLP here, (tokens, hidden) bfloat16, written: what enters its MLP, whose output is then
 * missing in x. */
KvStatus kvkeep_run_layers(const KvLayer* const* layers, KvStep* const* const* steps, int64_t count,
                           const int64_t* step_counts, KvArray cos, KvArray sin, KvArray x, KvArray normed);

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
/* Writes a digest of each of `blocks` blocks of `block_rows` rows, from block `first` on: digests (lanes, blocks)
 * int64. A block is a multiple of 8 bytes, those between its rows among them. */
KvStatus kvkeep_digests(const KvRows* rows, int64_t first, int64_t blocks, int64_t block_rows, KvArray digests);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
