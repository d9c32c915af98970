// Quantized linears for many rows: weights become numbers once per up to kPassRows rows of x.
#pragma once

#include "exl/ops/quantized.h"

namespace exl {
class ThreadPool;
}

namespace exl::EXL_ISA {

// All epilogues, parts and row strides; any m > 0. Meant for some 16 rows and more.
void quant_prefill(ThreadPool& pool, const QuantLinearArgs& args);

}  // namespace exl::EXL_ISA
