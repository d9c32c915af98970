// Table of the CPU ops of one instruction set. The set is chosen once, when a Table is created.
#pragma once

#include "exl/ops/attention.h"
#include "exl/ops/cache.h"
#include "exl/ops/elementwise.h"
#include "exl/ops/linear.h"
#include "exl/ops/moe.h"
#include "exl/ops/quant_linear.h"
#include "exl/ops/recurrent.h"
#include "exl/ops/rings.h"
#include "exl/ops/sampling.h"
#include "exl/ops/trellis.h"
#include "exl/thread_pool.h"

namespace exl {

struct OpTable {
    const char* isa;
    void (*linear)(ThreadPool&, const LinearArgs&);
    void (*embedding)(ThreadPool&, const EmbeddingArgs&);
    void (*rms_norm)(ThreadPool&, const RmsNormArgs&);
    void (*layer_norm)(ThreadPool&, const LayerNormArgs&);
    void (*rope)(ThreadPool&, const RopeArgs&);
    void (*gated_activation)(ThreadPool&, const GatedActivationArgs&);
    void (*activation)(ThreadPool&, const ActivationArgs&);
    void (*log_sum_exp)(ThreadPool&, const LogSumExpArgs&);
    void (*write_kv)(ThreadPool&, const WriteKvArgs&);
    void (*paged_attention)(ThreadPool&, const AttentionArgs&);
    void (*quant_linear)(ThreadPool&, const QuantLinearArgs&);
    void (*expert_mlp)(ThreadPool&, const ExpertMlpArgs&);
    void (*trellis_linear)(ThreadPool&, const TrellisLinearArgs&);
    void (*nearest_rings)(ThreadPool&, const RingArgs&);
    SampleResult (*sample)(const SampleArgs&);
    void (*causal_conv)(ThreadPool&, const CausalConvArgs&);
    void (*delta_rule)(ThreadPool&, const DeltaRuleArgs&);
    void (*state_scan)(ThreadPool&, const StateScanArgs&);
};

// Op tables that this processor and operating system can run, slowest first; scalar is always among
// them.
struct OpTables {
    const OpTable* tables[5];
    int count;
};
const OpTables& available_tables();

}  // namespace exl
