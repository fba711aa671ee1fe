// Prints a hash of what each kernel computes on the path that is named, from inputs made of whole numbers: the same on
// every processor. Every hash is made with one thread and with three; they must agree.
//
// kvkeep_hash            the paths of this processor, one a line
// kvkeep_hash PATH       lines of a kernel's name and its hash

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kvkeep.h"

namespace {

typedef uint16_t bf16;

// ---- inputs ---------------------------------------------------------------------------------------------------------

struct Random {  // splitmix64
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  int64_t below(int64_t limit) { return int64_t(next() >> 33) % limit; }
  float number(int64_t scale) { return float(below(255) - 127) / float(scale); }  // exact in bfloat16
};

template <class T> struct Array {
  T* data;
  size_t size;
  explicit Array(size_t count) : size(count) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, count * sizeof(T) + 64)) abort();
    memset(memory, 0, count * sizeof(T) + 64);
    data = (T*)memory;
  }
  ~Array() { free(data); }
  Array(const Array&) = delete;
  operator T*() const { return data; }
  size_t bytes() const { return size * sizeof(T); }
};

int64_t type_of(const uint8_t*) { return KV_UINT8; }
int64_t type_of(const bf16*) { return KV_BFLOAT16; }
int64_t type_of(const int32_t*) { return KV_INT32; }
int64_t type_of(const int64_t*) { return KV_INT64; }
int64_t type_of(const float*) { return KV_FLOAT32; }
// Numbers as the library reads them.
template <class T> KvArray numbers(const T* data, size_t length) {
  return {(void*)data, int64_t(length), type_of(data)};
}
template <class T> KvArray numbers(const Array<T>& array) { return numbers(array.data, array.size); }
const KvArray NOTHING{};
// All numbers as rows of each lane, one after the other.
template <class T> KvRows rows_of(const Array<T>& array, int64_t lanes, int64_t rows, int64_t width) {
  return {numbers(array), lanes, rows, width, rows * width, width};
}

bf16 to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bf16(bits >> 16);
}
void fill(Array<bf16>& to, uint64_t seed, int64_t scale) {
  Random random{seed};
  for (size_t i = 0; i < to.size; i++) to[i] = to_bf16(random.number(scale));
}
void fill(Array<float>& to, uint64_t seed, int64_t scale) {
  Random random{seed};
  for (size_t i = 0; i < to.size; i++) to[i] = random.number(scale);
}
void fill_bytes(Array<uint8_t>& to, uint64_t seed) {
  Random random{seed};
  for (size_t i = 0; i < to.size; i++) to[i] = uint8_t(random.next() >> 40);
}
void fill_half(Array<uint16_t>& to, uint64_t seed) {  // float16 of 2^-7 or so
  Random random{seed};
  for (size_t i = 0; i < to.size; i++) {
    const int64_t fraction = random.below(0x400), sign = random.below(2);
    to[i] = uint16_t(0x2000 | fraction | sign << 15);
  }
}

void done(KvStatus status) {  // of a call, which must end well
  if (status != KV_DONE) printf("A CALL ENDED WITH %d: %s\n", int(status), kvkeep_broken_rule());
}

// ---- hashes ---------------------------------------------------------------------------------------------------------

struct Hash {  // FNV-1a
  uint64_t value = 0xcbf29ce484222325u;
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) value = (value ^ ((const uint8_t*)data)[i]) * 0x100000001b3u;
  }
  template <class T> void add(const Array<T>& array) { add(array.data, array.bytes()); }
};

template <class F> void print(const std::string& name, const F& kernel) {
  uint64_t values[2];
  for (int i = 0; i < 2; i++) {
    kvkeep_set_threads(i ? 3 : 1);
    Hash hash;
    kernel(hash);
    values[i] = hash.value;
  }
  const char* differ = values[0] == values[1] ? "" : " THREADS DIFFER";
  printf("%-24s %016llx%s\n", name.c_str(), (unsigned long long)values[0], differ);
}

// ---- matrices -------------------------------------------------------------------------------------------------------

struct Kind {
  const char* name;
  int64_t elements, bytes, first_half, halves;  // of a block; where its float16 numbers are, and how many
};
const Kind KINDS[KV_KINDS] = {{"bf16", 1, 2, 0, 0},       {"q4_0", 32, 18, 0, 1},    {"q4_1", 32, 20, 0, 2},
                              {"q5_0", 32, 22, 0, 1},     {"q5_1", 32, 24, 0, 2},    {"q8_0", 32, 34, 0, 1},
                              {"q4_k", 256, 144, 0, 2},   {"q5_k", 256, 176, 0, 2},  {"q6_k", 256, 210, 208, 1},
                              {"iq4_nl", 32, 18, 0, 1},   {"iq4_xs", 256, 136, 0, 1}, {"mxfp4", 32, 17, 0, 0},
                              {"q2_k", 256, 84, 80, 2},   {"q3_k", 256, 110, 108, 1}, {"f16", 1, 2, 0, 1},
                              {"iq2_xxs", 256, 66, 0, 1}, {"iq2_xs", 256, 74, 0, 1},  {"iq2_s", 256, 82, 0, 1},
                              {"iq3_xxs", 256, 98, 0, 1}, {"iq3_s", 256, 110, 0, 1},  {"iq1_s", 256, 50, 0, 1},
                              {"iq1_m", 256, 56, 0, 0},   {"tq1_0", 256, 54, 52, 1},  {"tq2_0", 256, 66, 64, 1},
                              {"f32", 1, 4, 0, 0}};

struct Matrix {
  KvMatrix matrix;
  Array<uint8_t> rows, panels;
  int64_t row_bytes;
  Matrix(int64_t kind, int64_t inputs, int64_t outputs, uint64_t seed)
      : rows(outputs * (inputs / KINDS[kind].elements) * KINDS[kind].bytes),
        panels(kvkeep_packed_bytes(kind, inputs, outputs)),
        row_bytes(inputs / KINDS[kind].elements * KINDS[kind].bytes) {
    const Kind& k = KINDS[kind];
    fill_bytes(rows, seed);
    const int64_t blocks = int64_t(rows.size) / k.bytes;
    Array<uint16_t> scales(blocks * k.halves + 1);
    fill_half(scales, seed + 1);
    Random random{seed + 2};
    for (int64_t block = 0; block < blocks; block++) {
      if (kind == KV_BF16) {
        const bf16 weight = to_bf16(random.number(1024));
        memcpy(rows + block * k.bytes, &weight, 2);
      }
      if (kind == KV_F32) {
        const float weight = float(random.below(1 << 24) - (1 << 23)) / float(1 << 27);
        memcpy(rows + block * k.bytes, &weight, 4);
      }
      if (kind == KV_MXFP4) rows[block * k.bytes] = uint8_t(118 + rows[block * k.bytes] % 20);
      if (kind == KV_IQ1_M) rows[block * k.bytes + 55] = uint8_t(32 | (rows[block * k.bytes + 55] & 143));
      memcpy(rows + block * k.bytes + k.first_half, scales + block * k.halves, 2 * k.halves);
    }
    done(kvkeep_pack(kind, inputs, outputs, numbers(rows), row_bytes, numbers(panels)));
    matrix = {numbers(panels), inputs, outputs, kind};
  }
};

