// Numbers of 4, 5, 6 and 8 bits in panels (panels.h), and how they become floats or pairs of
// bfloat16, which hold them exactly: whole numbers, places in a table of 16, and floats of 8 bits.
//
// CHUNK neighbouring inputs of a panel's outputs stand together, in units of 32 bits: the first unit
// of all outputs, then their second one, and so on. A unit has the lower 4 bits of 8 inputs: its
// lower half those with an even place, its upper half those with an odd one. Further units have the
// bits above, halved in the same way. A stored ZERO means the number 0. Floats of 8 bits, and with
// AVX-512 whole numbers of 8 bits, stand there two by two: those of 16 outputs, of the next 16, and so on.
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

// What stored numbers stand for: of(i) is at most 8 bits long.
template <int ZERO>
struct From {  // from -ZERO on
    static constexpr bool IS_RANGE = true;
    static constexpr int of(int i) { return i - ZERO; }
};
struct Iq4 {  // GGUF's IQ4_NL and IQ4_XS
    static constexpr bool IS_RANGE = false;
    static constexpr int of(int i) {
        constexpr int8_t numbers[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
        return numbers[i];
    }
};
struct Float4 {  // e2m1, in halves
    static constexpr bool IS_RANGE = false;
    static constexpr int of(int i) {
        constexpr int8_t sizes[] = {0, 1, 2, 3, 4, 6, 8, 12};
        return i < 8 ? sizes[i] : -sizes[i - 8];
    }
};
template <typename T, typename Meaning>
struct Sixteen {
    T numbers[16] = {};
    constexpr Sixteen() {
        for (int i = 0; i < 16; i++) numbers[i] = T(Meaning::of(i));
    }
};
template <typename T, typename Meaning>
alignas(64) constexpr Sixteen<T, Meaning> SIXTEEN;

#ifdef HAS_PAIRS
// A whole number of at most 8 bits in bfloat16.
constexpr uint16_t bfloat16_of(int number) {
    if (number == 0) return 0;
    const int size = number < 0 ? -number : number;
    int exponent = 0;
    while (size >> (exponent + 1)) exponent++;
    return (number < 0) << 15 | (127 + exponent) << 7 | (size << (7 - exponent) & 127);
}

// What numbers of at most 6 bits stand for in bfloat16, again and again: bits above are ignored.
template <int BITS, typename Meaning>
struct Table {
    uint16_t numbers[64] = {};
    constexpr Table() {
        for (int i = 0; i < 64; i++) numbers[i] = bfloat16_of(Meaning::of(i % (1 << BITS)));
    }
};
template <int BITS, typename Meaning>
alignas(64) constexpr Table<BITS, Meaning> TABLE;
template <int BITS, typename Meaning>
inline __m512i table_of(int first) {
    return _mm512_load_si512(TABLE<BITS, Meaning>.numbers + first);
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

// 4 bits, whatever they stand for.
template <typename Meaning>
struct Nibbles {
    static constexpr int CHUNK = 32, UNITS = 4;
    static constexpr bool IS_FAST = REGISTERS == 32;  // in registers, for any number of rows

    static Wide at(const uint32_t* chunk, int v, int64_t eight, int i) {
        const UWide number = nibble_of(chunk, v, eight, i);
#if defined(__AVX512F__)
        const __m512 table = _mm512_load_ps(SIXTEEN<float, Meaning>.numbers);
        return (Wide)_mm512_permutexvar_ps((__m512i)number, table);
#else
        if constexpr (Meaning::IS_RANGE) return floats_of((IWide)(number & 15) + Meaning::of(0));
#if defined(__AVX2__)
        // The lower or upper halves of all bytes at once; inputs 0, 4, 1 and 5 have the lower ones.
        const UWide halves = bits_at(chunk + eight * PANEL + v * WIDTH) >> (i / 2 % 2 * 4);
        const __m128i table = _mm_load_si128(
            reinterpret_cast<const __m128i*>(SIXTEEN<int8_t, Meaning>.numbers));
        const __m256i found = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table),
                                                  (__m256i)(halves & 0x0F0F0F0F));
        const int byte = i / 4 + i % 2 * 2;
        return floats_of((IWide)((UWide)found << (24 - byte * 8)) >> 24);
#else
        Wide found;
        for (int n = 0; n < WIDTH; n++) found[n] = SIXTEEN<float, Meaning>.numbers[number[n] & 15];
        return found;
#endif
#endif
    }
#ifdef HAS_PAIRS
    static __m512i pair(const uint32_t* chunk, int v, int64_t eight, int pair) {
        return _mm512_permutexvar_epi16((__m512i)nibbles_of(chunk, v, eight, pair),
                                        table_of<4, Meaning>(0));
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
template <int ZERO>
struct Values<4, ZERO> : Nibbles<From<ZERO>> {};

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
            return _mm512_permutexvar_epi16((__m512i)both, table_of<5, From<ZERO>>(0));
        else
            return _mm512_permutex2var_epi16(table_of<6, From<ZERO>>(0), (__m512i)both,
                                             table_of<6, From<ZERO>>(32));
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

// 8 bits, two neighbours of an output after those of the next.
struct Twos {
    static constexpr int CHUNK = 32, UNITS = 8;
    static constexpr bool IS_FAST = false;

    // Of WIDTH outputs.
    static const uint16_t* twos_at(const uint32_t* chunk, int v, int64_t pair) {
        return reinterpret_cast<const uint16_t*>(chunk) + pair * PANEL + v * WIDTH;
    }
    static void put(const uint8_t*, uint32_t*, int) {}
    static void put_units(const UVec* units, uint32_t* chunk, int lane) {
        char* const to = reinterpret_cast<char*>(chunk) + lane * 2;
        for (int u = 0; u < UNITS; u++)
            for (int i = 0; i < 2; i++) {
                const Half two = narrow(units[u] >> 16 * i);
                std::memcpy(to + (2 * u + i) * 2 * PANEL, &two, sizeof two);
            }
    }
};

#ifdef __AVX512F__
template <>
struct Values<8, 0> : Twos {
    // The two inputs of a pair, of the first or second 8 of 16 outputs.
    static __m512 half(const uint32_t* chunk, int v, int64_t pair, int upper) {
        const uint16_t* const from = twos_at(chunk, v, pair);
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + upper);
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    }
    static Wide at(const uint32_t* chunk, int v, int64_t eight, int i) {
        const IVec even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
        const int64_t pair = eight * 4 + i / 2;
        return (Wide)_mm512_permutex2var_ps(half(chunk, v, pair, 0), (__m512i)(even + i % 2),
                                            half(chunk, v, pair, 1));
    }
#ifdef HAS_PAIRS
    static __m512i pair(const uint32_t* chunk, int v, int64_t eight, int pair) {
        return (__m512i)_mm512_cvtne2ps_pbh(half(chunk, v, eight * 4 + pair, 1),
                                            half(chunk, v, eight * 4 + pair, 0));
    }
#endif
};
#else
template <>
struct Values<8, 0> {
    static constexpr int CHUNK = 32, UNITS = 8;
    static constexpr bool IS_FAST = false;

