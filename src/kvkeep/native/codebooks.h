// The codebooks of IQ kinds: an entry is the codes of several weights.
#pragma once

#include <stdint.h>

// Of eight codes of two bits, the first four in bits 0 and 1 of each byte, the others in bits 2 and 3. Of four codes of
// three bits, one in each byte.
template <int N> struct Codebook {
  uint32_t entries[N];
  alignas(64) uint16_t halves[N];  // the same: bytes 0 and 2 of an entry in the lower byte, 1 and 3 in the upper one
};

extern const Codebook<256> kv_iq2_xxs;
extern const Codebook<512> kv_iq2_xs;
extern const Codebook<1024> kv_iq2_s;
extern const Codebook<2048> kv_iq1;  // IQ1_S and IQ1_M
extern const Codebook<256> kv_iq3_xxs;
extern const Codebook<512> kv_iq3_s;