void hash_product_of_floats() {
  const int64_t inputs = 301, outputs = 83;
  Matrix weights(KV_F32, inputs, outputs, 99);
  Array<float> x(33 * inputs), bias(outputs), batch(33 * outputs);
  Random random{6};
  for (size_t i = 0; i < x.size; i++) x[i] = float(random.below(1 << 24) - (1 << 23)) / float(1 << 20);
  fill(bias, 8, 128);
  print("product f32 of floats", [&](Hash& hash) {
    for (int64_t rows : {33, 1, 2, 3, 7, 17}) {
      Array<float> y(rows * outputs);
      done(kvkeep_product(&weights.matrix, numbers(x.data, rows * inputs), numbers(bias), numbers(y), outputs));
      hash.add(y);
      if (rows == 33) memcpy(batch, y, y.bytes());
      else if (memcmp(batch, y, y.bytes())) printf("product f32 of floats: %d ROWS DIFFER\n", int(rows));
    }
  });
}

void hash_matrices() {
  const int64_t inputs = 768, outputs = 83;
  for (int64_t kind = 0; kind < KV_KINDS; kind++) {
    Matrix weights(kind, inputs, outputs, 100 + kind);
    const std::string name = KINDS[kind].name;
    print("rows " + name, [&](Hash& hash) {
      const int64_t some[] = {0, 82, 15, 16, 40};
      Array<float> out(5 * inputs);
      done(kvkeep_rows(&weights.matrix, numbers(some, 5), numbers(out)));
      hash.add(weights.panels);
      hash.add(out);
      Array<uint8_t> back(weights.rows.size);
      done(kvkeep_unpack(&weights.matrix, numbers(back), weights.row_bytes));
      if (memcmp(back, weights.rows, back.size)) printf("rows %s: UNPACKED ROWS DIFFER\n", name.c_str());
    });
    Array<bf16> x(100 * inputs), bias(outputs), batch(100 * (outputs + 5));
    fill(x, 7 + kind, 37);
    fill(bias, 8, 128);
    print("product " + name, [&](Hash& hash) {
      for (int64_t rows : {100, 1, 2, 3, 4, 5, 8, 16, 17, 33}) {
        Array<bf16> y(rows * (outputs + 5));
        done(kvkeep_product(&weights.matrix, numbers(x.data, rows * inputs), numbers(bias), numbers(y), outputs + 5));
        hash.add(y);
        if (rows == 100) memcpy(batch, y, y.bytes());
        else if (memcmp(batch, y, y.bytes())) printf("product %s: %d ROWS DIFFER\n", name.c_str(), int(rows));
      }
      Array<bf16> y(3 * outputs);
      done(kvkeep_product(&weights.matrix, numbers(x.data, 3 * inputs), NOTHING, numbers(y), outputs));
      hash.add(y);
    });
    print("what is no number " + name, [&](Hash& hash) {  // infinity, its sign, and where it is
      for (int64_t rows : {3, 20}) {
        Array<bf16> wrong(rows * inputs), y(rows * outputs);
        memcpy(wrong, x, wrong.bytes());
        wrong[inputs + 3] = 0x7fc1;
        wrong[inputs + 19] = 0xffff;
        wrong[2 * inputs] = 0x7f80;
        wrong[2 * inputs + 40] = 0xff80;
        done(kvkeep_product(&weights.matrix, numbers(wrong), NOTHING, numbers(y), outputs));
        for (size_t i = 0; i < y.size; i++)  // which of all the numbers that are none is the processor's choice
          if ((y[i] & 0x7fff) > 0x7f80) y[i] = 0x7fc0;
        hash.add(y);
      }
    });
  }
}

// ---- what lies around attention -------------------------------------------------------------------------------------

void hash_small() {
  print("norm", [](Hash& hash) {
    for (int64_t width : {576, 100, 64, 7}) {
      Array<bf16> x(40 * width), y(40 * width);
      Array<float> weight(width);
      fill(x, width, 29);
      fill(weight, 3, 64);
      const KvNorm norm{numbers(weight), NOTHING, 0, 1e-5f};
      done(kvkeep_norm(&norm, numbers(x), numbers(y)));
      hash.add(y);
    }
  });
  print("norm of differences from the mean", [](Hash& hash) {
    for (int64_t width : {576, 100, 64, 7}) {
      Array<bf16> x(40 * width), y(40 * width);
      Array<float> weight(width), bias(width);
      fill(x, width, 29);
      fill(weight, 3, 64);
      fill(bias, 4, 64);
      for (const KvArray& one : {NOTHING, numbers(bias)}) {
        const KvNorm norm{numbers(weight), one, 1, 1e-5f};
        done(kvkeep_norm(&norm, numbers(x), numbers(y)));
        hash.add(y);
      }
    }
  });
  print("angles", [](Hash& hash) {
    Array<int64_t> positions(60);
    Array<float> frequencies(36);
    for (int i = 0; i < 60; i++) positions[i] = i < 30 ? i : 1000 * i + 7;
    for (int i = 0; i < 36; i++) frequencies[i] = 1.0f / float(1 << (i / 3)) * (1.0f + float(i % 3) * 0.25f);
    Array<bf16> cos(60 * 72), sin(60 * 72);
    done(kvkeep_angles(numbers(positions), numbers(frequencies), 1.25f, numbers(cos), numbers(sin)));
    hash.add(cos);
    hash.add(sin);
  });
}

