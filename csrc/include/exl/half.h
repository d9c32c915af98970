// Conversion of IEEE binary16 (float16) in portable C++, without hardware instructions.
#pragma once

#include <cstdint>
#include <cstring>

namespace exl {

// Converts to binary32 exactly, including subnormals and NaN payloads. Static, because the linker
// would merge a shared inline function across instruction sets.
static inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16;
    const uint32_t exponent = (h >> 10) & 0x1f;
    const uint32_t mantissa = h & 0x3ff;
    uint32_t bits = 0;
    if (exponent == 0x1f) {
        const uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
        bits = 0x7f800000u | quiet | (mantissa << 13);
    } else if (exponent == 0) {
        const float magnitude = float(mantissa) * 0x1p-24f;
        std::memcpy(&bits, &magnitude, 4);
    } else {
        bits = ((exponent + 112) << 23) | (mantissa << 13);
    }
    bits |= sign;
    float value = 0;
    std::memcpy(&value, &bits, 4);
    return value;
}

}  // namespace exl
