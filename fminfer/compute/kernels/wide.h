// Numbers of 16 bits read into vectors as wide as registers and written from them, and sums across
// the lanes of such vectors.
#pragma once

#include <utility>

#include "vectors.h"

#if defined(__AVX__) && !defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

typedef int32_t IWide __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t HalfWide __attribute__((vector_size(2 * WIDTH)));
typedef uint16_t LooseHalfWide __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

// A number of IEEE's float16. One of bfloat16 is a plain uint16_t.
struct Float16 {
    uint16_t bits;
};

inline float number(Float16 from) {
    // The exponent is moved by a product, which gets subnormal numbers right as well.
    uint32_t wide = uint32_t(from.bits & 0x7FFF) << 13;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    value *= 0x1p112f;
    std::memcpy(&wide, &value, sizeof value);
    wide |= (from.bits & 0x7C00) == 0x7C00 ? 0x7F800000u : 0u;  // infinite and nan stay so
    wide |= uint32_t(from.bits & 0x8000) << 16;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

// Rounds to the nearest, ties to even; nan stays nan.
inline Float16 to_float16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t size = bits & 0x7FFFFFFF;
    uint32_t half;
    if (size > 0x7F800000) {
        half = 0x7E00 | (size >> 13 & 0x3FF);
    } else if (size >= 0x477FF000) {  // 65520 and above
        half = 0x7C00;
    } else if (size < 0x38800000) {  // subnormal: adding 0.5 rounds to a multiple of 2^-24
        float small;
        std::memcpy(&small, &size, sizeof small);
        small += 0.5f;
        std::memcpy(&half, &small, sizeof half);
        half -= 0x3F000000;
    } else {
        half = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
    }
    return {uint16_t(half | (bits >> 16 & 0x8000))};
}

// g++ 12 makes several instructions of what is one.
inline UWide widen_bits(HalfWide bits) {
#if defined(__AVX512F__)
    return (UWide)_mm512_cvtepu16_epi32((__m256i)bits);
#elif defined(__AVX2__)
    return (UWide)_mm256_cvtepu16_epi32((__m128i)bits);
#else
    return __builtin_convertvector(bits, UWide);
#endif
}

inline Wide wide_at(const uint16_t* from) {
    return (Wide)(widen_bits(*reinterpret_cast<const LooseHalfWide*>(from)) << 16);
}

// Numbers of float16 as floats.
inline Wide widen_halves(HalfWide bits) {
#if defined(__AVX512F__)
    return (Wide)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
    return (Wide)_mm256_cvtph_ps((__m128i)bits);
#else
    Wide value;
    for (int lane = 0; lane < WIDTH; lane++) value[lane] = number(Float16{bits[lane]});
    return value;
#endif
}

inline Wide wide_at(const Float16* from) {
    return widen_halves(*reinterpret_cast<const LooseHalfWide*>(from));
}

// The first halves of two vectors, or the first one where registers are narrow.
#if defined(__AVX512F__)
inline Wide halves_at(const float* low, const float* high) {
    const __m512d first = _mm512_castpd256_pd512((__m256d)_mm256_loadu_ps(low));
    return (Wide)_mm512_insertf64x4(first, (__m256d)_mm256_loadu_ps(high), 1);
}
inline __m256i half_bits_at(const void* low, const void* high) {
    const __m128i first = _mm_loadu_si128(static_cast<const __m128i*>(low));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first),
                                   _mm_loadu_si128(static_cast<const __m128i*>(high)), 1);
}
inline Wide halves_at(const uint16_t* low, const uint16_t* high) {
    return (Wide)(widen_bits((HalfWide)half_bits_at(low, high)) << 16);
}
inline Wide halves_at(const Float16* low, const Float16* high) {
    return (Wide)_mm512_cvtph_ps(half_bits_at(low, high));
}
#else
template <typename T>
inline Wide halves_at(const T* low, const T*) {
    return wide_at(low);
}
#endif

