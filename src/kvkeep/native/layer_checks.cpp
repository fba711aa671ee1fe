// The rules of matrices and of all that layers compute around attention (checks.h). Lengths are those that the caller
// states; all else is compared with them.

#include <initializer_list>

#include "panels.h"
#include "rules.h"

thread_local const char* broken_rule = "";

namespace {

// ---- layers ---------------------------------------------------------------------------------------------------------

bool is_activation(int64_t number) { return number >= 0 && number <= KV_GELU; }

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
  RULE(m.outputs > 0, "a router must have a weight");
  RULE(holds_or_nothing(r.bias, m.kind == KV_F32 ? KV_FLOAT32 : KV_BFLOAT16, m.outputs) &&
           holds_or_nothing(r.choice_bias, KV_FLOAT32, m.outputs),
       "biases of a router must be of each expert, of the type of products, and float32 for the choice");
  RULE(r.scores >= 0 && r.scores <= KV_SIGMOID && r.rounded >= 0 && r.rounded <= 2 && r.k > 0 && r.k <= m.outputs,
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
           is_activation(m.activation),
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

// A norm of rows of one of two widths, or no norm.
bool norm_fits(const KvNorm& n, Wide width, Wide other) {
  if (!has(n.weight)) return !n.weight.data;
  const Wide length = n.weight.length;
  RULE((length == width || length == other) && holds(n.weight, KV_FLOAT32, length) &&
           (!has(n.bias) || n.bias.length == length) && holds_or_nothing(n.bias, KV_FLOAT32, length),
       "weights and biases of norms must be float32 of each channel");
  RULE(n.centred == 0 || n.centred == 1, "a norm must subtract the mean, or not");
  return true;
}

// Whether a layer has the matrices for a side input, or none of them.
bool side_fits(const KvLayer& l) {
  const int64_t width = l.side_gate.outputs;
  if (!matrices_fit(&l.side_gate, 1, l.hidden, width)) return false;
  if (!matrices_fit(&l.side_projection, 1, width, width ? l.hidden : 0)) return false;
  RULE(!width || (l.mlp && width % 16 == 0 && is_activation(l.side_activation)),
       "a side input must follow the MLP, with a width that is a multiple of 16, and a known activation");
  return norm_fits(l.side_norm, l.hidden, l.hidden);
}

bool layer_fits(const KvLayer& l) {
  for (int64_t one : {l.hidden, l.heads, l.dim}) RULE(one > 0 && one <= MAX_SIZE, "a layer must have widths");
  RULE(is_size(l.kv_heads), "a layer must have a number of key/value heads, or 0");
  RULE(l.dim % 2 == 0 && l.gated >= 0 && l.gated <= 2, "heads must be of an even width");
  RULE((l.values_are_keys == 0 || l.values_are_keys == 1) && (l.by_head == 0 || l.by_head == 1) &&
           !(l.values_are_keys && l.gated == 2) &&
           !(l.by_head && (l.gated || l.values_are_keys || l.kv_heads != l.heads)),
       "projections must be of queries, keys, values and gates, or for each head of a query, key and value");
  RULE(l.clip >= 0 && l.clip < __builtin_inff(), "the bound of queries, keys and values must be finite, or 0");
  RULE(l.input_scale == 1.0f || has(l.input_norm.weight), "only a norm before attention may have an input scale");
  RULE(l.output_scale == 1.0f || l.mlp, "a layer must have its MLP");
  if (!cap_fits(l.cap)) return false;
  RULE(l.order == KV_IN_TURN || (l.order > 0 && l.order <= KV_SUMMED_FIRST && l.mlp && has(l.pre_mlp_norm.weight)),
       "attention and MLP of a layer must come in turn, or both be here, with a norm before each");
  RULE(l.rotated >= 0 && l.rotated <= l.dim && l.rotated % 2 == 0 && l.rotation >= 0 &&
           l.rotation <= KV_SPREAD_PAIRS,
       "rotated channels must be pairs of a head, in a way that the library has");
  const Wide of_keys = (2 - l.values_are_keys) * Wide(l.kv_heads), of_queries = (1 + (l.gated != 0)) * Wide(l.heads);
  if (!matrices_fit(l.qkv, 4, l.hidden, (of_queries + of_keys) * l.dim)) return false;
  if (!matrices_fit(&l.out, 1, l.heads * l.dim, l.hidden)) return false;
  if (l.mlp && !mlp_fits(*l.mlp)) return false;
  RULE(!l.mlp || l.mlp->hidden == l.hidden, "the MLP of a layer must have its width");
  for (int i = 0; i < 4; i++)
    RULE(holds_or_nothing(l.qkv_bias[i], KV_BFLOAT16, l.qkv[i].outputs), "biases must be bfloat16 of each output");
  RULE(holds_or_nothing(l.out_bias, KV_BFLOAT16, l.hidden), "biases must be bfloat16 of each output");
  RULE(holds_or_nothing(l.sinks, KV_FLOAT32, l.heads), "sinks must be float32 of each head");
  for (const KvNorm* norm : {&l.input_norm, &l.post_attention_norm, &l.pre_mlp_norm, &l.post_mlp_norm})
    if (!norm_fits(*norm, l.hidden, l.hidden)) return false;
  return side_fits(l) && norm_fits(l.query_norm, l.dim, (l.gated == 1 || l.by_head ? 1 : l.heads) * Wide(l.dim)) &&
         norm_fits(l.key_norm, l.dim, (l.by_head ? 1 : l.kv_heads) * Wide(l.dim)) &&
         norm_fits(l.value_norm, l.dim, l.dim);
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

bool norm_fits(const KvNorm& n, const KvArray& x, const KvArray& y) {
  RULE(n.weight.length > 0, "a norm must have a width");
  if (!norm_fits(n, Wide(n.weight.length), n.weight.length)) return false;
  RULE(has(n.weight) && is_rows_of(x, n.weight.length) && holds(y, KV_BFLOAT16, x.length),
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

bool before_mlp_fits(const KvLayer& l, const KvArray& attended, const KvArray& gate, const KvArray& added,
                     const KvArray& residual, const KvArray& y, const KvArray& normed) {
  if (!layer_fits(l)) return false;
  RULE(is_rows_of(residual, l.hidden) && holds(y, KV_BFLOAT16, residual.length),
       "input and output of a layer must be bfloat16 rows of its width");
  const Wide rows = residual.length / l.hidden;
  RULE(holds(attended, KV_BFLOAT16, rows * l.heads * l.dim),
       "the attention of a layer must be bfloat16 of each token and head");
  RULE(holds(normed, KV_BFLOAT16, residual.length), "what enters an MLP must be bfloat16 rows of its width");
  RULE(holds_or_nothing(added, KV_BFLOAT16, residual.length),
       "what is added to attention must be bfloat16 rows of the layer's width");
  return gate_fits(l, rows, gate);
}

bool after_attention_fits(const KvLayer& l, const KvArray& attended, const KvArray& gate, const KvArray& added,
                          const KvArray& side, const KvArray& residual, const KvArray& y) {
  RULE(l.mlp, "a layer must have its MLP");
  if (!before_mlp_fits(l, attended, gate, added, residual, y, y)) return false;
  const Wide rows = residual.length / l.hidden;
  RULE(!l.side_gate.outputs || holds(side, KV_BFLOAT16, rows * l.side_gate.outputs),
       "a side input must be bfloat16 rows of its width");
  return true;
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
    RULE(l.kv_heads && !l.side_gate.outputs, "layers of a call must have entries, and no side input");
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
