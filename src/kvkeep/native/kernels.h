// The kernels of one instruction set, as dispatch.cpp chooses between them.
#pragma once

#include "kvkeep.h"

struct KvKernels {
  const char* name;
  decltype(&kvkeep_product) product;
  decltype(&kvkeep_norm) norm;
  decltype(&kvkeep_angles) angles;
  decltype(&kvkeep_before_attention) before_attention;
  decltype(&kvkeep_before_mlp) before_mlp;
  decltype(&kvkeep_after_attention) after_attention;
  decltype(&kvkeep_mlp) mlp;
  decltype(&kvkeep_route) route;
  decltype(&kvkeep_run_experts) run_experts;
  decltype(&kvkeep_delta_net) delta_net;
  decltype(&kvkeep_mamba2) mamba2;
  decltype(&kvkeep_attend) attend;
  decltype(&kvkeep_received) received;
  decltype(&kvkeep_insert) insert;
  decltype(&kvkeep_attend_sessions) attend_sessions;
  decltype(&kvkeep_run_layers) run_layers;
};
