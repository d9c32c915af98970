// The op table of the instruction set being compiled.
#include "cpu/common/ops.h"

#define EXL_NAME_OF(isa) EXL_STRING(isa)
#define EXL_STRING(isa) #isa

namespace exl::EXL_ISA {

extern const OpTable op_table;
const OpTable op_table = {
    EXL_NAME_OF(EXL_ISA), linear,         embedding,     rms_norm, layer_norm,      rope,
    gated_activation,     activation,     log_sum_exp,   write_kv, paged_attention, quant_linear,
    expert_mlp,           trellis_linear, nearest_rings, sample,   causal_conv,     delta_rule,
    state_scan,
};

}  // namespace exl::EXL_ISA
