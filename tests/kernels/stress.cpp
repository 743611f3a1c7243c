// Runs regions of the pool, products, experts and heads over random shapes, as a sanitizer wants to see them.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "calls.h"
#include "pool.h"

extern "C" {
int64_t fminfer_panel();
void fminfer_pack(const uint32_t* weight, int64_t outputs, int64_t units, uint32_t* packed,
                  int64_t num_threads);
void fminfer_pack_experts(const uint32_t* weight, int64_t experts, int64_t parts, int64_t outputs,
                          int64_t units, uint32_t* packed, int64_t num_threads);
void fminfer_mix(const Mixture* a);
int64_t fminfer_head_space(int64_t rows, int64_t inputs, int64_t num_threads);
void fminfer_head(const Head* a);
}

namespace {

void check(bool is_so, const char* what) {
    if (is_so) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

// Each piece is computed once, no two at a time by the same thread.
void run_regions(int seed, int count) {
    std::mt19937 random(seed);
    for (int i = 0; i < count; i++) {
        const int64_t threads = 1 + random() % 5, pieces = random() % 40;
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

void fill(std::mt19937& random, std::vector<uint8_t>& to, bool is_half) {
    if (is_half)
        for (size_t i = 0; i < to.size() / 2; i++)
            reinterpret_cast<uint16_t*>(to.data())[i] = 0x3F00 + random() % 256;
    else
        for (size_t i = 0; i < to.size() / 4; i++)
            reinterpret_cast<float*>(to.data())[i] = float(random() % 100) / 50 - 1;
}

void multiply(std::mt19937& random, bool has_halves, bool takes_halves) {
    const int64_t rows = 1 + random() % 70, outputs = 1 + random() % 150;
    const int64_t inputs = 2 * (1 + random() % 60), of_weight = has_halves ? 2 : 4;
    const int64_t panels = (outputs + fminfer_panel() - 1) / fminfer_panel();
    // Of their very size, so that a read behind the end is seen.
    std::vector<uint8_t> weight(outputs * inputs * of_weight);
    std::vector<uint8_t> x(rows * inputs * (takes_halves ? 2 : 4));
    std::vector<uint8_t> out(rows * outputs * (takes_halves ? 2 : 4));
    std::vector<uint32_t> packed(panels * fminfer_panel() * inputs * of_weight / 4);
    std::vector<float> bias(panels * fminfer_panel());
    fill(random, weight, has_halves);
    fill(random, x, takes_halves);
    fminfer_pack(reinterpret_cast<uint32_t*>(weight.data()), outputs, inputs * of_weight / 4,
                 packed.data(), 3);
    const Product product = {x.data(), packed.data(), bias.data(), out.data(), rows, inputs,
                             outputs, takes_halves, has_halves, 3};
    fminfer_multiply(&product);
    std::vector<uint8_t> again(out.size());
    Product alone = product;
    alone.out = again.data();
    alone.num_threads = 1;
    fminfer_multiply(&alone);
    check(out == again, "threads change a product");
}

void mix(std::mt19937& random, bool has_halves, bool takes_halves) {
    const int64_t tokens = random() % 60, experts = 1 + random() % 6, top_k = 1 + random() % experts;
    const int64_t hidden = 2 * (1 + random() % 70), size = 2 * (1 + random() % 70);
    const int64_t parts = 1 + random() % 2, panel = fminfer_panel(), of_weight = has_halves ? 2 : 4;
    const auto pack = [&](int64_t parts, int64_t outputs, int64_t inputs) {
        std::vector<uint8_t> weight(experts * parts * outputs * inputs * of_weight);
        fill(random, weight, has_halves);
        const int64_t units = inputs * of_weight / 4, panels = (outputs + panel - 1) / panel;
        std::vector<uint32_t> packed(experts * parts * panels * panel * units);
        fminfer_pack_experts(reinterpret_cast<uint32_t*>(weight.data()), experts, parts, outputs,
                             units, packed.data(), 3);
        return packed;
    };
    const std::vector<uint32_t> up = pack(parts, size, hidden), down = pack(1, hidden, size);
    std::vector<uint8_t> x(tokens * hidden * (takes_halves ? 2 : 4)), out(x.size()), again(x.size());
    std::vector<int64_t> chosen(tokens * top_k);
    std::vector<float> shares(tokens * top_k, 0.3f), space(tokens * top_k * (hidden + size));
    fill(random, x, takes_halves);
    for (int64_t i = 0; i < tokens * top_k; i++) chosen[i] = (i + random() % 2) % experts;
    Mixture a = {x.data(), up.data(), down.data(), chosen.data(), shares.data(), out.data(),
                 space.data(), tokens, top_k, experts, hidden, size, parts == 2,
                 int64_t(random() % 3), takes_halves, has_halves, 3};
    fminfer_mix(&a);
    a.out = again.data();
    a.num_threads = 1;
    fminfer_mix(&a);
    check(out == again, "threads change a mixture");
}

void find_logits(std::mt19937& random, bool has_halves, bool takes_halves) {
    const int64_t rows = 1 + random() % 40, outputs = 1 + random() % 300;
    const int64_t inputs = 1 + random() % 300;
    std::vector<uint8_t> weight(outputs * inputs * (has_halves ? 2 : 4));
    std::vector<uint8_t> x(rows * inputs * (takes_halves ? 2 : 4));
    std::vector<float> bias(outputs, 0.5f), out(rows * outputs), again(rows * outputs);
    fill(random, weight, has_halves);
    fill(random, x, takes_halves);
    for (int64_t num_threads : {3, 1}) {
        std::vector<uint8_t> space(fminfer_head_space(rows, inputs, num_threads));
        float* to = (num_threads > 1 ? out : again).data();
        const Head head = {x.data(), weight.data(), bias.data(), to, space.data(), rows, inputs,
                           outputs, takes_halves, has_halves, num_threads};
        fminfer_head(&head);
    }
    check(out == again, "threads change logits");
}

}  // namespace

int main() {
    run_regions(1, 2000);
    std::thread other([] { run_regions(2, 500); });  // one of two callers works alone
    run_regions(3, 500);
    other.join();
    const pid_t child = fork();
    if (child == 0) {
        run_regions(4, 200);
        std::_Exit(0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    check(status == 0, "a child process cannot use the pool");
    std::mt19937 random(5);
    for (int i = 0; i < 60; i++) {
        multiply(random, false, false);
        multiply(random, true, false);
        multiply(random, true, true);
        mix(random, false, false);
        mix(random, true, false);
        mix(random, true, true);
        for (int types = 0; types < 4; types++) find_logits(random, types / 2, types % 2);
    }
    return 0;
}
