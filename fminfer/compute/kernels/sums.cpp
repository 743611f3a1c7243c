// Sums of tensors over the processes that share a stage's layers, in memory that all of them map.
//
// Each process copies its numbers into a buffer of its own, says that they are there, waits until
// all have said so, and adds all buffers in the order of the ranks. So each has the same bits,
// whoever came first. Each process has two buffers, and uses them in turn. Before it writes to one
// again, all others have come to the turn between, so they have read it.

#include "sums.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "pool.h"
#include "vectors.h"

namespace {

constexpr int SPINS = 2000, YIELDS = 20000;  // looks before a thread gives way, and then sleeps
constexpr int64_t LEAST = 1 << 14;           // numbers that are worth a thread of their own

// Waits until a rank has come to a turn. Other work may have its core: then it is let through.
int await_turn(const Sums* s, const Arrival& other, uint64_t turn, int64_t bytes) {
    for (int64_t looks = 0; other.turn.load(std::memory_order_acquire) < turn; looks++) {
        if (__atomic_load_n(&s->is_over, __ATOMIC_RELAXED)) return SUMS_OVER;
        if (looks < SPINS) {
#ifdef __x86_64__
            __builtin_ia32_pause();
#endif
        } else if (looks < YIELDS) {
            sched_yield();
        } else {
            const timespec pause = {0, 50000};
            nanosleep(&pause, nullptr);
        }
    }
    return other.bytes[turn % 2] == bytes ? 0 : SUMS_DIFFER;
}

char* buffer_of(const Sums* s, int64_t rank, uint64_t turn) {
    char* const first = s->memory + s->count * int64_t(sizeof(Arrival));
    return first + (2 * rank + int64_t(turn % 2)) * s->capacity;
}

// Gives all ranks what each has: `work` then reads their buffers. Nonzero: SUMS_OVER, SUMS_DIFFER.
template <typename Work>
int share(Sums* s, const void* own, int64_t bytes, const Work& work) {
    const uint64_t turn = ++s->turn;
    std::memcpy(buffer_of(s, s->index, turn), own, bytes);
    Arrival* const arrivals = reinterpret_cast<Arrival*>(s->memory);
    arrivals[s->index].bytes[turn % 2] = bytes;
    arrivals[s->index].turn.store(turn, std::memory_order_release);
    for (int64_t rank = 0; rank < s->count; rank++)
        if (const int failed = await_turn(s, arrivals[rank], turn, bytes)) return failed;
    work(turn);
    return 0;
}

template <typename T>
int sum(Sums* s, T* x, int64_t num, int64_t num_threads) {
    const int64_t most = s->capacity / int64_t(sizeof(T));
    for (int64_t first = 0; first < num; first += most) {
        const int64_t size = std::min(most, num - first);
        T* const to = x + first;
        const auto add = [&](uint64_t turn) {
            for_parts(num_threads, (size + LANES - 1) / LANES, LEAST / LANES, [&](int64_t from, int64_t end) {
                for (int64_t i = from * LANES; i < end * LANES; i += LANES) {
                    const int64_t left = size - i;
                    const auto of = [&](int64_t rank) {
                        const T* const own = reinterpret_cast<T*>(buffer_of(s, rank, turn)) + i;
                        return left < LANES ? load_some(own, int(left)) : load(own);
                    };
                    Vec total = of(0);
                    for (int64_t rank = 1; rank < s->count; rank++) total += of(rank);
                    left < LANES ? store_some(to + i, total, int(left)) : store(to + i, total);
                }
            });
        };
        if (const int failed = share(s, to, size * int64_t(sizeof(T)), add)) return failed;
    }
    return 0;
}

}  // namespace

extern "C" {

int64_t fminfer_sums_bytes(int64_t count, int64_t capacity) {
    return count * (int64_t(sizeof(Arrival)) + 2 * capacity);
}

int fminfer_sum(Sums* s, void* x, int64_t num, int64_t type, int64_t num_threads) {
    return type == 0 ? sum(s, static_cast<float*>(x), num, num_threads)
                     : sum(s, static_cast<uint16_t*>(x), num, num_threads);
}

int fminfer_gather(Sums* s, const void* own, void* all, int64_t bytes) {
    for (int64_t first = 0; first < bytes; first += s->capacity) {
        const int64_t size = std::min(s->capacity, bytes - first);
        const auto copy = [&](uint64_t turn) {
            for (int64_t rank = 0; rank < s->count; rank++)
                std::memcpy(static_cast<char*>(all) + rank * bytes + first, buffer_of(s, rank, turn), size);
        };
        if (const int failed = share(s, static_cast<const char*>(own) + first, size, copy)) return failed;
    }
    return 0;
}

}  // extern "C"