void hash_delta_net() {
  print("delta net", [](Hash& hash) {
    KvDeltaNet net{};
    net.taps = 4; net.key_heads = 2; net.value_heads = 4; net.key_dim = 32; net.value_dim = 48; net.eps = 1e-6f;
    const int64_t values = net.value_heads * net.value_dim, channels = 2 * net.key_heads * net.key_dim + values;
    Array<float> conv(net.taps * channels), rate(net.value_heads), bias(net.value_heads), norm(net.value_dim);
    fill(conv, 120, 90);
    fill(bias, 121, 60);
    fill(norm, 122, 64);
    for (int64_t i = 0; i < net.value_heads; i++) rate[i] = 0.25f + float(i) * 3;
    net.conv = numbers(conv); net.rate = numbers(rate); net.step_bias = numbers(bias); net.norm = numbers(norm);
    Array<float> state(values * net.key_dim);
    for (int64_t tokens : {1, 7, 40}) {  // each call goes on from the state of the one before
      Array<bf16> inputs((net.taps - 1 + tokens) * channels), gate(tokens * values), out(tokens * values);
      Array<bf16> beta(tokens * net.value_heads), decay(tokens * net.value_heads);
      fill(inputs, tokens, 50);
      fill(gate, tokens + 1, 40);
      fill(beta, tokens + 2, 30);
      fill(decay, tokens + 3, 30);
      done(kvkeep_delta_net(&net, numbers(inputs), numbers(gate), numbers(beta), numbers(decay), numbers(state),
                            numbers(out)));
      hash.add(out);
      hash.add(state);
    }
  });
}

void hash_mamba2() {
  print("mamba 2", [](Hash& hash) {
    KvMamba2 space{};
    space.taps = 4; space.heads = 6; space.head_dim = 16; space.groups = 2; space.state_dim = 48; space.eps = 1e-5f;
    space.smallest_step = 0.001f; space.greatest_step = 2;
    const int64_t inner = space.heads * space.head_dim, channels = inner + 2 * space.groups * space.state_dim;
    Array<float> conv(space.taps * channels), conv_bias(channels), norm(inner), rate(space.heads), bias(space.heads);
    Array<float> skip(space.heads);
    fill(conv, 130, 90);
    fill(conv_bias, 131, 60);
    fill(norm, 132, 64);
    fill(bias, 133, 30);
    fill(skip, 134, 64);
    for (int64_t i = 0; i < space.heads; i++) rate[i] = 0.25f + float(i) * 3;
    space.conv = numbers(conv); space.rate = numbers(rate); space.step_bias = numbers(bias);
    space.skip = numbers(skip);
    Array<float> state(inner * space.state_dim);
    for (int64_t tokens : {1, 7, 40}) {  // each call goes on from the state of the one before
      space.gate_first = tokens == 7;
      space.conv_bias = tokens == 1 ? KvArray{} : numbers(conv_bias);
      space.norm = tokens == 40 ? KvArray{} : numbers(norm);
      Array<bf16> inputs((space.taps - 1 + tokens) * channels), gate(tokens * inner), out(tokens * inner);
      Array<bf16> steps(tokens * space.heads);
      fill(inputs, tokens, 50);
      fill(gate, tokens + 1, 40);
      fill(steps, tokens + 2, 30);
      done(kvkeep_mamba2(&space, numbers(inputs), numbers(gate), numbers(steps), numbers(state), numbers(out)));
      hash.add(out);
      hash.add(state);
    }
  });
}

struct Layer {
  static constexpr int64_t HIDDEN = 256, HEADS = 4, KV_HEADS = 2, DIM = 64, INNER = 512;
  Matrix qkv, out, gate, up, down;
  Array<bf16> bias;
  Array<float> norms;
  KvMlp mlp{};
  KvLayer layer{};
  // rotation: of half of each head, and norms of all heads; KV_HALVES: of all of it.
  Layer(int64_t kind, uint64_t seed, bool sandwiched, int64_t rotation = KV_HALVES)
      : qkv(kind, HIDDEN, (HEADS + 2 * KV_HEADS) * DIM, seed), out(KV_Q8_0, HEADS * DIM, HIDDEN, seed + 10),
        gate(kind, HIDDEN, INNER, seed + 20), up(KV_Q4_K, HIDDEN, INNER, seed + 30),
        down(kind, INNER, HIDDEN, seed + 40), bias((HEADS + 2 * KV_HEADS) * DIM),
        norms(4 * HIDDEN + (HEADS + KV_HEADS) * DIM) {
    fill(bias, seed + 50, 200);
    Random random{seed + 60};
    for (size_t i = 0; i < norms.size; i++) norms[i] = 1.0f + random.number(512);
    layer.qkv[0] = qkv.matrix; layer.out = out.matrix; layer.qkv_bias[0] = numbers(bias); layer.mlp = &mlp;
    mlp.gates[0] = gate.matrix; mlp.gates[1] = up.matrix; mlp.down = down.matrix;
    mlp.hidden = HIDDEN; mlp.inner = INNER; mlp.gated = 1; mlp.activation = sandwiched;
    mlp.gate_scale = mlp.scale = 1;
    if (!sandwiched) layer.out_bias = numbers(bias.data, HIDDEN);
    auto norm = [&](int64_t first, int64_t width) {
      return KvNorm{numbers(norms.data + first, width), NOTHING, 0, 1e-5f};
    };
    layer.input_norm = norm(0, HIDDEN); layer.pre_mlp_norm = norm(HIDDEN, HIDDEN);
    if (sandwiched) {
      layer.post_attention_norm = norm(2 * HIDDEN, HIDDEN); layer.post_mlp_norm = norm(3 * HIDDEN, HIDDEN);
      layer.query_norm = norm(4 * HIDDEN, DIM); layer.key_norm = norm(4 * HIDDEN + DIM, DIM);
    }
    layer.hidden = HIDDEN; layer.heads = HEADS; layer.kv_heads = KV_HEADS; layer.dim = DIM;
    layer.rotated = DIM;
    layer.input_scale = layer.key_scale = layer.attention_scale = layer.mlp_scale = layer.output_scale = 1;
    if (rotation == KV_HALVES) return;
    layer.rotated = DIM / 2; layer.rotation = rotation; layer.attention_scale = layer.mlp_scale = 0.3f;
    layer.rotates_first = rotation == KV_EXACT_PAIRS;
    if (rotation == KV_SPREAD_PAIRS) {
      layer.order = KV_SIDE_BY_SIDE;
      layer.input_norm.centred = layer.pre_mlp_norm.centred = 1;
      layer.input_norm.bias = norm(HIDDEN, HIDDEN).weight;
    }
    if (rotation > KV_PAIRS) return;
    layer.query_norm = norm(4 * HIDDEN, HEADS * DIM);
    layer.key_norm = norm(4 * HIDDEN + HEADS * DIM, KV_HEADS * DIM);
    layer.input_norm = layer.pre_mlp_norm = KvNorm{};
  }
};

void fill_angles(Array<bf16>& cos, Array<bf16>& sin, int64_t count, int64_t half) {
  Array<int64_t> positions(count);
  Array<float> frequencies(half);
  for (int64_t i = 0; i < count; i++) positions[i] = 11 * i;
  for (int64_t i = 0; i < half; i++) frequencies[i] = 1.0f / float(1 + i * i);
  done(kvkeep_angles(numbers(positions), numbers(frequencies), 1.0f, numbers(cos), numbers(sin)));
}

