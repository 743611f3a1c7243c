// What the parts of the stress program have in common: checks, random numbers, and memory of its
// very size, so that a sanitizer sees what is read or written behind the end.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "calls.h"
#include "wide.h"

namespace stress {

void run_pool();
void run_products();
void run_experts();
void run_attention();
void run_layers();
void run_logits();
void run_sums();

inline void check(bool is_so, const char* what) {
    if (is_so) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

// Whether `new` finds memory: a part of the program may say that there is none.
extern bool has_memory;
extern std::atomic<int64_t> num_refused;  // how often it found none

#ifndef SHARE
#define SHARE 1
#endif
// How many rounds of random shapes there are: at least one, and where SHARE says so only a part.
constexpr int rounds(int most) { return (most + SHARE - 1) / SHARE; }

constexpr int FEW = 1, MANY = 3;  // threads, which must not change a bit

struct Random : std::mt19937 {
    using std::mt19937::mt19937;
    int64_t from(int64_t least, int64_t most) {
        return least + int64_t((*this)() % uint64_t(most - least + 1));
    }
    bool is_so() { return (*this)() % 2 == 0; }
    // In [-1, 1]: a number that each of the types holds as it is.
    float number() { return float(from(-64, 64)) / 64; }
};

enum Type : int64_t { FLOAT32, BFLOAT16, FLOAT16 };

// Numbers of one of the types. Those that nobody has put there are nan.
class Numbers {
   public:
    Numbers(int64_t count, int64_t type)
        : type(type), count(count), bytes(count * (type == FLOAT32 ? 4 : 2), 0xFF) {}
    Numbers(Random& random, int64_t count, int64_t type) : Numbers(count, type) {
        for (int64_t i = 0; i < count; i++) put(i, random.number());
    }

    void* data() { return bytes.data(); }
    const void* data() const { return bytes.data(); }
    const float* floats() const { return reinterpret_cast<const float*>(bytes.data()); }

    float at(int64_t i) const {
        if (type == FLOAT32) return floats()[i];
        uint16_t bits;
        std::memcpy(&bits, bytes.data() + 2 * i, sizeof bits);
        return type == BFLOAT16 ? number(bits) : number(Float16{bits});
    }

    // The number must be one that the type holds.
    void put(int64_t i, float number) {
        if (type == FLOAT32) return void(std::memcpy(bytes.data() + 4 * i, &number, sizeof number));
        uint32_t wide;
        std::memcpy(&wide, &number, sizeof wide);
        const uint16_t bits = type == BFLOAT16 ? uint16_t(wide >> 16) : to_float16(number).bits;
        std::memcpy(bytes.data() + 2 * i, &bits, sizeof bits);
    }

    bool has_nan() const {
        for (int64_t i = 0; i < count; i++)
            if (std::isnan(at(i))) return true;
        return false;
    }
    bool operator==(const Numbers& other) const { return bytes == other.bytes; }

    int64_t type, count;

   private:
    std::vector<uint8_t> bytes;
};

// Whether a number is what it should be, of that type; nan where that is nan.
inline bool is_near(float found, double wanted, int64_t type) {
    if (std::isnan(wanted) || std::isnan(found)) return std::isnan(wanted) && std::isnan(found);
    return std::fabs(found - wanted) <= (type == FLOAT32 ? 1e-4 : 2e-2) * (1 + std::fabs(wanted));
}

}  // namespace stress
