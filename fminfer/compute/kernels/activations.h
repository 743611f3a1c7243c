// The activations of MLPs.
#pragma once

#include "vectors.h"

namespace {

// 1 / x, for x from 1 to 2.
inline Vec inverse_of(Vec x) {
#ifdef __AVX512F__  // a division takes longer than all else here
    const Vec near = (Vec)_mm512_rcp14_ps((__m512)x);
    return near * (2.0f - x * near);
#else
    return 1.0f / x;
#endif
}

// 1 / (1 + e^-x)
inline Vec sigmoid_of(Vec x) {
    const Vec below = x < Vec{} ? x : -x;
    const Vec e = below < -87.0f ? Vec{} : exp_of(below);
    return (x < Vec{} ? e : all(1.0f)) * inverse_of(1.0f + e);
}

// kind 0: silu, 1: gelu by tanh, 2: relu.
inline Vec bend(Vec x, int64_t kind) {
    if (kind == 2) return x < Vec{} ? Vec{} : x;
    return x * sigmoid_of(kind == 0 ? x : x * 1.5957691216f * (1.0f + 0.044715f * x * x));
}

}  // namespace
