// Whole numbers of 4, 5, 6 and 8 bits in panels (panels.h), and how they become floats or pairs of
// bfloat16, which hold them exactly.
//
// CHUNK neighbouring inputs of a panel's outputs stand together, in units of 32 bits: the first unit
// of all outputs, then their second one, and so on. A unit has the lower 4 bits of 8 inputs: its
// lower half those with an even place, its upper half those with an odd one. Further units have the
// bits above, halved in the same way. A stored ZERO means the number 0. Where the processor has AVX-512,
// numbers of 8 bits stand there two by two: those of 16 outputs, of the next 16, and so on.
#pragma once

#include "panels.h"
#include "wide.h"

namespace {

inline Wide floats_of(IWide numbers) { return __builtin_convertvector(numbers, Wide); }

// The lower 4 bits of input `i` of 8 neighbours, number `eight` of a chunk, of outputs [v * WIDTH, …).
inline UWide nibble_of(const uint32_t* chunk, int v, int64_t eight, int i) {
    return bits_at(chunk + eight * PANEL + v * WIDTH) >> (i / 2 * 4 + i % 2 * 16);
}

inline void put_nibbles(const uint8_t* numbers, int units, uint32_t* unit) {
    for (int u = 0; u < units; u++) {
        uint32_t bits = 0;
        for (int k = 0; k < 8; k++)
            bits |= uint32_t(numbers[8 * u + k] & 15) << (k / 2 * 4 + k % 2 * 16);
        unit[u * PANEL] = bits;
    }
}

#ifdef HAS_PAIRS
// A whole number of at most 8 bits in bfloat16.
constexpr uint16_t bfloat16_of(int number) {
    if (number == 0) return 0;
    const int size = number < 0 ? -number : number;
    int exponent = 0;
    while (size >> (exponent + 1)) exponent++;
    return (number < 0) << 15 | (127 + exponent) << 7 | (size << (7 - exponent) & 127);
}

// Numbers of at most 6 bits in bfloat16, from -ZERO on, again and again: bits above are ignored.
template <int BITS, int ZERO>
struct Table {
    uint16_t numbers[64] = {};
    constexpr Table() {
        for (int i = 0; i < 64; i++) numbers[i] = bfloat16_of(i % (1 << BITS) - ZERO);
    }
};
template <int BITS, int ZERO>
alignas(64) constexpr Table<BITS, ZERO> TABLE;
template <int BITS, int ZERO>
inline __m512i table_of(int first) {
    return _mm512_load_si512(TABLE<BITS, ZERO>.numbers + first);
}

// The lower 4 bits of two inputs, of which each half of a lane has one.
inline UVec nibbles_of(const uint32_t* chunk, int v, int64_t eight, int pair) {
    return bits_at(chunk + eight * PANEL + v * WIDTH) >> pair * 4;
}
#endif

// How numbers of some bits stand in chunks. Each struct has:
//   CHUNK, UNITS           inputs of a chunk, a multiple of 8, and the units of one output
//   IS_FAST                they are unpacked in registers for any number of rows; never with AVX2
//   at(…, eight, i)        input i of 8 neighbours, as floats
//   pair(…, eight, pair)   inputs 2 pair and 2 pair + 1 of these, as bfloat16 (with HAS_PAIRS)
//   put(numbers, …)        packs a chunk of one output
// and, for files that have units (fminfer's own), put_units: the same of 16 outputs. Bits beside a
// number may be anything where a table ignores them.
template <int BITS, int ZERO>
struct Values;

template <int ZERO>
struct Values<4, ZERO> {
    static constexpr int CHUNK = 32, UNITS = 4;
    static constexpr bool IS_FAST = REGISTERS == 32;  // in registers, for any number of rows

    static Wide at(const uint32_t* chunk, int v, int64_t eight, int i) {
#ifdef __AVX512F__
        const Wide table = Wide{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - float(ZERO);
        return (Wide)_mm512_permutexvar_ps((__m512i)nibble_of(chunk, v, eight, i), (__m512)table);
#else
        return floats_of((IWide)(nibble_of(chunk, v, eight, i) & 15) - ZERO);
#endif
    }
#ifdef HAS_PAIRS
    static __m512i pair(const uint32_t* chunk, int v, int64_t eight, int pair) {
        return _mm512_permutexvar_epi16((__m512i)nibbles_of(chunk, v, eight, pair),
                                        table_of<4, ZERO>(0));
    }
#endif
    static void put(const uint8_t* numbers, uint32_t* chunk, int lane) {
        put_nibbles(numbers, UNITS, chunk + lane);
    }
    // Of 16 lanes from `lane` on, units as a file has them.
    static void put_units(const UVec* units, uint32_t* chunk, int lane) {
        for (int u = 0; u < UNITS; u++)
            std::memcpy(chunk + u * PANEL + lane, units + u, sizeof *units);
    }
};

// 4 bits, and MORE bits above them.
template <int MORE, int CHUNK_, int ZERO>
struct Higher {
    static constexpr int CHUNK = CHUNK_, LOW = CHUNK / 8, UNITS = LOW + 1, MASK = (1 << MORE) - 1;
    static constexpr bool IS_FAST = false;

