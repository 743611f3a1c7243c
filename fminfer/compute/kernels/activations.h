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

// x * (1 + erf(x / sqrt 2)) / 2, to 3e-7 (Abramowitz and Stegun 1964, 7.1.26).
inline Vec gelu_of(Vec x) {
    const Vec far = (x < Vec{} ? -x : x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * far);
    Vec p = all(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const Vec power = far > 9.0f ? Vec{} : exp_of(far > 9.0f ? Vec{} : -far * far);
    const Vec rest = p * t * power;  // 1 - erf(far)
    return 0.5f * x * (x < Vec{} ? rest : 2.0f - rest);
}

// kind 0: silu, 1: gelu by tanh, 2: relu, 3: gelu, 4: quick gelu.
inline Vec bend(Vec x, int64_t kind) {
    if (kind == 4) return x * sigmoid_of(x * 1.702f);
    if (kind == 2) return x < Vec{} ? Vec{} : x;
    if (kind == 3) return gelu_of(x);
    return x * sigmoid_of(kind == 0 ? x : x * 1.5957691216f * (1.0f + 0.044715f * x * x));
}

}  // namespace
