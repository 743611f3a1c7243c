// Vectors of 16 floats, which the compiler maps to what the processor has.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
typedef float Loose __attribute__((vector_size(64), aligned(4), may_alias));

inline Vec load(const float* from) { return *reinterpret_cast<const Loose*>(from); }
inline void store(float* to, Vec value) { *reinterpret_cast<Loose*>(to) = value; }
inline Vec all(float value) { return Vec{} + value; }

// e^x for x <= 0, to 1e-7 of it; nan stays nan. After Cephes' expf (Moshier).
inline Vec exp_of(Vec x) {
    x = x < all(-87.0f) ? all(-87.0f) : x;
    const Vec magic = all(12582912.0f);  // adding it rounds to a whole number
    const Vec rounded = x * 1.44269504f + magic;
    const Vec n = rounded - magic;
    const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const IVec power = ((IVec)rounded - 0x4B400000 + 127) << 23;
    return p * (Vec)power;
}

inline float from_bfloat16(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

// Rounds to the nearest, ties to even; nan stays nan.
inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return uint16_t(bits >> 16) | 0x40;
    return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

}  // namespace
