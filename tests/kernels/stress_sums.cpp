// Sums over ranks, which are threads here: each adds the parts in the order of ranks.
#include <thread>

#include "stress.h"
#include "stress_sums.h"

namespace stress {

namespace {

// The sum of numbers of all ranks, as rank 0 of a type rounds it.
float sum_of(const std::vector<Numbers>& given, int64_t i) {
    float total = given[0].at(i);
    for (size_t rank = 1; rank < given.size(); rank++) total += given[rank].at(i);
    return total;
}

void run_ranks(int seed, int64_t type) {
    Random random(seed);
    const int64_t count = random.from(1, 4), capacity = 64 * random.from(1, 9);
    const SharedMemory memory(count, capacity);
    std::vector<std::vector<Numbers>> given;  // of each turn, each rank's
    for (int turn = 0; turn < 20; turn++) {
        const int64_t num = random.from(0, 3 * capacity / 4);
        given.emplace_back();
        for (int64_t rank = 0; rank < count; rank++) given.back().emplace_back(random, num, type);
    }
    std::vector<std::thread> ranks;
    for (int64_t rank = 0; rank < count; rank++)
        ranks.emplace_back([&, rank] {
            Sums sums = memory.rank(rank);
            for (const auto& turn : given) {
                Numbers own = turn[rank];
                std::vector<uint8_t> all(turn.size() * own.count);
                check(fminfer_sum(&sums, own.data(), own.count, type, rank % 2 ? MANY : FEW) == 0, "a sum failed");
                for (int64_t i = 0; i < own.count; i++)
                    check(is_near(own.at(i), sum_of(turn, i), type), "a sum is wrong");
                const std::vector<uint8_t> mark(own.count, uint8_t(rank));
                check(fminfer_gather(&sums, mark.data(), all.data(), own.count) == 0, "a share failed");
                for (size_t i = 0; i < all.size(); i++)
                    check(all[i] == i / own.count, "a rank has what another one shares");
            }
        });
    for (std::thread& rank : ranks) rank.join();
}

}  // namespace

void run_sums() {
    for (int seed = 0; seed < 12; seed++) run_ranks(seed, seed % 2 ? FLOAT32 : BFLOAT16);
    const SharedMemory memory(2, 64);
    Sums first = memory.rank(0), second = memory.rank(1);
    float number = 1;
    first.is_over = 1;
    check(fminfer_sum(&first, &number, 1, 0, FEW) == SUMS_OVER, "a rank waits for one that failed");
    float numbers[2] = {1, 1};
    check(fminfer_sum(&second, numbers, 2, 0, FEW) == SUMS_DIFFER, "ranks sum other sizes");
}

}  // namespace stress
