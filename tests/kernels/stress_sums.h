// Memory that the ranks of a stage share, as fminfer/compute/shards.py maps it.
#pragma once

#include <cstdlib>

#include "sums.h"

extern "C" {
int64_t fminfer_sums_bytes(int64_t count, int64_t capacity);
int fminfer_gather(Sums* s, const void* own, void* all, int64_t bytes);
}

namespace stress {

class SharedMemory {
   public:
    // `capacity` is a multiple of 64.
    SharedMemory(int64_t count, int64_t capacity) : count(count), capacity(capacity) {
        const int64_t size = fminfer_sums_bytes(count, capacity);
        memory = static_cast<char*>(std::aligned_alloc(128, (size + 127) / 128 * 128));
        std::memset(memory, 0, size);
    }
    ~SharedMemory() { std::free(memory); }
    SharedMemory(const SharedMemory&) = delete;

    Sums rank(int64_t index) const { return {memory, capacity, index, count, 0, 0}; }

   private:
    int64_t count, capacity;
    char* memory;
};

}  // namespace stress
