// The forms of quantized weights: bytes of blocks as files hold them, and the same in panels.
//
// In a panel a block is the scales of all its outputs, then its chunks (values.h). A weight is
// scale * number + offset. Inputs with the same scale are a run. The numbers of `Kind` must be those
// of `Blocks.kind` (compute/formats).
#pragma once

#include "values.h"

namespace {

enum Kind : int64_t {
    INT8 = 2,       // a scale and whole numbers of 8 bits; Q8_0 as well
    SYMMETRIC = 3,  // a scale and units of 4 bits, of which 8 is 0
    INT4 = 4,       // a scale, the least weight and units of 4 bits
    Q4_0 = 5,
    Q4_1 = 6,
    Q5_0 = 7,
    Q5_1 = 8,
    Q4_K = 9,
    Q5_K = 10,
    Q6_K = 11,
    WHOLE4 = 12,  // a scale in float32, a zero that is a number as well, and units of 4 bits
    WHOLE8 = 13,  // the same with whole numbers of 8 bits
    FLOAT8 = 14,  // a scale in float32, and e4m3
    MXFP4 = 15,
    IQ4_NL = 16,
    IQ4_XS = 17,
};

inline Wide halves_at(const uint32_t* from, int n) {
    return wide_at(reinterpret_cast<const Float16*>(from) + n);
}

// WIDTH bytes as whole numbers: of type uint8_t or int8_t.
template <typename T>
inline IWide wholes_at(const uint32_t* from, int n) {
    typedef T Bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));
    const Bytes* bytes = reinterpret_cast<const Bytes*>(reinterpret_cast<const T*>(from) + n);
    return __builtin_convertvector(*bytes, IWide);
}
template <typename T>
inline Wide bytes_at(const uint32_t* from, int n) {
    return floats_of(wholes_at<T>(from, n));
}

// Scales of a block: how they stand in a panel, n being the place of an output or of WIDTH of them.
// Each struct has:
//   UNITS                    what they take in a panel, in units of 32 bits
//   HAS_OFFSET               there is an offset; otherwise `offset` returns 0
//   IS_OF_BLOCK              a block is one run, or runs of its length; otherwise a chunk is a run
//   scale, offset(…, run, n) of a run of the block
//   put(block, …, n)         packs those of a file's block

// A scale for each block, which a file has at byte AT.
template <int AT>
struct OneScale {
    static constexpr int64_t UNITS = PANEL / 2;
    static constexpr bool HAS_OFFSET = false, IS_OF_BLOCK = true;

    static Wide scale(const uint32_t* scales, int64_t, int n) { return halves_at(scales, n); }
    static Wide offset(const uint32_t*, int64_t, int) { return Wide{}; }
    static void put(const uint8_t* block, uint32_t* scales, int n) {
        std::memcpy(reinterpret_cast<uint16_t*>(scales) + n, block + AT, 2);
    }
};

// A scale and a minimum for each block.
struct ScaleAndLeast {
    static constexpr int64_t UNITS = PANEL;
    static constexpr bool HAS_OFFSET = true, IS_OF_BLOCK = true;

    static Wide scale(const uint32_t* scales, int64_t, int n) { return halves_at(scales, n); }
    static Wide offset(const uint32_t* scales, int64_t, int n) {
        return halves_at(scales + PANEL / 2, n);
    }
    static void put(const uint8_t* block, uint32_t* scales, int n) {
        for (int i = 0; i < 2; i++)
            std::memcpy(reinterpret_cast<uint16_t*>(scales) + i * PANEL + n, block + 2 * i, 2);
    }
};

// A scale in float32 for each block.
struct WideScale {
    static constexpr int64_t UNITS = PANEL;
    static constexpr bool HAS_OFFSET = false, IS_OF_BLOCK = true;

