// Runs all kernels over random shapes, as a sanitizer wants to see them. A part's name as argument
// runs that part alone.
#include "stress.h"

#include <new>

bool stress::has_memory = true;
std::atomic<int64_t> stress::num_refused{0};

void* operator new(size_t size, const std::nothrow_t&) noexcept {
    if (stress::has_memory) return std::malloc(size);
    stress::num_refused++;
    return nullptr;
}
void* operator new(size_t size) {
    void* const found = operator new(size, std::nothrow);
    if (found == nullptr) throw std::bad_alloc();
    return found;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

int main(int num, char** words) {
    const struct {
        const char* name;
        void (*run)();
    } parts[] = {{"pool", stress::run_pool},
                 {"products", stress::run_products},
                 {"experts", stress::run_experts},
                 {"attention", stress::run_attention},
                 {"layers", stress::run_layers},
                 {"sums", stress::run_sums},
                 {"logits", stress::run_logits}};
    for (const auto& part : parts)
        if (num < 2 || std::strcmp(words[1], part.name) == 0) part.run();
    return 0;
}
