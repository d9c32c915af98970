// Detection of the op tables that this machine can run. __builtin_cpu_supports reads cpuid and, for
// the wide registers, xgetbv: an instruction set counts only if the operating system saves its
// register state.
#include "exl/op_table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
// The two sets below differ from avx512 only in the quantized linears and in the experts. Shifts of
// bits across 64-bit numbers (VBMI) make trellis codes faster; most processors with VNNI have them.
namespace avx512vnni {
void quant_linear(ThreadPool& pool, const QuantLinearArgs& args);
void expert_mlp(ThreadPool& pool, const ExpertMlpArgs& args);
void trellis_linear(ThreadPool& pool, const TrellisLinearArgs& args);
}  // namespace avx512vnni
namespace avx512vbmi {
void trellis_linear(ThreadPool& pool, const TrellisLinearArgs& args);
}
namespace amx {
void quant_linear(ThreadPool& pool, const QuantLinearArgs& args);
void expert_mlp(ThreadPool& pool, const ExpertMlpArgs& args);
}  // namespace amx

static OpTable avx512_with(
    const char* isa, void (*quant_linear)(ThreadPool&, const QuantLinearArgs&),
    void (*expert_mlp)(ThreadPool&, const ExpertMlpArgs&)
) {
    OpTable table = avx512::op_table;
    table.isa = isa;
    table.quant_linear = quant_linear;
    table.expert_mlp = expert_mlp;
    const bool has_bit_shifts =
        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
    table.trellis_linear = has_bit_shifts ? avx512vbmi::trellis_linear : avx512vnni::trellis_linear;
    return table;
}

// Requests permission for AMX tile state, which Linux grants per process and only on request.
// Threads started later inherit it.
static bool may_use_tiles() {
#if defined(__linux__)
    constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr int kTileData = 18;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
    const bool has_tiles = (edx & kBf16) != 0 && (edx & kTile) != 0 && (edx & kInt8) != 0;
    return has_tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#endif

static OpTables detect() {
    OpTables found{{&scalar::op_table}, 1};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c")) {
        return found;
    }
    found.tables[found.count++] = &avx2::op_table;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
        return found;
    }
    found.tables[found.count++] = &avx512::op_table;
    if (!__builtin_cpu_supports("avx512vnni")) return found;
    static const OpTable vnni =
        avx512_with("avx512vnni", avx512vnni::quant_linear, avx512vnni::expert_mlp);
    found.tables[found.count++] = &vnni;
    if (!__builtin_cpu_supports("avx512bf16") || !may_use_tiles()) return found;
    static const OpTable tiles = avx512_with("amx", amx::quant_linear, amx::expert_mlp);
    found.tables[found.count++] = &tiles;
#endif
    return found;
}

const OpTables& available_tables() {
    static const OpTables tables = detect();
    return tables;
}

}  // namespace exl
