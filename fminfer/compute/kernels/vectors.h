// Vectors of 16 floats, which the compiler maps to what the processor has, and vectors as wide as its
// registers: sums that stay in registers are those.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
typedef float Loose __attribute__((vector_size(64), aligned(4), may_alias));

#ifdef __clang__
#define LANES_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LANES_OF(a, b, ...) __builtin_shuffle(a, b, IVec{__VA_ARGS__})
#endif

// Each as wide as a register, and the registers there are for them.
#if defined(__AVX512F__)
constexpr int WIDTH = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int WIDTH = 8, REGISTERS = 16;
#else
constexpr int WIDTH = 4, REGISTERS = 16;
#endif
typedef float Wide __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t UWide __attribute__((vector_size(4 * WIDTH)));
typedef float LooseWide __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t LooseUWide __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

inline Wide wide_at(const float* from) { return *reinterpret_cast<const LooseWide*>(from); }
inline UWide bits_at(const uint32_t* from) { return *reinterpret_cast<const LooseUWide*>(from); }
inline void put_wide(float* to, Wide value) { *reinterpret_cast<LooseWide*>(to) = value; }
inline void put_bits(uint32_t* to, UWide value) { *reinterpret_cast<LooseUWide*>(to) = value; }

// Keeps g++ from reading a vector from memory again wherever it is used.
template <typename V>
inline void keep_in_register(V& value) {
#if defined(__AVX__)
    asm("" : "+v"(value));
#endif
}

// Before a loop over an array of vectors, which then stays in registers. Unrolled later, as g++ 12
// does by itself, sums went over the stack before and after a product.
#define UNROLLED _Pragma("GCC unroll 8")

inline Vec load(const float* from) { return *reinterpret_cast<const Loose*>(from); }
inline void store(float* to, Vec value) { *reinterpret_cast<Loose*>(to) = value; }
inline Vec all(float value) { return Vec{} + value; }

// The nearest whole number, and `part` times 2^n for whole n >= -126. V is a Vec or a Wide.
constexpr float MAGIC = 12582912.0f;  // adding it rounds to a whole number
template <typename V>
inline V whole_of(V x) {
    return x + MAGIC - MAGIC;
}
template <typename V>
inline V scale(V part, V n) {
    return part * (V)((decltype(n < n))(n + (MAGIC + 127.0f)) << 23);
}
#ifdef __AVX512F__
inline Vec whole_of(Vec x) { return (Vec)_mm512_roundscale_ps((__m512)x, 0); }
inline Vec scale(Vec part, Vec n) { return (Vec)_mm512_scalef_ps((__m512)part, (__m512)n); }
#endif

// e^x for x <= 0, to 1e-7 of it; nan stays nan. After Cephes' expf (Moshier).
template <typename V>
inline V exp_of(V x) {
    const V lowest = V{} - 87.0f;
    x = x < lowest ? lowest : x;
    const V n = whole_of(x * 1.44269504f);
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = V{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return scale(p * r * r + r + 1.0f, n);
}

// 2^x for x <= 0, to 3e-6 of it; nan stays nan.
inline Vec power_of_two(Vec x) {
    x = x < all(-126.0f) ? all(-126.0f) : x;
    const Vec n = whole_of(x), r = x - n;
    Vec p = all(9.58285e-3f);
    p = p * r + 5.590643e-2f;
    p = p * r + 2.4024099e-1f;
    p = p * r + 6.9312419e-1f;
    return scale(p * r + 1.0f, n);
}

// 16 numbers of bfloat16, which are the upper halves of floats.
typedef uint16_t Half __attribute__((vector_size(32)));
typedef uint16_t LooseHalf __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t UVec __attribute__((vector_size(64)));

// g++ 12 makes five instructions of what is one.
#ifdef __AVX512F__
inline UVec widen(Half bits) { return (UVec)_mm512_cvtepu16_epi32((__m256i)bits); }
inline Half narrow(UVec value) { return (Half)_mm512_cvtepi32_epi16((__m512i)value); }
#else
inline UVec widen(Half bits) { return __builtin_convertvector(bits, UVec); }
inline Half narrow(UVec value) { return __builtin_convertvector(value, Half); }
#endif

inline float from_bfloat16(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}
inline Vec from_bfloat16(Half bits) { return (Vec)(widen(bits) << 16); }

// One element of either type.
inline float number(float value) { return value; }
inline float number(uint16_t bits) { return from_bfloat16(bits); }

// Rounds to the nearest, ties to even; nan stays nan.
inline Half to_bfloat16(Vec value) {
    const UVec bits = (UVec)value;
    const UVec upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return narrow((bits & 0x7FFFFFFF) > 0x7F800000 ? bits >> 16 | 0x40 : upper);
}

inline Vec load(const uint16_t* from) {
    return from_bfloat16(*reinterpret_cast<const LooseHalf*>(from));
}
inline void store(uint16_t* to, Vec value) {
    *reinterpret_cast<LooseHalf*>(to) = to_bfloat16(value);
}

// The first `count` lanes; the others are 0, or stay away.
inline Vec load_some(const float* from, int count) {
    Vec value = {};
    std::memcpy(&value, from, count * sizeof(float));
    return value;
}
inline Vec load_some(const uint16_t* from, int count) {
    Half bits = {};
    std::memcpy(&bits, from, count * sizeof(uint16_t));
    return from_bfloat16(bits);
}
inline void store_some(float* to, Vec value, int count) {
    std::memcpy(to, &value, count * sizeof(float));
}
inline void store_some(uint16_t* to, Vec value, int count) {
    const Half bits = to_bfloat16(value);
    std::memcpy(to, &bits, count * sizeof(uint16_t));
}

}  // namespace