void hash_layer() {
  const int64_t D = Layer::DIM;
  for (int form = 0; form < 5; form++) {
    const int64_t rotations[] = {KV_HALVES, KV_HALVES, KV_PAIRS, KV_EXACT_PAIRS, KV_SPREAD_PAIRS};
    const int64_t rotation = rotations[form];
    Layer one(form ? KV_BF16 : KV_Q4_0, 500 + form, form > 0, rotation);
    const char* names[] = {"", " with all norms", " by pairs", " by exact pairs", " side by side"};
    const std::string name = names[form];
    print("enter layer" + name, [&](Hash& hash) {
      for (int64_t n : {1, 5, 40}) {
        const int64_t turned = one.layer.rotated;
        Array<bf16> x(2 * n * Layer::HIDDEN), cos(n * turned), sin(n * turned), query(2 * n * Layer::HEADS * D),
            key(2 * n * Layer::KV_HEADS * D), value(2 * n * Layer::KV_HEADS * D);
        fill(x, n, 41);
        fill_angles(cos, sin, n, turned / 2);
        done(kvkeep_before_attention(&one.layer, numbers(x), 2, numbers(cos), numbers(sin), numbers(query),
                                     numbers(key), numbers(value), NOTHING));
        hash.add(query);
        hash.add(key);
        hash.add(value);
      }
    });
    print("leave layer" + name, [&](Hash& hash) {
      for (int64_t rows : {1, 5, 40}) {
        Array<bf16> attention(rows * Layer::HEADS * D), residual(rows * Layer::HIDDEN), y(rows * Layer::HIDDEN);
        fill(attention, rows, 43);
        fill(residual, rows + 1, 39);
        done(kvkeep_after_attention(&one.layer, numbers(attention), NOTHING, NOTHING, NOTHING, numbers(residual),
                                    numbers(y)));
        hash.add(y);
        if (one.layer.order == KV_IN_TURN) continue;
        one.layer.order = KV_SUMMED_FIRST;
        done(kvkeep_after_attention(&one.layer, numbers(attention), NOTHING, NOTHING, NOTHING, numbers(residual),
                                    numbers(residual)));
        hash.add(residual);
        one.layer.order = KV_SIDE_BY_SIDE;
      }
    });
    if (one.layer.order != KV_IN_TURN) continue;
    print("reach MLP" + name, [&](Hash& hash) {
      for (int64_t rows : {1, 5, 40}) {
        Array<bf16> attention(rows * Layer::HEADS * D), x(rows * Layer::HIDDEN), normed(rows * Layer::HIDDEN);
        fill(attention, rows, 43);
        fill(x, rows + 1, 39);
        done(kvkeep_before_mlp(&one.layer, numbers(attention), NOTHING, NOTHING, numbers(x), numbers(x),
                               numbers(normed)));
        hash.add(x);
        hash.add(normed);
      }
    });
  }
}

void hash_experts() {
  print("experts", [](Hash& hash) {
    const int64_t COUNT = 5, HIDDEN = 256, INNER = 256;
    Matrix gates(KV_Q4_K, HIDDEN, COUNT * INNER, 140), ups(KV_BF16, HIDDEN, COUNT * INNER, 150);
    Matrix down(KV_Q6_K, INNER, COUNT * HIDDEN, 160);
    Array<bf16> gates_bias(COUNT * 2 * INNER), down_bias(COUNT * HIDDEN), values(1 << 16), up_values(1 << 16);
    fill(gates_bias, 141, 90);
    fill(down_bias, 142, 80);
    fill(values, 143, 70);
    fill(up_values, 144, 60);
    for (int gated = 0; gated < 2; gated++) {
      KvExperts experts{};
      experts.gates[0] = gates.matrix; experts.down = down.matrix; experts.gate_values = numbers(values);
      experts.experts = COUNT; experts.hidden = HIDDEN; experts.inner = INNER; experts.gated = gated;
      if (gated) {
        experts.gates[1] = ups.matrix; experts.gates_bias = numbers(gates_bias);
        experts.down_bias = numbers(down_bias); experts.up_values = numbers(up_values);
      }
      for (int64_t rows : {1, 7, 40, 700}) {  // the last ones take more than one batch
        Array<bf16> x(rows * HIDDEN), y(rows * HIDDEN);
        Array<int64_t> chosen(rows * 3);
        Array<float> weights(rows * 3);
        fill(x, rows, 40);
        fill(weights, rows + 1, 200);
        Random random{uint64_t(rows)};
        for (int64_t i = 0; i < rows * 3; i++) chosen[i] = random.below(COUNT + 1);
        done(kvkeep_run_experts(&experts, numbers(x), numbers(chosen), numbers(weights), numbers(y)));
        hash.add(y);
      }
    }
  });
}

// ---- attention ------------------------------------------------------------------------------------------------------

enum { LANES = 2, GROUPS = 3, DIM = 64, MAX_ENTRIES = 1500 };

struct Entries {  // of bfloat16
  Array<bf16> keys, values;
  int64_t rows;
  Entries(int64_t count, uint64_t seed) : keys(LANES * count * DIM), values(LANES * count * DIM), rows(count) {
    fill(keys, seed, 50);
    fill(values, seed + 1, 60);
  }
  KvPiece piece(int64_t first, int64_t count) {
    KvPiece piece{};
    piece.first = first; piece.entries = count;
    piece.keys.rows = rows_of(keys, LANES, rows, DIM); piece.values.rows = rows_of(values, LANES, rows, DIM);
    return piece;
  }
};

