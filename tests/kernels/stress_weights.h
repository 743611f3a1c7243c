// Packed weights of every type: random floats, or blocks of random bytes with scales of their own.
#pragma once

#include <algorithm>

#include "stress.h"

extern "C" {
int64_t fminfer_panel();
int64_t fminfer_panel_bytes(int64_t kind, int64_t inputs, int64_t block);
void fminfer_pack_experts(const uint32_t* weight, int64_t experts, int64_t parts, int64_t outputs,
                          int64_t units, uint32_t* packed, int64_t num_threads);
void fminfer_pack_blocks(int64_t kind, const uint8_t* rows, int64_t items, int64_t parts,
                         int64_t outputs, int64_t inputs, int64_t block, uint32_t* packed,
                         int64_t num_threads);
void fminfer_unpack_rows(int64_t kind, const uint32_t* packed, int64_t inputs, int64_t block,
                         const int64_t* ids, int64_t num, float* out, int64_t num_threads);
}

namespace stress {

// A kind of blocks, as forms.h numbers it. test_sanitizers.py writes those of kinds.h.
struct Kind {
    int64_t number, inputs, bytes;  // of a block; inputs 0: the caller's choice
    int64_t bits;                   // of a number, which come beside `bytes`, where inputs are 0
    std::vector<int64_t> halves;    // where its float16 numbers are
    float scale;                    // how large these are here
    int64_t first;                  // bytes of a scale that is first: 4 of float32, 1 of an exponent
};
inline const std::vector<Kind> KINDS = {
#include "kinds.h"
};

inline const Kind* find_kind(int64_t type) {
    for (const Kind& kind : KINDS)
        if (kind.number == type) return &kind;
    return nullptr;
}

// A type whose rows may have so many inputs, which is one of the floats where no kind fits.
inline int64_t random_type(Random& random, int64_t inputs, int64_t floats) {
    const Kind& kind = KINDS[random.from(0, KINDS.size() - 1)];
    return inputs % (kind.inputs ? kind.inputs : 32) == 0 ? kind.number : floats;
}

// A weight, (items, parts * outputs, inputs). What is packed has its very size.
class Weight {
   public:
    Weight(Random& random, int64_t type, int64_t items, int64_t parts, int64_t outputs,
           int64_t inputs)
        : type(type), items(items), parts(parts), outputs(outputs), inputs(inputs) {
        const int64_t panel = fminfer_panel();
        panels = (outputs + panel - 1) / panel;
        if (const Kind* kind = find_kind(type))
            pack_blocks(random, *kind);
        else
            pack_floats(random);
    }

    Packed packed() const { return {units.data(), outputs, type, block}; }
    double at(int64_t row, int64_t input) const { return numbers[row * inputs + input]; }

    int64_t type, items, parts, outputs, inputs, block = 0;

   private:
    void pack_floats(Random& random) {
        const Numbers weight(random, items * parts * outputs * inputs, type);
        const int64_t num = type == FLOAT32 ? inputs : inputs / 2;
        units.assign(items * panels * parts * fminfer_panel() * num, ~0u);
        fminfer_pack_experts(static_cast<const uint32_t*>(weight.data()), items, parts, outputs, num,
                             units.data(), MANY);
        for (int64_t i = 0; i < weight.count; i++) numbers.push_back(weight.at(i));
    }

    void pack_blocks(Random& random, const Kind& kind) {
        block = kind.inputs ? kind.inputs : 32;
        if (kind.inputs == 0 && inputs % 128 == 0 && random.is_so()) block = 128;
        if (kind.inputs == 0 && random.is_so()) block = inputs;
        const int64_t size = kind.bytes + block * kind.bits / 8;
        const int64_t rows = items * parts * outputs, blocks = inputs / block;
        std::vector<uint8_t> bytes(rows * blocks * size);
        for (uint8_t& each : bytes) each = uint8_t(random());
        for (int64_t b = 0; b < rows * blocks; b++)
            for (int64_t place : kind.halves) {
                const uint16_t half = to_float16(random.number() * kind.scale).bits;
                std::memcpy(&bytes[b * size + place], &half, sizeof half);
            }
        for (int64_t b = 0; kind.first == 4 && b < rows * blocks; b++) {
            const float scale = random.number() * kind.scale;
            std::memcpy(&bytes[b * size], &scale, sizeof scale);
        }
        for (int64_t b = 0; kind.first == 1 && b < rows * blocks; b++)
            bytes[b * size] = uint8_t(124 + random.from(0, 2));
        const int64_t panel_bytes = fminfer_panel_bytes(kind.number, inputs, block);
        units.assign(items * panels * parts * panel_bytes / 4, ~0u);
        fminfer_pack_blocks(kind.number, bytes.data(), items, parts, outputs, inputs, block,
                            units.data(), MANY);
        read_again();
    }

    // Sees each row by what is packed; tests in Python say whether that is right.
    void read_again() {
        const int64_t panel = fminfer_panel();
        std::vector<int64_t> ids;
        for (int64_t row = 0; row < items * parts * outputs; row++) {
            const int64_t item = row / outputs / parts, part = row / outputs % parts;
            const int64_t place = (item * panels + row % outputs / panel) * parts + part;
            ids.push_back(place * panel + row % outputs % panel);
        }
        std::vector<float> alone(ids.size() * inputs, NAN);
        numbers = alone;
        for (int64_t num_threads : {MANY, FEW})
            fminfer_unpack_rows(type, units.data(), inputs, block, ids.data(), ids.size(),
                                num_threads == FEW ? alone.data() : numbers.data(), num_threads);
        check(alone == numbers, "threads change rows, or some are nan");
    }

    int64_t panels;
    std::vector<uint32_t> units;
    std::vector<float> numbers;
};

}  // namespace stress
