// The threads of the process, which sleep while there is no work.
//
// A thread that finds no work looks for more for a little while, then sleeps until it is called (a
// futex, Drepper 2011). To look costs a core that the thread it waits for may need: as soon as the
// system takes cores away from this process, threads look for a shorter time, and for longer again
// when it has its cores for itself. A core that sleeps is one to which Linux moves a waiting thread.
#include "pool.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

constexpr int64_t LEAST_SPIN_NS = 2'000, MOST_SPIN_NS = 100'000;
constexpr int64_t SIGHT_NS = 4'000'000;  // between two looks at how long a thread stood in line
constexpr int MOST_THREADS = 1024;

inline int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

inline void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// How long threads look for work before they sleep; all of them learn what one sees.
std::atomic<int64_t> spin_ns{MOST_SPIN_NS};

// How long to look from now on, if a thread stood in line for a core for so much of the time that
// passed; a sixteenth of it is other work.
constexpr int64_t next_spin(int64_t spin, int64_t in_line, int64_t passed) {
    const int64_t next = 16 * in_line > passed ? spin / 4 : spin + spin / 2;
    return next < LEAST_SPIN_NS ? LEAST_SPIN_NS : next < MOST_SPIN_NS ? next : MOST_SPIN_NS;
}

// What a schedstat says: "nanoseconds computing, nanoseconds in line, slices"; 0: nothing.
inline int64_t time_in_line(const char* schedstat) {
    const char* second = std::strchr(schedstat, ' ');
    return second == nullptr ? 0 : std::strtoll(second, nullptr, 10);
}

// How long one thread stood in line for a core, as Linux counts it.
class Sight {
   public:
    // Looks now and then.
    void look(int64_t now) {
        if (now - seen_ns < SIGHT_NS) return;
        const int64_t delay = read_delay(), spin = spin_ns.load(std::memory_order_relaxed);
        if (seen_ns != 0)
            spin_ns.store(next_spin(spin, delay - delay_ns, now - seen_ns),
                          std::memory_order_relaxed);
        delay_ns = delay;
        seen_ns = now;
    }
    ~Sight() {
        if (file >= 0) close(file);
    }

   private:
    // 0 where Linux does not tell.
    int64_t read_delay() {
        if (file == NOT_OPEN) file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
        char text[96];
        const ssize_t size = file < 0 ? 0 : pread(file, text, sizeof text - 1, 0);
        if (size <= 0) return 0;
        text[size] = 0;
        return time_in_line(text);
    }

    static constexpr int NOT_OPEN = -2;
    int file = NOT_OPEN;
    int64_t seen_ns = 0, delay_ns = 0;
};
thread_local Sight sight;

// Looks for a while whether something is so; returns whether it is.
template <typename Is>
inline bool spin_until(Is is) {
    for (int i = 0; i < 16; i++) {
        if (is()) return true;
        rest();
    }
    const int64_t start = now_ns(), limit = spin_ns.load(std::memory_order_relaxed);
    for (;;) {
        for (int i = 0; i < 16; i++) {
            if (is()) return true;
            rest();
        }
        const int64_t now = now_ns();
        if (now - start < limit) continue;
        sight.look(now);
        return is();
    }
}

