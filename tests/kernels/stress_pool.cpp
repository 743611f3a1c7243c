// Regions of the pool: from several threads and processes, and with pieces that find no memory.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "pool.cpp"  // what it has for itself is tried, too
#include "stress.h"

namespace stress {

namespace {

// Each piece is computed once, no two at a time by the same thread.
void run_regions(int seed, int count) {
    Random random(seed);
    for (int i = 0; i < count; i++) {
        const int64_t threads = random.from(1, 5), pieces = random.from(0, 39);
        std::vector<int> done(pieces);
        std::vector<std::atomic<int>> busy(threads);
        for_pieces(threads, pieces, [&](int64_t piece, int thread) {
            check(thread < threads && busy[thread]++ == 0, "a thread has two pieces");
            done[piece]++;
            busy[thread]--;
        });
        for (int64_t p = 0; p < pieces; p++) check(done[p] == 1, "a piece was not done once");
        if (i % 50 == 0) usleep(300);  // the others fall asleep
    }
}

void run_in_child() {
    const pid_t child = fork();
    if (child == 0) {
        run_regions(4, 200);
        std::_Exit(0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    check(status == 0, "a child process cannot use the pool");
}

// Whoever computes the piece that finds no memory, the caller is told, and the next region is sound.
void run_without_memory() {
    for (int64_t i = 0; i < 200; i++) {
        const int64_t threads = 1 + i % 5, pieces = 1 + i % 17;
        bool is_told = false;
        try {
            for_pieces(threads, pieces, [&](int64_t piece, int) {
                if (piece == i % pieces) throw std::bad_alloc();
            });
        } catch (const std::bad_alloc&) {
            is_told = true;
        }
        check(is_told, "nobody is told that memory ran out");
        run_regions(int(i), 1);
    }
}

// Threads look for work ever shorter while other work takes the cores, and as long as ever after.
void adapt_spin() {
    constexpr int64_t passed = SIGHT_NS, some = passed / 8, hardly_any = passed / 100;
    int64_t spin = MOST_SPIN_NS;
    check(next_spin(spin, some, passed) < spin, "the first time in line does not shorten it");
    int looks = 0;
    for (; spin > LEAST_SPIN_NS; looks++) spin = next_spin(spin, some, passed);
    check(looks <= 4, "it is not short soon");
    check(next_spin(spin, passed, passed) == LEAST_SPIN_NS, "it is shorter than the least");
    for (looks = 0; spin < MOST_SPIN_NS; looks++) {
        const int64_t longer = next_spin(spin, hardly_any, passed);
        check(longer > spin, "it does not grow while the process is alone");
        spin = longer;
    }
    check(looks <= 12, "it is not long again soon");
    check(next_spin(spin, 0, passed) == MOST_SPIN_NS, "it is longer than the most");
    check(time_in_line("123456 7890123456789 42\n") == 7890123456789, "time in line");
    check(time_in_line("") == 0 && time_in_line("12") == 0, "time in line of nothing");
}

}  // namespace

void run_pool() {
    run_regions(1, 2000);
    std::thread other([] { run_regions(2, 500); });  // one of two callers works alone
    run_regions(3, 500);
    other.join();
    run_in_child();
    run_without_memory();
    adapt_spin();
}

}  // namespace stress