    static Wide scale(const uint32_t* scales, int64_t, int n) { return (Wide)bits_at(scales + n); }
    static Wide offset(const uint32_t*, int64_t, int) { return Wide{}; }
    static void put(const uint8_t* block, uint32_t* scales, int n) {
        std::memcpy(scales + n, block, sizeof *scales);
    }
};

// The same for numbers of which there is 2^-8.
struct ScaleOfFloat8 : WideScale {
    static void put(const uint8_t* block, uint32_t* scales, int n) {
        float scale;
        std::memcpy(&scale, block, sizeof scale);
        scale *= 256;
        std::memcpy(scales + n, &scale, sizeof scale);
    }
};

// A scale in float32, and the zero of a block: weights are scale * (number - zero).
struct ScaleAndZero : WideScale {
    static constexpr int64_t UNITS = PANEL + PANEL / 2;
    static constexpr bool HAS_OFFSET = true;

    static Wide zero(const uint32_t* scales, int n) { return halves_at(scales + PANEL, n); }
    static Wide offset(const uint32_t* scales, int64_t run, int n) {
        return -(scale(scales, run, n) * zero(scales, n));
    }
    static void put(const uint8_t* block, uint32_t* scales, int n) {
        WideScale::put(block, scales, n);
        std::memcpy(reinterpret_cast<uint16_t*>(scales + PANEL) + n, block + 4, 2);
    }
};

// A power of 2 for each block: its exponent plus 128. All of them are numbers, as in llama.cpp.
struct PowerOfTwo {
    static constexpr int64_t UNITS = PANEL / 4;
    static constexpr bool HAS_OFFSET = false, IS_OF_BLOCK = true;

    static Wide scale(const uint32_t* scales, int64_t, int n) {
        const IWide power = wholes_at<uint8_t>(scales, n);
        return (Wide)(power < 2 ? power + 1 << 21 : power - 1 << 23);
    }
    static Wide offset(const uint32_t*, int64_t, int) { return Wide{}; }
    static void put(const uint8_t* block, uint32_t* scales, int n) {
        reinterpret_cast<uint8_t*>(scales)[n] = block[0];
    }
};

// Scales and minima of Q4_K and Q5_K, one of each for 8 chunks: 6 bits in files, 8 in panels.
struct GroupScales {
    static constexpr int64_t UNITS = PANEL + 16 * PANEL / 4;
    static constexpr bool HAS_OFFSET = true, IS_OF_BLOCK = false;

    static const uint32_t* group(const uint32_t* scales, int64_t at) {
        return scales + PANEL + at * PANEL / 4;
    }
    static Wide scale(const uint32_t* scales, int64_t run, int n) {
        return halves_at(scales, n) * bytes_at<uint8_t>(group(scales, run), n);
    }
    static Wide offset(const uint32_t* scales, int64_t run, int n) {
        return -(halves_at(scales + PANEL / 2, n) * bytes_at<uint8_t>(group(scales, 8 + run), n));
    }
    static void put(const uint8_t* block, uint32_t* scales, int n) {
        ScaleAndLeast::put(block, scales, n);
        const uint8_t* const low = block + 4;
        uint8_t* const to = reinterpret_cast<uint8_t*>(scales + PANEL) + n;
        for (int i = 0; i < 4; i++) {
            to[i * PANEL] = low[i] & 63;
            to[(4 + i) * PANEL] = (low[8 + i] & 15) | low[i] >> 6 << 4;
            to[(8 + i) * PANEL] = low[4 + i] & 63;
            to[(12 + i) * PANEL] = low[8 + i] >> 4 | low[4 + i] >> 6 << 4;
        }
    }
};

// A scale for each block, and whole numbers of 8 bits for each of its RUNS chunks.
template <int RUNS>
struct SignedScales {
    static constexpr int64_t UNITS = PANEL / 2 + RUNS * PANEL / 4;
    static constexpr bool HAS_OFFSET = false, IS_OF_BLOCK = false;