    // The bits above of 8 neighbours, the first ones lowest.
    static UWide above(const uint32_t* chunk, int v, int64_t eight) {
        return bits_at(chunk + LOW * PANEL + v * WIDTH) >> int(eight * 4 * MORE);
    }
    static Wide at(const uint32_t* chunk, int v, int64_t eight, int i) {
        const UWide high = above(chunk, v, eight) >> (i / 2 * MORE + i % 2 * 16) & MASK;
        return floats_of((IWide)((nibble_of(chunk, v, eight, i) & 15) | high << 4) - ZERO);
    }
#ifdef HAS_PAIRS
    static __m512i pair(const uint32_t* chunk, int v, int64_t eight, int pair) {
        const UVec high = above(chunk, v, eight) >> pair * MORE & (MASK << 16 | MASK);
        const UVec both = (nibbles_of(chunk, v, eight, pair) & 0x000F000F) | high << 4;
        if constexpr (MORE == 1)
            return _mm512_permutexvar_epi16((__m512i)both, table_of<5, ZERO>(0));
        else
            return _mm512_permutex2var_epi16(table_of<6, ZERO>(0), (__m512i)both,
                                             table_of<6, ZERO>(32));
    }
#endif
    static void put(const uint8_t* numbers, uint32_t* chunk, int lane) {
        uint32_t high = 0;
        for (int i = 0; i < CHUNK; i++)
            high |= uint32_t(numbers[i] >> 4 & MASK) << (i / 2 * MORE + i % 2 * 16);
        put_nibbles(numbers, LOW, chunk + lane);
        chunk[LOW * PANEL + lane] = high;
    }
};
template <int ZERO>
struct Values<5, ZERO> : Higher<1, 32, ZERO> {};
template <int ZERO>
struct Values<6, ZERO> : Higher<2, 16, ZERO> {};

template <>
struct Values<8, 0> {
    static constexpr int CHUNK = 32, UNITS = 8;
    static constexpr bool IS_FAST = false;

#ifdef __AVX512F__
    // The two inputs of a pair, of the first or second 8 of 16 outputs.
    static __m512 half(const uint32_t* chunk, int v, int64_t pair, int upper) {
        const char* from = reinterpret_cast<const char*>(chunk) + pair * 2 * PANEL + v * 32;
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + upper);
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    }
    static Wide at(const uint32_t* chunk, int v, int64_t eight, int i) {
        const IVec even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
        const int64_t pair = eight * 4 + i / 2;
        return (Wide)_mm512_permutex2var_ps(half(chunk, v, pair, 0), (__m512i)(even + i % 2),
                                            half(chunk, v, pair, 1));
    }
    static void put_units(const UVec* units, uint32_t* chunk, int lane) {
        char* const to = reinterpret_cast<char*>(chunk) + lane * 2;
        for (int u = 0; u < UNITS; u++)
            for (int i = 0; i < 2; i++) {
                const Half two = narrow(units[u] >> 16 * i);
                std::memcpy(to + (2 * u + i) * 2 * PANEL, &two, sizeof two);
            }
    }
#else
    static Wide at(const uint32_t* chunk, int v, int64_t eight, int i) {
        const UWide unit = bits_at(chunk + (eight * 2 + i / 4) * PANEL + v * WIDTH);
        return floats_of((IWide)(unit << (24 - i % 4 * 8)) >> 24);
    }
    static void put_units(const UVec* units, uint32_t* chunk, int lane) {
        for (int u = 0; u < UNITS; u++)
            std::memcpy(chunk + u * PANEL + lane, units + u, sizeof *units);
    }
#endif
#ifdef HAS_PAIRS
    static __m512i pair(const uint32_t* chunk, int v, int64_t eight, int pair) {
        return (__m512i)_mm512_cvtne2ps_pbh(half(chunk, v, eight * 4 + pair, 1),
                                            half(chunk, v, eight * 4 + pair, 0));
    }
#endif
    static void put(const uint8_t*, uint32_t*, int) {}
};

}  // namespace
