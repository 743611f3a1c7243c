// Sums over the processes that share a stage's layers; sums.cpp has them.
#pragma once

#include <atomic>
#include <cstdint>

// Where a rank stands. Each lies in cache lines of its own.
struct alignas(128) Arrival {
    std::atomic<uint64_t> turn;  // the last one that it has come to; 0 at first
    int64_t bytes[2];            // that it shares in that turn, and in the one before
};

constexpr int SUMS_OVER = 2, SUMS_DIFFER = 3;  // what calls return beside 0, and 1 for no memory

extern "C" {

// One process's way to the others. Must agree with library_calls.py's SumsStruct.
struct Sums {
    char* memory;                    // an Arrival of each rank, then two buffers of each
    int64_t capacity, index, count;  // bytes of a buffer; this rank, and of how many
    uint64_t turn;                   // sums and gatherings so far
    int64_t is_over;  // nobody waits any longer: a rank has failed
};

// x = the sum of all ranks' x, of `num` numbers: type 0 float32, 1 bfloat16.
// Nonzero: SUMS_OVER or SUMS_DIFFER.
int fminfer_sum(Sums* s, void* x, int64_t num, int64_t type, int64_t num_threads);

}  // extern "C"