struct Codes {  // in groups of 32 entries, or (bits 0) of 8 bits with a sign and a scale for each channel
  static constexpr int64_t COUNT = 192, WIDTH = 32;
  Array<uint8_t> keys, values;
  Array<uint16_t> key_scale, key_offset, value_scale, value_offset;
  Array<float> mean, deviation;
  int64_t bits;
  explicit Codes(int64_t bits)
      : keys(LANES * COUNT * DIM * 2), values(LANES * COUNT * DIM * 2), key_scale(LANES * COUNT * DIM),
        key_offset(LANES * COUNT * DIM), value_scale(LANES * COUNT * DIM), value_offset(LANES * COUNT * DIM),
        mean(LANES * DIM), deviation(LANES * DIM), bits(bits) {
    fill_bytes(keys, bits);
    fill_bytes(values, bits + 1);
    uint64_t seed = 900 + bits;
    for (Array<uint16_t>* one : {&key_scale, &key_offset, &value_scale, &value_offset}) fill_half(*one, seed++);
    fill(mean, seed, 128);
    fill(deviation, seed + 1, 64);
  }
  KvPiece piece() {
    KvPiece piece{};
    piece.format = bits ? KV_GROUPED : KV_BY_CHANNEL; piece.entries = COUNT;
    const int64_t groups = bits ? COUNT / 32 : COUNT, scales = bits ? COUNT / 32 : 1;
    auto describe = [&](KvSide& side, const Array<uint8_t>& codes, const Array<uint16_t>& scale,
                        const Array<uint16_t>& offset, int64_t width) {
      const int64_t bytes = bits ? 32 * DIM * bits / 8 : DIM;
      side.rows = rows_of(codes, LANES, groups, bytes);
      side.rows.numbers.type = bits == 16 ? KV_INT16 : bits ? KV_UINT8 : KV_INT8;
      if (bits == 16) {
        side.rows.numbers.length /= 2; side.rows.width /= 2; side.rows.lane_stride /= 2; side.rows.row_stride /= 2;
      }
      side.scale = rows_of(scale, LANES, scales, width); side.offset = rows_of(offset, LANES, scales, width);
      side.scale.numbers.type = side.offset.numbers.type = KV_FLOAT16;
      side.bits = bits;
    };
    describe(piece.keys, keys, key_scale, key_offset, DIM);
    describe(piece.values, values, value_scale, value_offset, bits ? DIM / WIDTH * 32 : DIM);
    piece.values.group = bits ? WIDTH : 0;
    if (bits == 4) { piece.values.mean = numbers(mean); piece.values.deviation = numbers(deviation); }
    return piece;
  }
};

struct Sketch {
  static constexpr int64_t CELLS = 90, COUNT = 170;
  Array<bf16> keys, values;
  Array<int32_t> places;
  Array<float> mean;
  int64_t sums, median;
  Sketch(int64_t sums, int64_t median)
      : keys(LANES * CELLS * DIM), values(LANES * CELLS * DIM), places(sums * LANES * COUNT), mean(LANES * DIM),
        sums(sums), median(median) {
    fill(keys, 70 + sums, 50);
    fill(values, 71 + sums, 50);
    fill(mean, 72, 128);
    Random random{uint64_t(73 + sums)};
    for (size_t i = 0; i < places.size; i++) places[i] = int32_t(random.below(CELLS));
  }
  KvPiece piece() {
    KvPiece piece{};
    piece.format = KV_SKETCHED; piece.entries = COUNT;
    piece.keys.rows = rows_of(keys, LANES, CELLS, DIM); piece.values.rows = rows_of(values, LANES, CELLS, DIM);
    piece.cell_indices = numbers(places); piece.sums = sums; piece.use_median = median;
    if (sums == 3) piece.keys.mean = piece.values.mean = numbers(mean);
    return piece;
  }
};

KvAttention attention_of(const Array<bf16>& query, int64_t queries, const std::vector<KvPiece>& pieces, int64_t past) {
  KvAttention a{};
  a.query = numbers(query); a.pieces = const_cast<KvPiece*>(pieces.data());
  a.lanes = LANES; a.groups = GROUPS; a.queries = queries;
  a.dim = a.value_dim = DIM; a.piece_count = int64_t(pieces.size()); a.causal_offset = past; a.scaling = 0.125f;
  for (const KvPiece& piece : pieces) a.entries += piece.entries;
  return a;
}

// Attention over the first entries of one piece, the queries' own last, and what they received.
void attend_rows(const Array<bf16>& query, const KvPiece& piece, int64_t queries, Array<bf16>& out, Array<float>& lse,
                 Array<float>* received, int reduce_max) {
  KvAttention a{};
  a.query = numbers(query); a.pieces = const_cast<KvPiece*>(&piece);
  a.lanes = LANES; a.groups = GROUPS; a.queries = queries;
  a.dim = piece.keys.rows.width; a.value_dim = piece.values.rows.width; a.piece_count = 1; a.entries = piece.entries;
  a.causal_offset = piece.entries - queries; a.scaling = 0.125f;
  done(kvkeep_attend(&a, numbers(out), numbers(lse), NOTHING, 0));
  if (received) done(kvkeep_received(&a, numbers(lse), queries, reduce_max, numbers(*received)));
}

void add_attention(Hash& hash, const std::vector<KvPiece>& pieces, int64_t queries, bool causal, bool bounded = false,
                   float cap = 0) {
  Array<bf16> query(LANES * GROUPS * queries * DIM), out(query.size);
  Array<float> lse(LANES * GROUPS * queries), floats(query.size);
  fill(query, queries, 45);
  KvAttention a = attention_of(query, queries, pieces, -1);
  a.cap = cap;
  if (causal) a.causal_offset = a.entries - queries;
  const int32_t first[] = {3, 0}, stop[] = {int32_t(a.entries - 1), int32_t(a.entries)}, shift[] = {40, -2};
  if (bounded) { a.first = numbers(first, 2); a.stop = numbers(stop, 2); a.shift = numbers(shift, 2); }
  done(kvkeep_attend(&a, numbers(out), numbers(lse), NOTHING, 0));
  hash.add(out);
  hash.add(lse);
  done(kvkeep_attend(&a, numbers(floats), numbers(lse), NOTHING, 0));
  hash.add(floats);
  if (bounded) return;
  Array<float> received(LANES * a.entries);
  for (int reduce_max = 0; reduce_max < 2; reduce_max++) {
    done(kvkeep_received(&a, numbers(lse), queries < 4 ? queries : 4, reduce_max, numbers(received)));
    hash.add(received);
  }
}

void add_mlp(Hash& hash, const KvMlp& mlp) {
  for (int64_t rows : {1, 7, 40}) {
    Array<bf16> x(rows * mlp.hidden);
    fill(x, rows, 41);
    done(kvkeep_mlp(&mlp, numbers(x), numbers(x)));
    hash.add(x);
  }
}

