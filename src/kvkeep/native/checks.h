// Whether what a function of kvkeep.h is given fits together, compared before it writes anything.
//
// Each returns true, or false after it has noted the rule that is broken (kvkeep_broken_rule). Kernels rely on these
// rules and check nothing themselves. They are compiled once, for all instruction sets.
#pragma once

#include "kvkeep.h"

// No count, width or stride is greater: products of three of them fit 128 bits.
inline constexpr int64_t MAX_SIZE = int64_t(1) << 40;
inline bool is_size(int64_t number) { return number >= 0 && number <= MAX_SIZE; }

#pragma GCC visibility push(hidden)

bool matrix_fits(const KvMatrix& matrix);
bool file_rows_fit(const KvMatrix& matrix, const KvArray& rows, int64_t row_bytes);
bool outputs_fit(const KvMatrix& matrix, const KvArray& outputs, const KvArray& rows);
bool product_fits(const KvMatrix& matrix, const KvArray& x, const KvArray& bias, const KvArray& y, int64_t y_stride);

bool norm_fits(const KvNorm& norm, const KvArray& x, const KvArray& y);
bool angles_fit(const KvArray& positions, const KvArray& frequencies, const KvArray& cos, const KvArray& sin);
bool before_attention_fits(const KvLayer& layer, const KvArray& x, int64_t batch, const KvArray& cos,
                           const KvArray& sin, const KvArray& query, const KvArray& key, const KvArray& value,
                           const KvArray& gate);
bool before_mlp_fits(const KvLayer& layer, const KvArray& attended, const KvArray& gate, const KvArray& added,
                     const KvArray& residual, const KvArray& y, const KvArray& normed);
bool after_attention_fits(const KvLayer& layer, const KvArray& attended, const KvArray& gate, const KvArray& added,
                          const KvArray& side, const KvArray& residual, const KvArray& y);
bool mlp_fits(const KvMlp& mlp, const KvArray& x, const KvArray& y);
bool route_fits(const KvRouter& router, const KvArray& x, const KvArray& logits, const KvArray& weights,
                const KvArray& chosen);
bool experts_fit(const KvExperts& experts, const KvArray& x, const KvArray& chosen, const KvArray& weights,
                 const KvArray& y);
bool delta_net_fits(const KvDeltaNet& net, const KvArray& inputs, const KvArray& gate, const KvArray& beta,
                    const KvArray& decay, const KvArray& state, const KvArray& out);
bool mamba2_fits(const KvMamba2& space, const KvArray& inputs, const KvArray& gate, const KvArray& steps,
                 const KvArray& state, const KvArray& out);

bool attend_fits(const KvAttention& attention, const KvArray& out, const KvArray& lse, const KvArray& state,
                 int resume);
bool received_fits(const KvAttention& attention, const KvArray& lse, const KvArray& received);
bool insert_fits(const KvInsert& insert, const KvArray& new_keys, const KvArray& new_values);
bool sessions_fit(KvStep* const* steps, int64_t count, const KvArray& query, const KvArray& key, const KvArray& value,
                  int64_t tokens, int64_t heads, float cap, const KvArray& sinks, const KvArray& out,
                  const KvArray& lse);
bool layers_fit(const KvLayer* const* layers, KvStep* const* const* steps, int64_t count, const int64_t* step_counts,
                const KvArray& cos, const KvArray& sin, const KvArray& x, const KvArray& normed);

bool blocks_fit(const KvRows& rows, int64_t first, int64_t blocks, int64_t block_rows, const KvArray& digests);

#pragma GCC visibility pop