    static Wide scale(const uint32_t* scales, int64_t run, int n) {
        return halves_at(scales, n) * bytes_at<int8_t>(scales + PANEL / 2 + run * PANEL / 4, n);
    }
    static Wide offset(const uint32_t*, int64_t, int) { return Wide{}; }
    static uint8_t* runs(uint32_t* scales, int n) {
        return reinterpret_cast<uint8_t*>(scales + PANEL / 2) + n;
    }
};
struct ScalesOfSix : SignedScales<16> {
    static void put(const uint8_t* block, uint32_t* scales, int n) {
        OneScale<208>::put(block, scales, n);
        for (int i = 0; i < 16; i++) runs(scales, n)[i * PANEL] = block[192 + i];
    }
};
// In files of 6 bits each, of which 32 is 0: 2 upper ones in bytes 2 and 3, then 4 lower ones.
struct ScalesOfIq4 : SignedScales<8> {
    static void put(const uint8_t* block, uint32_t* scales, int n) {
        OneScale<0>::put(block, scales, n);
        for (int i = 0; i < 8; i++) {
            const int low = block[4 + i / 2] >> i % 2 * 4 & 15, high = block[2 + i / 4] >> i % 4 * 2 & 3;
            runs(scales, n)[i * PANEL] = uint8_t((low | high << 4) - 32);
        }
    }
};

// A form: its numbers and its scales. Each struct adds, of a file's block,
//   bytes(block)             how many it has for so many inputs
//   read(bytes, chunk, to)   writes the whole numbers of a chunk of it, from 0 on
template <typename Values_, typename Scales_>
struct Form : Values_ {
    typedef Values_ Values;
    typedef Scales_ Scales;
    static constexpr bool HAS_UNITS = false;  // a file's numbers are units already

    static int64_t panel_units(int64_t inputs, int64_t block) {
        const int64_t blocks = inputs / block;
        return blocks * Scales::UNITS + inputs / Values_::CHUNK * Values_::UNITS * PANEL;
    }
};

// 16 bytes hold inputs i and i + 16 each.
inline void split_nibbles(const uint8_t* from, uint8_t* to) {
    for (int i = 0; i < 16; i++) {
        to[i] = from[i] & 15;
        to[16 + i] = from[i] >> 4;
    }
}
inline void add_fifth_bits(const uint8_t* from, uint8_t* to) {
    uint32_t bits;
    std::memcpy(&bits, from, sizeof bits);
    for (int i = 0; i < 32; i++) to[i] |= (bits >> i & 1) << 4;
}

template <int AT, typename Values_, typename Scales_>
struct Units : Form<Values_, Scales_> {
    static constexpr bool HAS_UNITS = true;
    static constexpr int64_t UNITS_AT = AT;
    static int64_t bytes(int64_t block) { return AT + block * Values_::UNITS * 4 / Values_::CHUNK; }
    static void read(const uint8_t*, int64_t, uint8_t*) {}
};
typedef Units<2, Values<8, 0>, OneScale<0>> Int8;
typedef Units<2, Values<4, 8>, OneScale<0>> Symmetric;
typedef Units<4, Values<4, 0>, ScaleAndLeast> Int4;
typedef Units<6, Values<4, 0>, ScaleAndZero> Whole4;
typedef Units<6, Values<8, 0>, ScaleAndZero> Whole8;
typedef Units<4, Float8, ScaleOfFloat8> Floats8;