void hash_mixture() {
  const int64_t COUNT = 24, INNER = 64, K = 4, HIDDEN = Layer::HIDDEN;
  Matrix gates(KV_Q4_0, HIDDEN, COUNT * 2 * INNER, 170), down(KV_Q8_0, INNER, COUNT * HIDDEN, 171);
  Array<bf16> values(1 << 16), bias(COUNT);
  Array<float> choice(COUNT);
  fill(values, 172, 70);
  fill(bias, 173, 90);
  fill(choice, 174, 300);
  KvExperts experts{};
  experts.gates[0] = gates.matrix; experts.down = down.matrix; experts.gate_values = numbers(values);
  experts.experts = COUNT; experts.hidden = HIDDEN; experts.inner = INNER; experts.gated = 1;
  for (int form = 0; form < 2; form++) {
    Matrix weight(form ? KV_F32 : KV_BF16, HIDDEN, COUNT, 175);
    KvRouter router{};
    router.weight = weight.matrix; router.scores = form ? KV_SIGMOID : KV_SOFTMAX; router.k = K;
    router.normalised = router.rounded = form; router.scale = form ? 2.5f : 1.0f;
    router.groups = router.taken_groups = router.group_scores = 1;
    if (form) router.choice_bias = numbers(choice);
    else router.bias = numbers(bias);
    const std::string name = form ? " by sigmoid" : "";
    print("router" + name, [&](Hash& hash) {
      for (int64_t rows : {1, 7, 40}) {
        Array<bf16> x(rows * HIDDEN);
        Array<float> logits(rows * COUNT), weights(rows * K);
        Array<int64_t> chosen(rows * K);
        fill(x, rows, 41);
        done(kvkeep_route(&router, numbers(x), numbers(logits), numbers(weights), numbers(chosen)));
        hash.add(logits);
        hash.add(weights);
        hash.add(chosen);
      }
    });
    print("router" + name + ", each result rounded", [&](Hash& hash) {
      Array<bf16> x(40 * HIDDEN);
      Array<float> logits(40 * COUNT), weights(40 * K);
      Array<int64_t> chosen(40 * K);
      fill(x, 40, 41);
      KvRouter other = router;
      other.rounded = 2;
      done(kvkeep_route(&other, numbers(x), numbers(logits), numbers(weights), numbers(chosen)));
      hash.add(weights);
      hash.add(chosen);
    });
    Layer one(KV_Q4_0, 176, form);
    const KvMlp beside = one.mlp;
    one.mlp = KvMlp{};
    one.mlp.hidden = HIDDEN; one.mlp.router = &router; one.mlp.experts = &experts;
    print("mixture" + name, [&](Hash& hash) {
      for (int64_t rows : {1, 7, 40}) {
        Array<bf16> attention(rows * Layer::HEADS * Layer::DIM), x(rows * HIDDEN);
        fill(attention, rows, 43);
        fill(x, rows + 1, 39);
        done(kvkeep_after_attention(&one.layer, numbers(attention), NOTHING, NOTHING, NOTHING, numbers(x),
                                    numbers(x)));
        hash.add(x);
      }
    });
    Matrix share(form ? KV_F32 : KV_Q8_0, HIDDEN, 1, 177);
    one.mlp = beside;
    one.mlp.router = &router; one.mlp.experts = &experts; one.mlp.share = share.matrix;
    router.groups = COUNT / 2; router.taken_groups = K; router.group_scores = 1 + form;
    print("mixture of groups" + name, [&](Hash& hash) { add_mlp(hash, one.mlp); });
  }
}

void hash_mlp() {
  Layer one(KV_Q6_K, 180, false);
  one.mlp.gates_bias[0] = numbers(one.bias.data, Layer::INNER);
  one.mlp.down_bias = numbers(one.bias.data, Layer::HIDDEN);
  print("MLP", [&](Hash& hash) { add_mlp(hash, one.mlp); });
  one.mlp.gated = 0; one.mlp.gates[1] = KvMatrix{}; one.mlp.activation = KV_RELU2;
  print("MLP without gates", [&](Hash& hash) { add_mlp(hash, one.mlp); });
  Matrix qkv(KV_Q4_0, Layer::HIDDEN, 2 * (Layer::HEADS + Layer::KV_HEADS) * Layer::DIM, 181);
  one.layer.qkv[0] = qkv.matrix; one.layer.qkv_bias[0] = NOTHING; one.layer.gated = 1; one.layer.rotated = 0;
  print("layer with gates", [&](Hash& hash) {
    const int64_t queries = Layer::HEADS * Layer::DIM, keys = Layer::KV_HEADS * Layer::DIM;
    for (int64_t rows : {1, 7, 40}) {
      Array<bf16> x(rows * Layer::HIDDEN), query(rows * queries), key(rows * keys), value(rows * keys);
      Array<bf16> gate(rows * queries), attention(rows * queries);
      fill(x, rows, 41);
      fill(attention, rows, 43);
      done(kvkeep_before_attention(&one.layer, numbers(x), 1, NOTHING, NOTHING, numbers(query), numbers(key),
                                   numbers(value), numbers(gate)));
      for (const Array<bf16>* part : {&query, &key, &value, &gate}) hash.add(*part);
      done(kvkeep_after_attention(&one.layer, numbers(attention), numbers(gate), NOTHING, NOTHING, numbers(x),
                                  numbers(x)));
      hash.add(x);
    }
  });
}

// Layers whose projections, factors and inputs are not Llama's.
void hash_other_layers() {
  const int64_t HIDDEN = Layer::HIDDEN, D = Layer::DIM, SIDE = 32, queries = Layer::HEADS * D;
  const char* names[] = {"layer head by head", "layer with gates behind values", "layer whose values are its keys",
                         "layer with a side input"};
  for (int form = 0; form < 4; form++) {
    Layer one(KV_Q4_0, 900 + form, form > 0);
    KvLayer& l = one.layer;
    l.kv_heads = form == 0 ? Layer::HEADS : form == 3 ? 0 : Layer::KV_HEADS;
    const int64_t keys = l.kv_heads * D, outputs[] = {3 * queries, 2 * (queries + keys), queries + keys, queries};
    Matrix qkv(KV_Q4_0, HIDDEN, outputs[form], 910 + form), side_gate(KV_Q4_0, HIDDEN, SIDE, 920),
        side_projection(KV_Q8_0, SIDE, HIDDEN, 921);
    l.qkv[0] = qkv.matrix; l.qkv_bias[0] = NOTHING;
    l.by_head = form == 0; l.gated = 2 * (form == 1); l.values_are_keys = form == 2;
    one.mlp.activation = form == 0 ? KV_GELU : KV_GELU_TANH;
    if (form == 1) {
      l.input_scale = 0.7f; l.key_scale = 0.3f; l.attention_scale = 0.6f;
      one.mlp.gate_scale = 1.3f; one.mlp.scale = 0.9f;
    }
    if (form == 2) { l.value_norm = l.key_norm; l.clip = 0.75f; l.output_scale = 1.1f; }
    if (form == 3) {
      l.side_gate = side_gate.matrix; l.side_projection = side_projection.matrix; l.side_activation = KV_GELU_TANH;
      l.side_norm = l.input_norm; l.output_scale = 0.8f;
    }
    print(names[form], [&](Hash& hash) {
      for (int64_t rows : {1, 7, 40}) {
        Array<bf16> x(rows * HIDDEN), query(rows * queries), key(rows * keys), value(rows * keys), gate(rows * queries);
        Array<bf16> attention(rows * queries), added(rows * HIDDEN), side(rows * SIDE), cos(rows * D), sin(rows * D);
        fill(x, rows, 41);
        fill(attention, rows, 43);
        fill(added, rows + 2, 43);
        fill(side, rows + 3, 43);
        fill_angles(cos, sin, rows, D / 2);
        done(kvkeep_before_attention(&l, numbers(x), 1, numbers(cos), numbers(sin), numbers(query), numbers(key),
                                     numbers(value), numbers(gate)));
        for (const Array<bf16>* part : {&query, &key, &value}) hash.add(*part);
        if (l.gated) hash.add(gate);
        done(kvkeep_after_attention(&l, numbers(attention), numbers(gate), form == 1 ? numbers(added) : NOTHING,
                                    numbers(side), numbers(x), numbers(x)));
        hash.add(x);
      }
    });
  }
}

