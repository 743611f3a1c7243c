// Threads that compute the pieces of a region of work together; pool.cpp has them.
//
// Pieces are handed out one by one: a thread that the system puts aside holds only its own piece.
// Which thread computes a piece must not matter to what it gives.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>

namespace pool {

typedef void (*Call)(const void* work, int64_t piece, int thread);

// Calls call(work, piece, thread) for each piece of [0, pieces) and returns when all are done.
// `thread` is below num_threads, and no two calls have the same at a time. A piece without memory
// throws std::bad_alloc; then so does this, and some pieces may not be done.
void run(int64_t num_threads, int64_t pieces, Call call, const void* work);

}  // namespace pool

namespace {

// Calls work(piece, thread) for all pieces.
template <typename Work>
inline void for_pieces(int64_t num_threads, int64_t pieces, const Work& work) {
    const auto call = [](const void* work, int64_t piece, int thread) {
        (*static_cast<const Work*>(work))(piece, thread);
    };
    pool::run(num_threads, pieces, call, &work);
}

// Calls work(piece, end) for all pieces as well. Each thread goes through a stretch of neighbours,
// up to `end`, and then helps with the others': what neighbours read is read in its order.
template <typename Work>
inline void for_stretches(int64_t num_threads, int64_t pieces, const Work& work) {
    constexpr int64_t MOST = 64;
    struct alignas(64) Stretch {
        std::atomic<int64_t> next;
        int64_t end;
    };
    Stretch stretches[MOST];
    const int64_t num = num_threads < MOST ? num_threads : MOST;
    for (int64_t s = 0; s < num; s++) {
        stretches[s].next.store(pieces * s / num, std::memory_order_relaxed);
        stretches[s].end = pieces * (s + 1) / num;
    }
    for_pieces(num_threads, pieces, [&](int64_t, int thread) {
        for (int64_t s = thread;; s++) {  // there is one: as many calls as pieces take one each
            Stretch& stretch = stretches[s % num];
            if (stretch.next.load(std::memory_order_relaxed) >= stretch.end) continue;
            const int64_t piece = stretch.next.fetch_add(1, std::memory_order_relaxed);
            if (piece < stretch.end) return work(piece, stretch.end);
        }
    });
}

// Calls work(first, last) for parts of [0, num) with `least` items or more, a few for each thread.
template <typename Work>
inline void for_parts(int64_t num_threads, int64_t num, int64_t least, const Work& work) {
    const int64_t most = (num + least - 1) / least, some = num_threads > 1 ? 4 * num_threads : 1;
    const int64_t parts = most < some ? most : some;
    for_pieces(num_threads, parts, [&](int64_t part, int) {
        work(num * part / parts, num * (part + 1) / parts);
    });
}

// Returns whether memory ran out in a call from C, to which nothing is thrown.
template <typename Work>
inline int lacks_memory(const Work& work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace
