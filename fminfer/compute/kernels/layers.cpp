// Norms, rotary positions and gated activations of packed tokens, on the CPU.
//
// Each reads its input once and writes its output once, where an operation at a time goes over
// memory three to eight times. Arithmetic is in float32 and rounded once. Rows are (outer, inner):
// element i of row (o, j) lies at o * outer_step + j * inner_step + i.

#include <cmath>

#include "activations.h"
#include "calls.h"
#include "pool.h"
#include "vectors.h"

namespace {

constexpr int64_t ALONE = 1 << 13;  // elements that one thread does sooner than two

// Calls use(first, count) for an array's pieces of LANES elements and for what is left; the count
// of whole pieces is a constant once this is inlined.
template <typename Use>
inline void by_lanes(int64_t num, Use use) {
    int64_t i = 0;
    for (; i + LANES <= num; i += LANES) use(i, LANES);
    if (i < num) use(i, int(num - i));
}

inline float sum_of(Vec value) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += value[lane];
    return sum;
}

template <typename T>
void norm_row(const T* x, T* out, const T* weight, int64_t width, float eps, float offset) {
    Vec squares = {};
    by_lanes(width, [&](int64_t i, int n) {
        const Vec value = load_some(x + i, n);
        squares += value * value;
    });
    const float factor = 1.0f / std::sqrt(sum_of(squares) / float(width) + eps);
    by_lanes(width, [&](int64_t i, int n) {
        const Vec scaled = load_some(x + i, n) * factor;
        store_some(out + i, scaled * (load_some(weight + i, n) + offset), n);
    });
}

// (x - mean) / sqrt(variance + eps) * weight + bias
template <typename T>
void center_row(const T* x, T* out, const T* weight, const T* bias, int64_t width, float eps) {
    Vec sums = {}, squares = {};
    by_lanes(width, [&](int64_t i, int n) { sums += load_some(x + i, n); });
    const float mean = sum_of(sums) / float(width);
    by_lanes(width, [&](int64_t i, int n) {
        Vec value = load_some(x + i, n) - mean;
        for (int lane = n; lane < LANES; lane++) value[lane] = 0;
        squares += value * value;
    });
    const float factor = 1.0f / std::sqrt(sum_of(squares) / float(width) + eps);
    by_lanes(width, [&](int64_t i, int n) {
        const Vec scaled = (load_some(x + i, n) - mean) * factor;
        store_some(out + i, scaled * load_some(weight + i, n) + load_some(bias + i, n), n);
    });
}

template <typename T>
void add_row(const T* x, const T* other, T* sum, int64_t width) {
    by_lanes(width, [&](int64_t i, int n) {
        store_some(sum + i, load_some(x + i, n) + load_some(other + i, n), n);
    });
}

// The halves of the first `turned` elements are the parts of complex numbers, which are turned.
template <typename T>
void turn_row(const T* x, T* out, const float* cos, const float* sin, int64_t width,
              int64_t turned) {
    const int64_t half = turned / 2;
    by_lanes(half, [&](int64_t i, int n) {
        const Vec a = load_some(x + i, n), b = load_some(x + half + i, n);
        store_some(out + i, a * load_some(cos + i, n) - b * load_some(sin + i, n), n);
        store_some(out + half + i,
                   b * load_some(cos + i, n) + a * load_some(sin + i, n), n);
    });
    for (int64_t i = turned; i < width; i++) out[i] = x[i];
}

template <typename T>
void gate_row(const T* gate, const T* up, T* out, int64_t width, int64_t kind) {
    by_lanes(width, [&](int64_t i, int n) {
        const Vec bent = bend(load_some(gate + i, n), kind);
        store_some(out + i, up == nullptr ? bent : bent * load_some(up + i, n), n);
    });
}

// Calls work(x's row, out's row, outer, inner) for all rows.
template <typename T, typename Work>
void for_rows(const Rows& r, Work work) {
    const T* x = static_cast<const T*>(r.x);
    T* out = static_cast<T*>(r.out);
    const int64_t num = r.outer * r.inner;
    for_parts(r.num_threads, num, ALONE / r.width + 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
            const int64_t o = i / r.inner, j = i % r.inner;
            work(x + o * r.outer_step + j * r.inner_step, out + i * r.width, o, j);
        }
    });
}

template <typename T>
void norm(const Rows& r, const void* weight, const void* bias, float eps, float offset,
          const void* other, void* sum) {
    const T *scales = static_cast<const T*>(weight), *shifts = static_cast<const T*>(bias);
    for_rows<T>(r, [&](const T* x, T* out, int64_t o, int64_t j) {
        const int64_t place = (o * r.inner + j) * r.width;
        if (other != nullptr) {
            T* both = static_cast<T*>(sum) + place;
            add_row(x, static_cast<const T*>(other) + place, both, r.width);
            x = both;
        }
        if (bias != nullptr)
            center_row(x, out, scales, shifts, r.width, eps);
        else
            norm_row(x, out, scales, r.width, eps, offset);
    });
}

template <typename T>
void turn(const Rows& r, const float* cos, const float* sin, int64_t turned) {
    for_rows<T>(r, [&](const T* x, T* out, int64_t o, int64_t) {
        turn_row(x, out, cos + o * turned / 2, sin + o * turned / 2, r.width, turned);
    });
}

template <typename T>
void gate(const Rows& r, const void* up, int64_t kind) {
    const T* other = static_cast<const T*>(up);
    for_rows<T>(r, [&](const T* x, T* out, int64_t o, int64_t) {
        gate_row(x, other == nullptr ? other : other + o * r.outer_step, out, r.width, kind);
    });
}

}  // namespace

extern "C" {

// x / sqrt(mean(x^2) + eps) * (weight + offset), x being sum = x + other where that is not null;
// both are as `out`. weight is (width,).
void fminfer_rms_norm(const Rows* r, const void* weight, float eps, float offset,
                      const void* other, void* sum) {
    r->type == 0 ? norm<float>(*r, weight, nullptr, eps, offset, other, sum)
                 : norm<uint16_t>(*r, weight, nullptr, eps, offset, other, sum);
}

// (x - mean) / sqrt(variance + eps) * weight + bias; all else as above. bias is (width,).
void fminfer_layer_norm(const Rows* r, const void* weight, const void* bias, float eps,
                        const void* other, void* sum) {
    r->type == 0 ? norm<float>(*r, weight, bias, eps, 0, other, sum)
                 : norm<uint16_t>(*r, weight, bias, eps, 0, other, sum);
}

// Rotary positions of (tokens, heads) rows; cos and sin are (tokens, turned / 2), in one piece.
void fminfer_rotate(const Rows* r, const float* cos, const float* sin, int64_t turned) {
    r->type == 0 ? turn<float>(*r, cos, sin, turned) : turn<uint16_t>(*r, cos, sin, turned);
}

// act(x) * up, rows of `up` being as far apart as those of x, or act(x) where `up` is null; `kind`
// is that of activations.h.
void fminfer_gate(const Rows* r, const void* up, int64_t kind) {
    r->type == 0 ? gate<float>(*r, up, kind) : gate<uint16_t>(*r, up, kind);
}

}  // extern "C"