struct FourBits : Form<Values<4, 8>, OneScale<0>> {
    static int64_t bytes(int64_t) { return 18; }
    static void read(const uint8_t* block, int64_t, uint8_t* to) { split_nibbles(block + 2, to); }
};
struct FourBitsLeast : Form<Values<4, 0>, ScaleAndLeast> {
    static int64_t bytes(int64_t) { return 20; }
    static void read(const uint8_t* block, int64_t, uint8_t* to) { split_nibbles(block + 4, to); }
};
struct FiveBits : Form<Values<5, 16>, OneScale<0>> {
    static int64_t bytes(int64_t) { return 22; }
    static void read(const uint8_t* block, int64_t, uint8_t* to) {
        split_nibbles(block + 6, to);
        add_fifth_bits(block + 2, to);
    }
};
struct FiveBitsLeast : Form<Values<5, 0>, ScaleAndLeast> {
    static int64_t bytes(int64_t) { return 24; }
    static void read(const uint8_t* block, int64_t, uint8_t* to) {
        split_nibbles(block + 8, to);
        add_fifth_bits(block + 4, to);
    }
};
// 32 bytes hold chunks 2 i and 2 i + 1.
inline void read_half_bytes(const uint8_t* from, int64_t chunk, uint8_t* to) {
    for (int i = 0; i < 32; i++) to[i] = from[chunk / 2 * 32 + i] >> chunk % 2 * 4 & 15;
}
struct FourBitsK : Form<Values<4, 0>, GroupScales> {
    static int64_t bytes(int64_t) { return 144; }
    static void read(const uint8_t* block, int64_t chunk, uint8_t* to) {
        read_half_bytes(block + 16, chunk, to);
    }
};
struct FiveBitsK : Form<Values<5, 0>, GroupScales> {
    static int64_t bytes(int64_t) { return 176; }
    static void read(const uint8_t* block, int64_t chunk, uint8_t* to) {
        read_half_bytes(block + 48, chunk, to);
        for (int i = 0; i < 32; i++) to[i] |= (block[16 + i] >> chunk & 1) << 4;
    }
};
struct SixBitsK : Form<Values<6, 32>, ScalesOfSix> {
    static int64_t bytes(int64_t) { return 210; }
    static void read(const uint8_t* block, int64_t chunk, uint8_t* to) {
        const int64_t part = chunk / 8, group = chunk % 8 / 2, first = chunk % 2 * 16;
        const uint8_t* const low = block + part * 64 + group % 2 * 32 + first;
        const uint8_t* const high = block + 128 + part * 32 + first;
        for (int i = 0; i < 16; i++)
            to[i] = (low[i] >> group / 2 * 4 & 15) | (high[i] >> group * 2 & 3) << 4;
    }
};

struct Floats4 : Form<Nibbles<Float4>, PowerOfTwo> {
    static int64_t bytes(int64_t) { return 17; }
    static void read(const uint8_t* block, int64_t, uint8_t* to) { split_nibbles(block + 1, to); }
};
struct TableBits : Form<Nibbles<Iq4>, OneScale<0>> {
    static int64_t bytes(int64_t) { return 18; }
    static void read(const uint8_t* block, int64_t, uint8_t* to) { split_nibbles(block + 2, to); }
};
struct TableBitsK : Form<Nibbles<Iq4>, ScalesOfIq4> {
    static int64_t bytes(int64_t) { return 136; }
    static void read(const uint8_t* block, int64_t chunk, uint8_t* to) {
        split_nibbles(block + 8 + chunk * 16, to);
    }
};

// Calls use(form) with the form of a kind.
template <typename Use>
inline void with_form(int64_t kind, const Use& use) {
    switch (kind) {
        case INT8: return use(Int8());
        case SYMMETRIC: return use(Symmetric());
        case INT4: return use(Int4());
        case Q4_0: return use(FourBits());
        case Q4_1: return use(FourBitsLeast());
        case Q5_0: return use(FiveBits());
        case Q5_1: return use(FiveBitsLeast());
        case Q4_K: return use(FourBitsK());
        case Q5_K: return use(FiveBitsK());
        case Q6_K: return use(SixBitsK());
        case WHOLE4: return use(Whole4());
        case WHOLE8: return use(Whole8());
        case FLOAT8: return use(Floats8());
        case MXFP4: return use(Floats4());
        case IQ4_NL: return use(TableBits());
        case IQ4_XS: return use(TableBitsK());
    }
}

}  // namespace
