// All kernels of one instruction set: compiled once for each, with KVKEEP_TABLE as the name of its table. Only the
// table is visible to the rest of the library.

#include "vectors.h"
#include "runtime.h"
#include "kernels.h"
#include "matmul.h"
#include "attention.h"
#include "layer.h"
#include "delta_net.h"
#include "mamba2.h"

extern "C" __attribute__((visibility("hidden"))) const KvKernels KVKEEP_TABLE;
const KvKernels KVKEEP_TABLE = {KVKEEP_NAME, product,  norm,    angles, before_attention, before_mlp,
                                after_attention, mlp,  route,   run_experts, delta_net, mamba2,
                                attend,      received, insert,  attend_sessions, run_layers};
