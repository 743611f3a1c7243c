// What is compiled for each form of quantized weights: products, packing, and reading rows again.
#include "blocks.h"

#include <cstring>

#include "forms.h"

namespace {

constexpr int64_t AHEAD_UNITS = 1536;  // to what is fetched while a few rows go through

// One step of the 8 neighbours that are number `eight` of a chunk, as Arithmetic, Floats or Pairs
// (panels.h), multiplies it.
template <typename Values, typename Arithmetic>
inline UWide step_at(const uint32_t* chunk, int v, int64_t eight, int step) {
    if constexpr (Arithmetic::INPUTS == 1)
        return (UWide)Values::at(chunk, v, eight, step);
    else
        return (UWide)Values::pair(chunk, v, eight, step);
}

// Goes through the runs [first, last) of a panel: use(run, scales, run in its block, its chunks).
template <typename Values, typename Scales, typename Number, typename Use>
inline void for_runs(const blocks::Way<Number>& way, const uint32_t* panel, int64_t first,
                     int64_t last, const Use& use) {
    const int64_t chunks = way.block / Values::CHUNK;
    const int64_t size = Scales::UNITS + chunks * Values::UNITS * PANEL;
    const int64_t in_run = way.run / Values::CHUNK, runs = (chunks + in_run - 1) / in_run;
    int64_t at = first % runs;
    const uint32_t* scales = panel + first / runs * size;
    for (int64_t r = first; r < last; r++, at++) {
        if (at == runs) at = 0, scales += size;
        const uint32_t* const chunk = scales + Scales::UNITS + at * in_run * Values::UNITS * PANEL;
        use(r, scales, at, chunk, std::min(in_run, chunks - at * in_run));
    }
}

// sums, (R, PANEL), += of each row a run's sums, scaled.
template <bool HAS_OFFSET, int R>
inline void add_scaled(float* sums, const Wide (*sum)[VECTORS], const Wide* scale,
                       const Wide* offset, const float* added, int64_t step) {
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            float* const to = sums + r * PANEL + v * WIDTH;
            Wide whole = wide_at(to) + sum[r][v] * scale[v];
            if constexpr (HAS_OFFSET) whole += offset[v] * added[r * step];
            put_wide(to, whole);
        }
}

template <typename Values, typename Scales, typename Arithmetic, int R>
void add_few(const blocks::Way<typename Arithmetic::Number>& way,
             const typename Arithmetic::Number* x, const uint32_t* panel, float* sums) {
    constexpr int64_t units = Values::UNITS * PANEL;
    const int64_t runs = way.runs();
    for_runs<Values, Scales>(way, panel, 0, runs, [&](int64_t r, const uint32_t* scales, int64_t at,
                                                      const uint32_t* chunk, int64_t num) {
        Wide sum[R][VECTORS] = {}, scale[VECTORS], offset[VECTORS];
        for (int64_t c = 0; c < num; c++, chunk += units) {
            for (int64_t n = 0; n < units; n += LINE)
                __builtin_prefetch(chunk + AHEAD_UNITS + n, 0, 2);
            for (int64_t eight = 0; eight < Values::CHUNK / 8; eight++, x += 8)
                UNROLLED for (int i = 0; i < 8; i += Arithmetic::INPUTS) {
                    UWide weight[VECTORS];
                    UNROLLED for (int v = 0; v < VECTORS; v++)
                        weight[v] = step_at<Values, Arithmetic>(chunk, v, eight,
                                                                i / Arithmetic::INPUTS);
                    Arithmetic::template add_vectors<R>(sum, x + i, way.inputs, weight);
                }
        }
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            scale[v] = Scales::scale(scales, at, v * WIDTH);
            offset[v] = Scales::offset(scales, at, v * WIDTH);
        }
        add_scaled<Scales::HAS_OFFSET, R>(sums, sum, scale, offset, way.added + r, runs);
    });
}

template <typename Values, typename Scales, typename Arithmetic>
void unpack(const blocks::Way<typename Arithmetic::Number>& way, const uint32_t* panel,
            const blocks::Unpacked& to) {
    constexpr int STEPS = 8 / Arithmetic::INPUTS;
    float* scale = to.scales;
    uint32_t* units = to.units;
    for_runs<Values, Scales>(way, panel, to.first, to.first + to.num,
                             [&](int64_t, const uint32_t* scales, int64_t at,
                                 const uint32_t* chunk, int64_t num) {
        for (int v = 0; v < VECTORS; v++) {
            put_wide(scale + v * WIDTH, Scales::scale(scales, at, v * WIDTH));
            put_wide(scale + PANEL + v * WIDTH, Scales::offset(scales, at, v * WIDTH));
        }
        scale += 2 * PANEL;
        for (int64_t c = 0; c < num; c++, chunk += Values::UNITS * PANEL)
            for (int64_t eight = 0; eight < Values::CHUNK / 8; eight++, units += STEPS * PANEL)
                UNROLLED for (int i = 0; i < STEPS; i++)
                    UNROLLED for (int v = 0; v < VECTORS; v++)
                        put_bits(units + i * PANEL + v * WIDTH,
                                 step_at<Values, Arithmetic>(chunk, v, eight, i));
    });
}