    static Wide at(const uint32_t* chunk, int v, int64_t eight, int i) {
        const UWide unit = bits_at(chunk + (eight * 2 + i / 4) * PANEL + v * WIDTH);
        return floats_of((IWide)(unit << (24 - i % 4 * 8)) >> 24);
    }
    static void put(const uint8_t*, uint32_t*, int) {}
    static void put_units(const UVec* units, uint32_t* chunk, int lane) {
        for (int u = 0; u < UNITS; u++)
            std::memcpy(chunk + u * PANEL + lane, units + u, sizeof *units);
    }
};
#endif

#ifdef HAS_PAIRS
// 2^-8 of e4m3's numbers whose exponent is 0, in bfloat16, again and again.
struct SmallFloats8 {
    uint16_t numbers[32] = {};
    constexpr SmallFloats8() {
        for (int i = 0; i < 32; i++) numbers[i] = i % 8 ? bfloat16_of(i % 8) - (17 << 7) : 0;
    }
};
alignas(64) constexpr SmallFloats8 SMALL_FLOATS8;
#endif

// 2^-8 of e4m3's numbers: in float16 these differ in the place of their sign alone. There is no nan:
// who packs a block makes its scale nan instead (compute/formats/published_rows).
struct Float8 : Twos {
    static Wide at(const uint32_t* chunk, int v, int64_t eight, int i) {
        typedef int16_t Signed __attribute__((vector_size(2 * WIDTH)));
        const uint16_t* const from = twos_at(chunk, v, eight * 4 + i / 2);
        const HalfWide twos = *reinterpret_cast<const LooseHalfWide*>(from);
        // the number in the upper byte; one place down, the sign stays
        const HalfWide number = i % 2 ? twos : twos << 8;
        return widen_halves((HalfWide)((Signed)number >> 1) & 0xBF80);
    }
#ifdef HAS_PAIRS
    static __m512i pair(const uint32_t* chunk, int v, int64_t eight, int pair) {
        const uint16_t* const from = twos_at(chunk, v, eight * 4 + pair);
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        const __m512i words = _mm512_cvtepu8_epi16(bytes);
        const __m512i size = _mm512_and_si512(words, _mm512_set1_epi16(0x7F));
        const __m512i usual = _mm512_add_epi16(_mm512_slli_epi16(size, 4),
                                               _mm512_set1_epi16(112 << 7));
        const __mmask32 is_small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
        const __m512i number = _mm512_mask_permutexvar_epi16(
            usual, is_small, size, _mm512_load_si512(SMALL_FLOATS8.numbers));
        const __m512i sign = _mm512_slli_epi16(words, 8);
        // number | (sign & 0x8000)
        return _mm512_ternarylogic_epi32(number, sign, _mm512_set1_epi16(-0x8000), 0xF8);
    }
#endif
};

}  // namespace
