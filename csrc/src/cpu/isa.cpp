// Which op tables this machine can run. __builtin_cpu_supports asks cpuid and, for the wide
// registers, xgetbv: an instruction set counts only if the operating system saves its state.
#include "exl/op_table.h"

namespace exl {

namespace scalar {
extern const OpTable op_table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const OpTable op_table;
}
namespace avx512 {
extern const OpTable op_table;
}
#endif

static OpTables detect() {
    OpTables found{{&scalar::op_table}, 1};
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    if (has_avx2) found.tables[found.count++] = &avx2::op_table;
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        found.tables[found.count++] = &avx512::op_table;
    }
#endif
    return found;
}

const OpTables& available_tables() {
    static const OpTables tables = detect();
    return tables;
}

}  // namespace exl