template <typename Arithmetic, bool HAS_OFFSET, int R>
void add_unpacked(const blocks::Way<typename Arithmetic::Number>& way,
                  const blocks::Unpacked& part, const typename Arithmetic::Number* x,
                  const uint32_t* next, int64_t lines, float* sums) {
    const uint32_t* units = part.units;
    const int64_t runs = way.runs();
    for (int64_t r = 0; r < part.num; r++) {
        const int64_t from = lines * r / part.num, to = lines * (r + 1) / part.num;
        for (int64_t n = from; n < to; n++) __builtin_prefetch(next + n * LINE, 0, 2);
        const int64_t start = blocks::start_of(part.first + r, way.block, way.run);
        const int64_t end = std::min(start + way.run, (start / way.block + 1) * way.block);
        Wide sum[R][VECTORS] = {}, scale[VECTORS], offset[VECTORS];
        for (int64_t i = start; i < end; i += Arithmetic::INPUTS, units += PANEL)
            Arithmetic::template add<R>(sum, x + i, way.inputs, units);
        const float* const scales = part.scales + 2 * r * PANEL;
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            scale[v] = wide_at(scales + v * WIDTH);
            offset[v] = wide_at(scales + PANEL + v * WIDTH);
        }
        add_scaled<HAS_OFFSET, R>(sums, sum, scale, offset, way.added + part.first + r, runs);
    }
}

// Forms that differ only in files share this code.
template <typename Values, typename Scales, typename Arithmetic>
const blocks::Code<typename Arithmetic::Number> CODE = {
    Values::CHUNK,
    Values::CHUNK / Arithmetic::INPUTS,
    Scales::UNITS,
    Values::UNITS * PANEL,
    Scales::HAS_OFFSET,
    Scales::IS_OF_BLOCK,
    Values::IS_FAST,
    {nullptr, add_few<Values, Scales, Arithmetic, 1>, add_few<Values, Scales, Arithmetic, 2>,
     add_few<Values, Scales, Arithmetic, 3>, add_few<Values, Scales, Arithmetic, 4>,
     add_few<Values, Scales, Arithmetic, 5>, add_few<Values, Scales, Arithmetic, MOST_ROWS>},
    unpack<Values, Scales, Arithmetic>,
    {nullptr, add_unpacked<Arithmetic, Scales::HAS_OFFSET, 1>,
     add_unpacked<Arithmetic, Scales::HAS_OFFSET, 2>,
     add_unpacked<Arithmetic, Scales::HAS_OFFSET, 3>,
     add_unpacked<Arithmetic, Scales::HAS_OFFSET, 4>,
     add_unpacked<Arithmetic, Scales::HAS_OFFSET, 5>,
     add_unpacked<Arithmetic, Scales::HAS_OFFSET, MOST_ROWS>},
};

template <typename Arithmetic>
const blocks::Code<typename Arithmetic::Number>* code_of(int64_t kind) {
    const blocks::Code<typename Arithmetic::Number>* found = nullptr;
    with_form(kind, [&](auto form) {
        typedef decltype(form) Form;
        found = &CODE<typename Form::Values, typename Form::Scales, Arithmetic>;
    });
    return found;
}

// Up to 16 outputs' units of one chunk, which a file has as they are.
template <typename Form>
void put_units(const uint8_t* const* blocks, int64_t at, int64_t outputs, uint32_t* chunk,
               int lane) {
    UVec square[LANES] = {};
    for (int64_t o = 0; o < outputs; o++) std::memcpy(square + o, blocks[o] + at, Form::UNITS * 4);
    transpose(square);
    Form::put_units(square, chunk, lane);
}

