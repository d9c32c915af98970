// Quantized linears for many rows: weights become numbers once per up to kPassRows rows of x.
#pragma once

#include "exl/ops/quantized.h"

namespace exl::EXL_ISA {

// All epilogues, parts and row strides; any m > 0.
void quant_prefill(ThreadPool& pool, const QuantLinearArgs& args);

}  // namespace exl::EXL_ISA
