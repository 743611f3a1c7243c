// What a processor's cores do at most: multiply and add in registers, and read memory.
// products.py builds it with the compiler and the flags of the kernels.
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

namespace {

typedef float Vec __attribute__((vector_size(BYTES)));
constexpr int LANES = BYTES / 4, SUMS = 12;  // so many sums hide the time that one addition takes

// Seconds from the first thread's start to the last one's end.
template <class Work>
double time_threads(int64_t num_threads, Work work) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (int64_t n = 1; n < num_threads; n++) threads.emplace_back(work, n);
    work(0);
    for (auto& thread : threads) thread.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

template <class Value>
void keep(Value& value) {
#if defined(__x86_64__)
    asm volatile("" : "+x"(value));
#else
    asm volatile("" : "+w"(value));
#endif
}

void add_floats(int64_t turns) {
    Vec sums[SUMS] = {}, factor = Vec{} + 0.999f, more = Vec{} + 0.001f;
    keep(factor);
    keep(more);
    for (int s = 0; s < SUMS; s++) keep(sums[s]);  // else the compiler computes one, all are equal
    for (int64_t t = 0; t < turns; t++)
        for (int s = 0; s < SUMS; s++) sums[s] = sums[s] * factor + more;
    for (int s = 0; s < SUMS; s++) keep(sums[s]);
}

#ifdef __AVX512BF16__
void add_pairs(int64_t turns) {
    __m512 sums[SUMS];
    for (int s = 0; s < SUMS; s++) {
        sums[s] = _mm512_setzero_ps();
        keep(sums[s]);
    }
    __m512i some = _mm512_set1_epi32(0x3c003c00);  // pairs of 2^-7
    keep(some);
    for (int64_t t = 0; t < turns; t++)
        for (int s = 0; s < SUMS; s++)
            sums[s] = _mm512_dpbf16_ps(sums[s], (__m512bh)some, (__m512bh)some);
    for (int s = 0; s < SUMS; s++) keep(sums[s]);
}
#endif

void read_floats(const float* from, int64_t count) {
    Vec sums[SUMS] = {};
    for (int64_t i = 0; i + SUMS * LANES <= count; i += SUMS * LANES)
        for (int s = 0; s < SUMS; s++)
            sums[s] += *reinterpret_cast<const Vec*>(from + i + s * LANES);
    for (int s = 0; s < SUMS; s++) keep(sums[s]);
}

}  // namespace

extern "C" {

// Operations a second of multiplying and adding float32; a product counts as two.
double roof_floats(int64_t num_threads, int64_t turns) {
    const double s = time_threads(num_threads, [=](int64_t) { add_floats(turns); });
    return 2.0 * LANES * SUMS * turns * num_threads / s;
}

// The same for pairs of bfloat16, summed in float32; 0: the processor has no unit for them.
double roof_pairs(int64_t num_threads, int64_t turns) {
#ifdef __AVX512BF16__
    const double s = time_threads(num_threads, [=](int64_t) { add_pairs(turns); });
    return 4.0 * LANES * SUMS * turns * num_threads / s;
#else
    return 0.0;
#endif
}

// Bytes a second of reading `count` floats, which begin at a multiple of 64 bytes.
double roof_reads(int64_t num_threads, const float* from, int64_t count) {
    const int64_t each = count / num_threads / 64 * 64;
    const double s =
        time_threads(num_threads, [=](int64_t n) { read_floats(from + n * each, each); });
    return 4.0 * each * num_threads / s;
}

}  // extern "C"