// These round to the nearest, ties to even; nan stays nan.
inline void put_wide(uint16_t* to, Wide value) {
    const UWide bits = (UWide)value;
    const UWide rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const UWide upper = (bits & 0x7FFFFFFF) > 0x7F800000 ? bits >> 16 | 0x40 : rounded;
#if defined(__AVX512F__)
    const HalfWide half = (HalfWide)_mm512_cvtepi32_epi16((__m512i)upper);
#else
    const HalfWide half = __builtin_convertvector(upper, HalfWide);
#endif
    *reinterpret_cast<LooseHalfWide*>(to) = half;
}

inline void put_wide(Float16* to, Wide value) {
#if defined(__AVX512F__)
    const __m256i half = _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
#elif defined(__F16C__)
    const __m128i half = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half);
#else
    for (int lane = 0; lane < WIDTH; lane++) to[lane] = to_float16(value[lane]);
#endif
}

// Writes `count` numbers as another type.
template <typename From, typename To>
inline void convert(const From* from, int64_t count, To* to) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) put_wide(to + i, wide_at(from + i));
    if (i == count) return;
    From rest[WIDTH] = {};
    To found[WIDTH];
    std::memcpy(rest, from + i, (count - i) * sizeof *from);
    put_wide(found, wide_at(rest));
    std::memcpy(to + i, found, (count - i) * sizeof *to);
}

template <typename T>
inline void convert(const T* from, int64_t count, T* to) {
    std::memcpy(to, from, count * sizeof *from);
}

inline float largest_of(Wide value) {
    float most = value[0];
    for (int lane = 1; lane < WIDTH; lane++) most = value[lane] > most ? value[lane] : most;
    return most;
}

// Of each 2 * HALF lanes: the first (UPPER 0) or last (1) HALF of `a`, then those of `b`.
template <int HALF, int UPPER, size_t... LANE>
inline Wide halves_of(Wide a, Wide b, std::index_sequence<LANE...>) {
#define PLACE \
    int(LANE / (2 * HALF) * 2 * HALF + LANE % HALF + UPPER * HALF + LANE / HALF % 2 * WIDTH)
#ifdef __clang__
    return __builtin_shufflevector(a, b, PLACE...);
#else
    return __builtin_shuffle(a, b, IWide{PLACE...});
#endif
#undef PLACE
}

// Adds up of(0) to of(WIDTH - 1) in the order in which `sum_of` adds up lanes: number i and
// i + WIDTH / 2 first, then those sums alike.
template <int STEP = 1, int FIRST = 0, typename Of>
inline Wide tree_of(const Of& of) {
    if constexpr (STEP == WIDTH)
        return of(FIRST);
    else
        return tree_of<2 * STEP, FIRST>(of) + tree_of<2 * STEP, FIRST + STEP>(of);
}

template <int HALF = WIDTH / 2>
inline float sum_of(Wide value) {
    constexpr std::make_index_sequence<WIDTH> lanes;
    value += halves_of<HALF, 1>(value, value, lanes);
    if constexpr (HALF > 1)
        return sum_of<HALF / 2>(value);
    else
        return value[0];
}

// Of each NUM lanes, those of vector i become lane i of all.
template <int NUM, int HALF = NUM / 2>
inline void turn_lanes(Wide* vectors) {
    constexpr std::make_index_sequence<WIDTH> lanes;
    for (int i = 0; i < NUM; i++) {
        if (i & HALF) continue;
        const Wide low = vectors[i], high = vectors[i + HALF];
        vectors[i] = halves_of<HALF, 0>(low, high, lanes);
        vectors[i + HALF] = halves_of<HALF, 1>(low, high, lanes);
    }
    if constexpr (HALF > 1) turn_lanes<NUM, HALF / 2>(vectors);
}

// Of each NUM lanes, lane i of the result is the sum of those of sums[i], from the first to the last.
template <int NUM>
inline Wide sums_of(Wide* sums) {
    turn_lanes<NUM>(sums);
    Wide total = {};
    for (int i = 0; i < NUM; i++) total += sums[i];
    return total;
}

}  // namespace
