// Draws by Gumbel-max: the token of the highest scaled logit + noise. fminfer/compute/sampling/sampler.py has the same
// noise, and says where the mixer is from.
//
// Noise costs two logarithms in float64, so only tokens have it that could still win. With the best
// score so far b, a token of scaled logit s wins only if its uniform number is below e^(s - b).
#pragma once

#include <cfloat>
#include <cmath>

#include "wide.h"

namespace {

constexpr float LOWEST_SCORE = -3.14f;  // the likeliest token's is higher, whatever its noise
constexpr float MARGIN = 1e-4f;         // of scores: more than what is rounded before a comparison
constexpr float STEPS = 0x1p23f * 1.44269504f;  // of a float's bits, for one in the exponent of e

template <typename U>
inline U mixed(U bits) {
    bits = (bits ^ bits >> 16) * 0x7FEB352Du;
    bits = (bits ^ bits >> 15) * 0x846CA68Bu;
    return bits ^ bits >> 16;
}

// 32 random bits of a token, or of a vector of them.
template <typename U>
inline U token_bits(U ids, uint64_t noise) {
    return mixed(mixed(ids ^ uint32_t(noise)) ^ uint32_t(noise >> 32));
}

inline bool any(IWide lanes) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#else
    uint64_t pairs[WIDTH / 2], some = 0;
    std::memcpy(pairs, &lanes, sizeof pairs);
    for (uint64_t pair : pairs) some |= pair;
    return some != 0;
#endif
}

struct Race {
    float temperature, slope, base = 0;
    uint64_t noise;
    double best = LOWEST_SCORE;
    int64_t winner;

    Race(float temperature, uint64_t noise, int64_t winner)
        : temperature(temperature),
          slope(std::fmin(STEPS / temperature, FLT_MAX)),
          noise(noise),
          winner(winner) {
        set_base();
    }

    // Limits of 24 bits, which those of tokens that win are below. Distances are from the largest
    // logit. A float's bits, read as a number, are a chord of its logarithm: the limit is too high
    // by 6 % at most, never too low.
    Wide limits_of(Wide distances) const {
        const Wide steps = base - distances * slope, zero = {};
        return (Wide)__builtin_convertvector(steps > zero ? steps : zero, IWide);
    }

    void enter(int64_t id, float distance) {
        const double rest = (0x1p32 - 0.5 - token_bits(uint32_t(id), noise)) * 0x1p-32;
        const double score = double(-(distance / temperature)) - std::log(-std::log(rest));
        if (score > best) {  // of equals the first stays
            best = score;
            winner = id;
            set_base();
        }
    }

   private:
    void set_base() { base = (127 + 24) * 0x1p23f - (float(best) - MARGIN) * STEPS; }
};

}  // namespace