// A number that threads can sleep on until it changes.
class Bell {
   public:
    // Sleeps until is() after a ring; it must become so before the ring.
    template <typename Is>
    void wait_until(Is is) {
        while (!spin_until(is)) {
            const uint32_t seen = rung.load();
            num_asleep.fetch_add(1);
            if (!is()) syscall(SYS_futex, &rung, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
            num_asleep.fetch_sub(1);
        }
    }

    void ring() {
        rung.fetch_add(1);
        if (num_asleep.load() > 0)
            syscall(SYS_futex, &rung, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

   private:
    alignas(64) std::atomic<uint32_t> rung{0};
    std::atomic<int> num_asleep{0};
};

// The cores that any thread of this process may use. OpenMP, where it is told to bind its threads,
// has bound the one that starts ours to a single core.
cpu_set_t cores_of_process() {
    cpu_set_t all, some;
    CPU_ZERO(&all);
    DIR* const threads = opendir("/proc/self/task");
    if (threads == nullptr) return all;
    while (const dirent* thread = readdir(threads))
        if (sched_getaffinity(std::atoi(thread->d_name), sizeof some, &some) == 0)
            CPU_OR(&all, &all, &some);
    closedir(threads);
    return all;
}

// `ticket` holds, in its halves, how many threads may take pieces and how many pieces are left. A
// thread that has taken one may read what the region is: it lasts until that piece is done.
class Pool {
   public:
    // `most`: threads that are in use, of which this region may have fewer. Returns whether all
    // pieces had the memory that they asked for.
    bool run(int64_t most, int64_t num_threads, int64_t pieces, pool::Call call_,
             const void* work_) {
        start_threads(int(num_threads));
        if (in_use.load() != most && in_use.exchange(int(most)) < most) rest_bell.ring();
        call = call_;
        work = work_;
        num_pieces = pieces;
        undone.store(pieces, std::memory_order_relaxed);
        ticket.store(uint64_t(num_threads) << 32 | uint64_t(pieces));
        work_bell.ring();
        while (take_piece(0)) {
        }
        done_bell.wait_until([&] { return undone.load(std::memory_order_acquire) == 0; });
        sight.look(now_ns());
        return !lacked_memory.exchange(false, std::memory_order_relaxed);
    }

    bool try_own() { return !is_owned.exchange(true, std::memory_order_acquire); }
    void disown() { is_owned.store(false, std::memory_order_release); }

   private:
    static bool has_work(uint64_t ticket, int thread) {
        return uint32_t(ticket) != 0 && uint64_t(thread) < ticket >> 32;
    }

    bool take_piece(int thread) {
        uint64_t seen = ticket.load(std::memory_order_acquire);
        do {
            if (!has_work(seen, thread)) return false;
        } while (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel,
                                               std::memory_order_acquire));
        try {
            call(work, num_pieces - int64_t(uint32_t(seen)), thread);
        } catch (const std::bad_alloc&) {  // the caller is told
            lacked_memory.store(true, std::memory_order_relaxed);
        }
        if (undone.fetch_sub(1, std::memory_order_acq_rel) == 1 && thread != 0) done_bell.ring();
        return true;
    }

    void serve(int thread) {
        for (;;) {
            while (take_piece(thread)) {
            }
            const auto may_rest = [&] { return thread >= in_use.load(); };
            work_bell.wait_until([&] { return has_work(ticket.load(), thread) || may_rest(); });
            // A region would wake it for nothing.
            if (may_rest()) rest_bell.wait_until([&] { return !may_rest(); });
        }
    }

    struct Place {
        Pool* pool;
        int thread;
        cpu_set_t cores;
    };

    // The system may refuse a thread: the others then do its work.
    void start_threads(int wanted) {
        if (wanted <= num_started) return;
        sigset_t all, before;
        sigfillset(&all);  // Python's own thread sees to signals
        pthread_sigmask(SIG_SETMASK, &all, &before);
        const cpu_set_t cores = cores_of_process();
        for (; num_started < wanted; num_started++) {
            pthread_t thread;
            Place* place = new (std::nothrow) Place{this, num_started, cores};
            const auto begin = [](void* given) -> void* {
                const Place place = *static_cast<Place*>(given);
                delete static_cast<Place*>(given);
                sched_setaffinity(0, sizeof place.cores, &place.cores);  // of none: it stays
                place.pool->serve(place.thread);
                return nullptr;
            };
            if (place == nullptr || pthread_create(&thread, nullptr, begin, place) != 0) {
                delete place;
                break;
            }
            pthread_detach(thread);
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    alignas(64) std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<int64_t> undone{0};
    alignas(64) pool::Call call = nullptr;
    const void* work = nullptr;
    int64_t num_pieces = 0;
    Bell work_bell, rest_bell, done_bell;
    std::atomic<int> in_use{1};  // threads from this one on rest
    std::atomic<bool> is_owned{false}, lacked_memory{false};
    int num_started = 1;  // the caller is one
};

// Never ended: its threads are asleep when the process ends. A child process begins with another.
std::atomic<Pool*> current{nullptr};

Pool* pool_of_process() {
    Pool* found = current.load(std::memory_order_acquire);
    if (found != nullptr) return found;
    Pool* made = new (std::nothrow) Pool;  // without one the caller works alone
    if (made == nullptr) return nullptr;
    if (!current.compare_exchange_strong(found, made)) {
        delete made;
        return found;
    }
    static std::atomic<bool> is_told{false};
    if (!is_told.exchange(true)) pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
    return made;
}

}  // namespace

namespace pool {

void run(int64_t num_threads, int64_t pieces, Call call, const void* work) {
    const int64_t most = num_threads < MOST_THREADS ? num_threads : MOST_THREADS;
    num_threads = most < pieces ? most : pieces;
    Pool* pool = num_threads > 1 && pieces <= int64_t(UINT32_MAX) ? pool_of_process() : nullptr;
    if (pool != nullptr && pool->try_own()) {
        const bool is_done = pool->run(most, num_threads, pieces, call, work);
        pool->disown();
        if (!is_done) throw std::bad_alloc();
        return;
    }
    // One thread, or one beside another region of this process.
    for (int64_t piece = 0; piece < pieces; piece++) call(work, piece, 0);
}

}  // namespace pool