void hash_attention() {
  Entries entries(MAX_ENTRIES, 20);
  for (int64_t queries : {1, 2, 7, 40})
    print("attention of " + std::to_string(queries), [&](Hash& hash) {
      for (int64_t count : {40, 512, 1413}) add_attention(hash, {entries.piece(0, count)}, queries, true);
      add_attention(hash, {entries.piece(700, 9), entries.piece(0, 700), entries.piece(1000, 333)}, queries, true);
      add_attention(hash, {entries.piece(0, 600)}, queries, queries > 1, true);
    });
  for (int64_t dim : {72, 80, 112, 128, 256}) {
    print("attention of dim " + std::to_string(dim), [&](Hash& hash) {
      for (int64_t queries : {1, 40})
        for (int64_t value_dim : {dim, dim - 24}) {
          const int64_t count = 600;
          Array<bf16> query(LANES * GROUPS * queries * dim), keys(LANES * count * dim),
              values(LANES * count * value_dim), out(LANES * GROUPS * queries * value_dim);
          Array<float> lse(LANES * GROUPS * queries);
          fill(query, 45, 45);
          fill(keys, dim, 50);
          fill(values, value_dim, 60);
          KvPiece piece{};
          piece.entries = count;
          piece.keys.rows = rows_of(keys, LANES, count, dim);
          piece.values.rows = rows_of(values, LANES, count, value_dim);
          attend_rows(query, piece, queries, out, lse, nullptr, 0);
          hash.add(out);
          hash.add(lse);
        }
    });
  }
  print("attention with a mask", [&](Hash& hash) {
    Array<bf16> query(LANES * GROUPS * 5 * DIM), out(query.size);
    Array<float> lse(LANES * GROUPS * 5);
    Array<uint8_t> mask(5 * 620);
    fill(query, 5, 45);
    fill_bytes(mask, 6);
    for (size_t i = 0; i < mask.size; i++) mask[i] &= 1;
    std::vector<KvPiece> pieces{entries.piece(0, 620)};
    KvAttention a = attention_of(query, 5, pieces, -1);
    a.mask = rows_of(mask, 1, 5, 620);
    done(kvkeep_attend(&a, numbers(out), numbers(lse), NOTHING, 0));
    hash.add(out);
    hash.add(lse);
  });
  print("attention in a window", [&](Hash& hash) {
    for (int64_t window : {1, 90, 700}) {
      Array<bf16> query(LANES * GROUPS * 40 * DIM), out(query.size);
      Array<float> lse(LANES * GROUPS * 40);
      fill(query, 5, 45);
      std::vector<KvPiece> pieces{entries.piece(0, 800)};
      KvAttention a = attention_of(query, 40, pieces, 760);
      const int32_t shift[] = {40, -2};
      a.window = window; a.shift = numbers(shift, 2);
      done(kvkeep_attend(&a, numbers(out), numbers(lse), NOTHING, 0));
      hash.add(out);
      hash.add(lse);
    }
  });
  print("attention with a cap", [&](Hash& hash) {
    std::vector<KvPiece> pieces{entries.piece(0, 1324)};
    for (int64_t queries : {1, 7, 40}) add_attention(hash, pieces, queries, queries > 1, false, 0.75f);
  });
  print("attention with sinks", [&](Hash& hash) {  // of two rows of a batch; of heads of one; in two calls
    Array<float> sinks(LANES * GROUPS);
    fill(sinks, 11, 20);
    std::vector<KvPiece> all{entries.piece(0, 1324)}, first{entries.piece(0, 1024)}, second{entries.piece(1024, 300)};
    for (int64_t queries : {1, 7, 40}) {
      Array<bf16> query(LANES * GROUPS * queries * DIM), out(query.size);
      Array<float> lse(LANES * GROUPS * queries), state(LANES * GROUPS * queries * (2 + DIM));
      fill(query, queries, 45);
      for (int64_t heads : {1 * GROUPS, LANES * GROUPS}) {
        KvAttention a = attention_of(query, queries, all, -1);
        a.sinks = numbers(sinks.data, heads);
        done(kvkeep_attend(&a, numbers(out), numbers(lse), NOTHING, 0));
        hash.add(out);
        hash.add(lse);
      }
      KvAttention a = attention_of(query, queries, first, -1), b = attention_of(query, queries, second, -1);
      a.sinks = b.sinks = numbers(sinks);
      Array<bf16> again(out.size);
      done(kvkeep_attend(&a, NOTHING, NOTHING, numbers(state), 0));
      done(kvkeep_attend(&b, numbers(again), numbers(lse), numbers(state), 1));
      if (memcmp(again, out, out.bytes())) printf("attention with sinks: TWO CALLS DIFFER\n");
    }
  });
  print("attention to no number", [&](Hash& hash) {  // a query of NaN; keys of NaN and of infinity
    const int64_t count = 600;
    for (int64_t queries : {1, 3}) {
      Array<bf16> query(LANES * GROUPS * queries * DIM), keys(LANES * count * DIM), values(keys.size), out(query.size);
      Array<float> lse(LANES * GROUPS * queries);
      fill(query, 45, 45);
      fill(keys, 50, 50);
      fill(values, 60, 60);
      query[DIM * queries + 5] = 0x7fc1;
      keys[7 * DIM + 3] = 0xffff;
      keys[550 * DIM + 60] = 0x7fc0;
      keys[(count + 9) * DIM + 2] = 0x7f80;
      KvPiece piece{};
      piece.entries = count;
      piece.keys.rows = rows_of(keys, LANES, count, DIM); piece.values.rows = rows_of(values, LANES, count, DIM);
      attend_rows(query, piece, queries, out, lse, nullptr, 0);
      for (int64_t d = 0; d < DIM; d++)
        if (out[DIM * queries + d] & 0x7fff) printf("attention to no number: A QUERY OF NAN GIVES NO ZEROS\n");
      for (size_t i = 0; i < out.size; i++)
        if ((out[i] & 0x7fff) > 0x7f80) out[i] = 0x7fc0;
      hash.add(out);
    }
  });
  print("attention in two calls", [&](Hash& hash) {
    Array<bf16> query(LANES * GROUPS * 3 * DIM), out(query.size);
    Array<float> lse(LANES * GROUPS * 3), state(LANES * GROUPS * 3 * (2 + DIM));
    fill(query, 9, 45);
    std::vector<KvPiece> first{entries.piece(0, 1024)}, second{entries.piece(1024, 300)};
    KvAttention a = attention_of(query, 3, first, -1), b = attention_of(query, 3, second, -1);
    done(kvkeep_attend(&a, NOTHING, NOTHING, numbers(state), 0));
    done(kvkeep_attend(&b, numbers(out), numbers(lse), numbers(state), 1));
    hash.add(out);
    hash.add(lse);
  });
  for (int64_t bits : {2, 4, 8, 16, 0}) {
    Codes codes(bits);
    print(bits ? "codes of " + std::to_string(bits) : "codes by channel", [&](Hash& hash) {
      for (int64_t queries : {1, 6}) add_attention(hash, {codes.piece(), entries.piece(5, 600)}, queries, false);
    });
  }
  for (int64_t sums : {1, 3, 5, 2}) {
    Sketch sketch(sums, sums % 2);
    print("sketch of " + std::to_string(sums), [&](Hash& hash) {
      for (int64_t queries : {1, 6}) add_attention(hash, {sketch.piece(), entries.piece(5, 200)}, queries, false);
    });
  }
  print("attention over rows", [&](Hash& hash) {
    for (int64_t queries : {1, 4}) {
      Array<bf16> query(LANES * GROUPS * queries * DIM), out(query.size);
      Array<float> lse(LANES * GROUPS * queries), received(LANES * 900);
      fill(query, queries, 45);
      for (int reduce_max = 0; reduce_max < 2; reduce_max++) {
        attend_rows(query, entries.piece(0, 900), queries, out, lse, &received, reduce_max);
        hash.add(out);
        hash.add(lse);
        hash.add(received);
      }
    }
  });
}

