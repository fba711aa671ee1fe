"""Write src/kvkeep/native/codebooks.cpp: the codebooks of GGUF's IQ kinds, from the tables of the package gguf.

python tools/codebooks.py
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from gguf import quants

TARGET = Path(__file__).parents[1] / "src" / "kvkeep" / "native" / "codebooks.cpp"
EIGHTS, FOURS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"), ("IQ3_XXS", "IQ3_S")
"""Kinds whose entries are eight codes of two bits, and four codes of three bits in four."""
HEAD = """\
// The codebooks of IQ kinds. Made by tools/codebooks.py: do not edit.
//
// A number is an entry: eight codes of two bits, or four codes of three bits in four, the first in the lowest bits.
#include "codebooks.h"

namespace {

template <int N, int WEIGHTS> constexpr Codebook<N> spread(const uint16_t (&entries)[N]) {
  Codebook<N> made{};
  for (int i = 0; i < N; i++) {
    uint32_t& entry = made.entries[i];
    for (int w = 0; w < WEIGHTS; w++)
      entry |= uint32_t(entries[i] >> 16 / WEIGHTS * w & (WEIGHTS == 8 ? 3 : 7)) << (w % 4 * 8 + w / 4 * 2);
    made.halves[i] = uint16_t(entry | entry >> 12);
  }
  return made;
}
"""


def source() -> str:
    """Return the text of the file."""
    numbers, tables = [], []
    for kind in EIGHTS + FOURS:
        grid = getattr(quants, kind).grid_hex.decode()
        entries = np.frombuffer(bytes.fromhex(grid), np.dtype("<u2"))
        text = textwrap.fill(", ".join(f"0x{one:04x}" for one in entries), 120, break_long_words=False)
        numbers.append(f"constexpr uint16_t {kind}_ENTRIES[] = {{\n{text}}};\n")
        name = "iq1" if kind == "IQ1_S" else kind.lower()
        made = f"spread<{len(entries)}, {8 if kind in EIGHTS else 4}>({kind}_ENTRIES)"
        tables.append(f"const Codebook<{len(entries)}> kv_{name} = {made};\n")
    return "\n".join([HEAD, *numbers, "}  // namespace\n", "".join(tables)])


if __name__ == "__main__":
    TARGET.write_text(source(), "utf-8")