// Packs up to LANES outputs, whose rows are `step` bytes apart, into lanes of a panel.
template <typename Form>
void pack_lanes(const uint8_t* rows, int64_t step, int64_t outputs, int64_t inputs, int64_t block,
                uint32_t* panel, int lane) {
    typedef typename Form::Scales Scales;
    const int64_t chunks = block / Form::CHUNK;
    for (int64_t b = 0; b < inputs / block; b++) {
        const uint8_t* blocks[LANES] = {};
        for (int64_t o = 0; o < outputs; o++) {
            blocks[o] = rows + o * step + b * Form::bytes(block);
            Scales::put(blocks[o], panel, lane + o);
        }
        panel += Scales::UNITS;
        for (int64_t c = 0; c < chunks; c++, panel += Form::UNITS * PANEL) {
            if constexpr (Form::HAS_UNITS) {
                put_units<Form>(blocks, Form::UNITS_AT + c * Form::UNITS * 4, outputs, panel, lane);
                continue;
            }
            for (int64_t o = 0; o < outputs; o++) {
                uint8_t numbers[Form::CHUNK];
                Form::read(blocks[o], c, numbers);
                Form::put(numbers, panel, lane + o);
            }
        }
    }
}

// One output of a panel, as floats.
template <typename Form>
void unpack_row(const uint32_t* panel, int lane, int64_t inputs, int64_t block, float* out) {
    typedef typename Form::Scales Scales;
    const int64_t chunks = block / Form::CHUNK;
    const int vector = lane / WIDTH, first = vector * WIDTH, own = lane % WIDTH;
    for (int64_t b = 0; b < inputs / block; b++) {
        const uint32_t* const scales = panel;
        panel += Scales::UNITS;
        for (int64_t c = 0; c < chunks; c++, panel += Form::UNITS * PANEL, out += Form::CHUNK) {
            const float scale = Scales::scale(scales, c, first)[own];
            const float offset = Scales::offset(scales, c, first)[own];
            for (int i = 0; i < Form::CHUNK; i++) {
                const float number = Form::at(panel, vector, i / 8, i % 8)[own];
                if constexpr (std::is_same<Scales, ScaleAndZero>::value)
                    out[i] = (number - Scales::zero(scales, first)[own]) * scale;
                else
                    out[i] = number * scale + offset;
            }
        }
    }
}

}  // namespace

namespace blocks {

const Code<float>* find_code(int64_t kind, const float*) { return code_of<Floats>(kind); }
#ifdef HAS_PAIRS
const Code<uint16_t>* find_code(int64_t kind, const uint16_t*) { return code_of<Pairs>(kind); }
#endif

}  // namespace blocks

extern "C" {

// The bytes of a panel.
int64_t fminfer_panel_bytes(int64_t kind, int64_t inputs, int64_t block) {
    int64_t units = 0;
    with_form(kind, [&](auto form) { units = form.panel_units(inputs, block); });
    return units * 4;
}

// rows: of an (outputs, inputs) weight in blocks, as files hold them, (items, parts * outputs,
// bytes); packed: panel p of each part of an item side by side, then panel p + 1, each part rounded
// up to whole panels, 0 behind it.
void fminfer_pack_blocks(int64_t kind, const uint8_t* rows, int64_t items, int64_t parts,
                         int64_t outputs, int64_t inputs, int64_t block, uint32_t* packed,
                         int64_t num_threads) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    with_form(kind, [&](auto form) {
        typedef decltype(form) Form;
        const int64_t step = inputs / block * Form::bytes(block);
        const int64_t units = Form::panel_units(inputs, block);
        for_pieces(num_threads, items * panels * parts, [&](int64_t i, int) {
            const int64_t first = i / parts % panels * PANEL;
            const int64_t start = (i / parts / panels * parts + i % parts) * outputs + first;
            const int64_t num = std::min<int64_t>(PANEL, outputs - first);
            uint32_t* const panel = packed + i * units;
            if (num < PANEL) std::memset(panel, 0, units * sizeof *panel);
            for (int lane = 0; lane < num; lane += LANES)
                pack_lanes<Form>(rows + (start + lane) * step, step,
                                 std::min<int64_t>(LANES, num - lane), inputs, block, panel, lane);
        });
    });
}

// out: (num, inputs), the outputs `ids` of a packed weight.
void fminfer_unpack_rows(int64_t kind, const uint32_t* packed, int64_t inputs, int64_t block,
                         const int64_t* ids, int64_t num, float* out, int64_t num_threads) {
    with_form(kind, [&](auto form) {
        typedef decltype(form) Form;
        const int64_t units = Form::panel_units(inputs, block);
        for_parts(num_threads, num, 1, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++)
                unpack_row<Form>(packed + ids[i] / PANEL * units, int(ids[i] % PANEL), inputs,
                                 block, out + i * inputs);
        });
    });
}

}  // extern "C"
