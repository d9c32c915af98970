// Declarations of the ops of the instruction set being compiled; table.cpp puts them into its
// OpTable.
#pragma once

#include "exl/op_table.h"

namespace exl::EXL_ISA {

void linear(ThreadPool& pool, const LinearArgs& args);
void embedding(ThreadPool& pool, const EmbeddingArgs& args);
void rms_norm(ThreadPool& pool, const RmsNormArgs& args);
void layer_norm(ThreadPool& pool, const LayerNormArgs& args);
void rope(ThreadPool& pool, const RopeArgs& args);
void gated_activation(ThreadPool& pool, const GatedActivationArgs& args);
void activation(ThreadPool& pool, const ActivationArgs& args);
void log_sum_exp(ThreadPool& pool, const LogSumExpArgs& args);
void write_kv(ThreadPool& pool, const WriteKvArgs& args);
void paged_attention(ThreadPool& pool, const AttentionArgs& args);
void quant_linear(ThreadPool& pool, const QuantLinearArgs& args);
void expert_mlp(ThreadPool& pool, const ExpertMlpArgs& args);
void causal_conv(ThreadPool& pool, const CausalConvArgs& args);
void delta_rule(ThreadPool& pool, const DeltaRuleArgs& args);
void state_scan(ThreadPool& pool, const StateScanArgs& args);
void trellis_linear(ThreadPool& pool, const TrellisLinearArgs& args);
void nearest_rings(ThreadPool& pool, const RingArgs& args);
SampleResult sample(const SampleArgs& args);

// Number of activations per work item of elementwise ops, 1 to 3 us of work. Distributing less over
// threads does not pay.
constexpr int64_t kValuesPerChunk = 4096;

}  // namespace exl::EXL_ISA