// ---- sessions: each token's entry is put into a bank, then it attends -----------------------------------------------

struct Session {
  static constexpr int64_t COLUMNS = 90;
  Entries entries;
  Array<float> ranks, scores, received;
  Array<int32_t> slots;
  std::vector<KvPiece> pieces;
  KvStep step{};
  Session(uint64_t seed, int64_t token)
      : entries(COLUMNS, seed), ranks(LANES * COLUMNS), scores(LANES * COLUMNS), received(LANES * COLUMNS),
        slots(LANES * COLUMNS) {
    fill(ranks, seed + 2, 1);
    fill(scores, seed + 3, 16);
    for (size_t i = 0; i < slots.size; i++) slots[i] = int32_t(i * 7 % 200);
    pieces = {entries.piece(0, COLUMNS)};
    KvAttention& a = step.attention;
    a.pieces = pieces.data(); a.lanes = LANES; a.queries = 1; a.dim = a.value_dim = DIM; a.piece_count = 1;
    a.entries = COLUMNS; a.causal_offset = -1;
    KvInsert& i = step.insert;
    i.ranks = numbers(ranks); i.oldest_first = 1; i.columns = COLUMNS; i.new_slot = 201;
    i.keys = rows_of(entries.keys, LANES, COLUMNS, DIM); i.values = rows_of(entries.values, LANES, COLUMNS, DIM);
    i.slots = numbers(slots); i.scores = numbers(scores);
    step.received = numbers(received); step.reduce_max = int64_t(seed & 1); step.token = token;
  }
  void add(Hash& hash) {
    hash.add(entries.keys); hash.add(entries.values); hash.add(slots); hash.add(scores); hash.add(received);
  }
};

void hash_sessions() {
  print("insert", [](Hash& hash) {
    Session session(60, 0);
    Array<bf16> key(LANES * DIM), value(LANES * DIM);
    fill(key, 61, 30);
    fill(value, 62, 30);
    done(kvkeep_insert(&session.step.insert, numbers(key), numbers(value)));
    session.add(hash);
  });
  const int64_t tokens = 4, heads = LANES * GROUPS;
  Array<float> scores(heads);
  fill(scores, 85, 20);
  for (const KvArray& sinks : {NOTHING, numbers(scores)})
    print(sinks.data ? "sessions with sinks" : "sessions", [&](Hash& hash) {
      Session first(80, 2), second(81, 0);
      KvStep* steps[] = {&first.step, &second.step};
      Array<bf16> query(tokens * heads * DIM), key(LANES * tokens * DIM), value(key.size), out(query.size);
      Array<float> lse(tokens * heads);
      fill(query, 82, 45);
      fill(key, 83, 45);
      fill(value, 84, 45);
      for (int by_token = 0; by_token < 2; by_token++) {
        done(kvkeep_attend_sessions(steps, 2, numbers(query), numbers(key), numbers(value), tokens, heads, by_token,
                                    0.125f, 0, sinks, numbers(out), numbers(lse)));
        hash.add(out);
        hash.add(lse);
      }
      first.add(hash);
      second.add(hash);
    });
  for (const KvArray& sinks : {NOTHING, numbers(scores)})
    print(sinks.data ? "layers with sinks" : "layers", [&](Hash& hash) {
      Layer one(KV_Q4_0, 700, false), two(KV_Q4_0, 800, false);
      const KvLayer* layers[] = {&one.layer, &two.layer};
      Session first(90, 1), second(91, 0), third(92, 1), fourth(93, 0);
      KvStep *of_one[] = {&first.step, &second.step}, *of_two[] = {&third.step, &fourth.step};
      KvStep* const* steps[] = {of_one, of_two};
      one.layer.scaling = 0.125f;
      two.layer.scaling = 0.25f;
      one.layer.sinks = sinks;
      const int64_t step_counts[] = {2, 2};
      Array<bf16> x(2 * Layer::HIDDEN), cos(2 * Layer::DIM), sin(2 * Layer::DIM);
      fill(x, 94, 40);
      fill_angles(cos, sin, 2, Layer::DIM / 2);
      done(kvkeep_run_layers(layers, steps, 2, step_counts, numbers(cos), numbers(sin), numbers(x), NOTHING));
      hash.add(x);
      fourth.add(hash);
    });
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    puts(kvkeep_paths());
    return 0;
  }
  if (!kvkeep_choose(arguments[1])) {
    fprintf(stderr, "There is no path %s here; there are %s.\n", arguments[1], kvkeep_paths());
    return 2;
  }
  hash_matrices();
  hash_product_of_floats();
  hash_small();
  hash_delta_net();
  hash_mamba2();
  hash_layer();
  hash_experts();
  hash_mixture();
  hash_mlp();
  hash_other_layers();
  hash_attention();
  hash_sessions();
  return 0;
}
