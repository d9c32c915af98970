// Quantized linear for many rows: dequantizes the weights once per pass of up to kPassRows rows.
#pragma once

#include "exl/ops/quant_linear.h"

namespace exl::EXL_ISA {

// Supports every epilogue, every number of parts, any row strides and any m > 0.
void quant_prefill(ThreadPool& pool, const QuantLinearArgs& args);

}  // namespace exl::EXL_ISA
