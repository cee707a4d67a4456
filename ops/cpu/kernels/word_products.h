// The products of words that quantized_panels.h describes.
#pragma once

#include "quantized_panels.h"

#if defined(QUIRE_HAS_WORDS)

#include <array>
#include <utility>

namespace quire {
namespace quantized {

constexpr long WORDS_AHEAD = 8192;  // distance in bytes between reads and prefetches of codes
constexpr long KEPT_AHEAD = 4096;   // the same where they are kept: most are in a cache already
constexpr long MOST_FETCHING = 4;   // passes of rows that share the prefetch of the next part
constexpr int LEAST_ROWS = (MOST_ROWS + 1) / 2;     // of a tile that is not alone
constexpr int WORDS_AT_ONCE = LANES == 16 ? 2 : 1;  // kept words of a turn; AVX2 has no registers for two

template <class X> constexpr int PASS_ROWS = MOST_ROWS / PASSES<X>;    // the most of a pass
template <class X> constexpr int LEAST_PASS = LEAST_ROWS / PASSES<X>;  // of several passes
template <class X> constexpr int NUM_PARTS = X::HAS_ORIGINS ? STEPS_AN_OCTAVE : 1;
constexpr float PARTS[] = {1, 1.25f, 1.5f, 1.75f};
static_assert(sizeof(PARTS) == STEPS_AN_OCTAVE * sizeof(float));

// Neighbouring rows of a tile, from some block on: see `Blocks`. Passed by reference: a copy on the stack is loaded in
// larger pieces than it was stored in, which waits.
template <class X> struct WordRows {
    const int32_t *words, *starts, *parts;
    const float *factors, *sums;
    long stride;  // rows of the tile
    WordRows(const uint8_t* tile, const Blocks<X>& blocks, int rows)
        : words((const int32_t*)tile), starts((const int32_t*)(tile + blocks.starts_at(rows))),
          parts((const int32_t*)(tile + blocks.parts_at(rows))), factors((const float*)(tile + blocks.factors_at(rows))),
          sums((const float*)(tile + blocks.sums_at(rows))), stride(rows) {}
    void advance(long num_words, long num_blocks) {
        words += num_words * stride;
        move_blocks(num_blocks * stride);
    }
    void skip(int rows) {
        words += rows;
        move_blocks(rows);
    }
    // A block's sums before its products.
    template <int ROWS> inline __attribute__((always_inline)) void start(typename X::Sum (&sum)[ROWS][2]) const {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) {
            if constexpr (X::HAS_STARTS) sum[row][0] = (typename X::Sum)(starts[row] - Ints{});
            else sum[row][0] = typename X::Sum{};
            sum[row][1] = sum[row][0];
        }
    }

private:
    void move_blocks(long count) { starts += count, parts += count, factors += count, sums += count; }
};

// Scales of a group times each of PARTS, and offsets, of two vectors of outputs.
template <class X> struct Scales {
    Floats scale[NUM_PARTS<X>][2], offset[2];
};

// A part of a panel as words, for more rows: some blocks. Sums in registers take few rows at once, and so long parts. Words
// of AVX2 are half as long, so that twice as many fit the first cache.
template <class X> struct Kept {
    static constexpr long STEPS = X::HAS_ORIGINS || LANES == 8 ? 2 * MOST_STEPS : MOST_STEPS;
    static constexpr long MOST_WORDS = STEPS / X::STEPS, MOST_BLOCKS = 64;
    typename X::Codes codes[MOST_WORDS][2];
    Scales<X> scales[MOST_BLOCKS];
    long num_words[MOST_BLOCKS];
    long num_blocks;
};

inline Floats as_floats(Floats x) { return x; }
inline Floats as_floats(Ints x) { return __builtin_convertvector(x, Floats); }
#if defined(QUIRE_HAS_SAFE_QUADS)
inline Floats as_floats(SumPairs x) {
    return as_floats((Ints)_mm256_madd_epi16((__m256i)x, _mm256_set1_epi16(1)));
}
#endif

// float32 sums of a pass, [ROWS][PANEL]: in memory, or in registers from `begin` to `end`. The first part's begin at 0.
template <class X, int ROWS, bool HAS_ORIGINS = X::HAS_ORIGINS> struct Totals {
    float* memory;
    explicit Totals(float* memory) : memory(memory) {}
    inline __attribute__((always_inline)) void begin(bool is_first) {
        if (!is_first) return;
#pragma GCC unroll 24
        for (int i = 0; i < ROWS * 2; i++) {
            quire::store(memory + i * LANES, Floats{});
            asm("" : : : "memory");  // GCC would call a slow instruction for strings
        }
    }
    void end() {}
    // Adds a block's own sums. `scale(part, half)` is the weight's scale times a part.
    template <class Scale>
    inline __attribute__((always_inline)) void add(const typename X::Sum (&sum)[ROWS][2], Scale scale,
                                                   const Floats (&offset)[2], bool has_offsets, const WordRows<X>& x) {
        const Floats scales[2] = {scale(0, 0), scale(0, 1)};
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) {
            Floats factor[2] = {scales[0], scales[1]};
            if constexpr (X::HAS_FACTORS) {
                const Floats own = fill(x.factors[row]);
                factor[0] *= own, factor[1] *= own;
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                float* to = memory + (row * 2 + half) * LANES;
                Floats total = multiply_add(as_floats(sum[row][half]), factor[half], quire::load(to));
                if (has_offsets) total = multiply_add(fill(x.sums[row]), offset[half], total);
                quire::store(to, total);
            }
        }
        asm("" : : : "memory");  // GCC would keep all sums on the stack as well, and store twice as much
    }
};

template <class X, int ROWS> struct Totals<X, ROWS, true> {
    float* memory;
    Floats total[ROWS][2];
    explicit Totals(float* memory) : memory(memory) {}
    inline __attribute__((always_inline)) void begin(bool is_first) {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
                total[row][half] = is_first ? Floats{} : quire::load(memory + (row * 2 + half) * LANES);
    }
    inline __attribute__((always_inline)) void end() {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) quire::store(memory + (row * 2 + half) * LANES, total[row][half]);
    }
    template <class Scale>
    inline __attribute__((always_inline)) void add(const typename X::Sum (&sum)[ROWS][2], Scale scale,
                                                   const Floats (&offset)[2], bool has_offsets, const WordRows<X>& x) {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) {
            const Floats origin = fill(x.factors[row]);
            const int part = x.parts[row];
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
                total[row][half] =
                    multiply_add(bits_as<Floats>(sum[row][half]) - origin, scale(part, half), total[row][half]);
        }
        if (has_offsets)
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++)
                    total[row][half] = multiply_add(fill(x.sums[row]), offset[half], total[row][half]);
    }
};

// Calls body with each of 0, STEPS, .. below STEPS * sizeof...(I) as an integral_constant.
template <int STEPS, class Body, int... I>
inline __attribute__((always_inline)) void for_steps(Body body, std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, STEPS * I>()), ...);
}

// sums [ROWS][PANEL] += x times `count` blocks of a panel, from `at` on; if `is_first`, sums = it. If KEEPS, the blocks are
// written to `kept`.
template <class C, class X, int ROWS, bool KEEPS>
void multiply_blocks(const Layout<C>& weight, const uint8_t* panel, BlockAt<X> at, long count,
                     const WordRows<X>& rows, bool is_first, float* sums, Kept<X>* kept) {
    WordRows<X> x = rows;
    using Codes = typename X::Codes;
    const C codec = weight.codec;
    constexpr int WORDS = C::UNIT / X::STEPS;
    const bool has_offsets = weight.adds_offsets();
    Codes(*keep)[2] = KEEPS ? kept->codes : nullptr;
    const long stride = KEEPS ? x.stride : ROWS;
    Totals<X, ROWS> totals(sums);
    totals.begin(is_first);
    for (long block = 0; block < count; block++, at.advance()) {
        const uint8_t* group = panel + at.group * weight.group_bytes();
        const uint8_t* units = group + weight.header() + at.first / C::UNIT * C::BYTES;
        const long num_units = at.steps() / C::UNIT;
        typename X::Sum sum[ROWS][2];
        x.template start<ROWS>(sum);
        for (long unit = 0; unit < num_units; unit++, units += C::BYTES, x.words += WORDS * stride) {
            for (long line = 0; line < C::BYTES; line += 64)
                __builtin_prefetch(units + line + (KEEPS ? KEPT_AHEAD : WORDS_AHEAD));
            const typename C::Unit codes = C::load(units);
            for_steps<X::STEPS>([&](auto first) __attribute__((always_inline)) {
                constexpr int WORD = decltype(first)::value / X::STEPS;
                Codes words[2];
                codec.template in_words<WORD>(codes, words);
                if constexpr (KEEPS) keep[0][0] = words[0], keep[0][1] = words[1], keep++;
#pragma GCC unroll 12
                for (int row = 0; row < ROWS; row++) {
                    const Ints factor = x.words[WORD * stride + row] - Ints{};
                    sum[row][0] = add_products(sum[row][0], factor, words[0]);
                    sum[row][1] = add_products(sum[row][1], factor, words[1]);
                }
            }, std::make_integer_sequence<int, WORDS>());
        }
        Floats scale[2], offset[2];
        weight.load_scales(group, scale, offset);
        if constexpr (KEEPS) {
            Scales<X>& own = kept->scales[block];
            for (int half = 0; half < 2; half++) {
                own.offset[half] = offset[half];
                for (int part = 0; part < NUM_PARTS<X>; part++) own.scale[part][half] = scale[half] * PARTS[part];
            }
            kept->num_words[block] = num_units * WORDS;
            totals.add(sum, [&](int part, int half) { return own.scale[part][half]; }, offset, has_offsets, x);
        } else {
            totals.add(sum, [&](int part, int half) { return scale[half] * PARTS[part]; }, offset, has_offsets, x);
        }
        x.advance(0, 1);
    }
    totals.end();
    if constexpr (KEEPS) kept->num_blocks = count;
}

// The same for the blocks of `kept`. Meanwhile `fetch` bytes from `ahead` on are prefetched for each word.
template <class X, int ROWS>
void multiply_kept(const Kept<X>& kept, bool has_offsets, const WordRows<X>& rows, bool is_first, float* sums,
                   const uint8_t* ahead, long fetch) {
    WordRows<X> x = rows;
    const typename X::Codes(*codes)[2] = kept.codes;
    const long stride = X::HAS_ORIGINS ? x.stride : ROWS;
    Totals<X, ROWS> totals(sums);
    totals.begin(is_first);
    const Scales<X>* scales = kept.scales;
    for (long block = 0; block < kept.num_blocks; block++, scales++, x.advance(0, 1)) {
        typename X::Sum sum[ROWS][2];
        x.template start<ROWS>(sum);
        const auto multiply_word = [&]() __attribute__((always_inline)) {
            for (int line = 0; line < X::STEPS / 2; line++) __builtin_prefetch(ahead + line * 64);
            const typename X::Codes low = codes[0][0], high = codes[0][1];
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; row++) {
                const Ints factor = x.words[row] - Ints{};
                sum[row][0] = add_products(sum[row][0], factor, low);
                sum[row][1] = add_products(sum[row][1], factor, high);
            }
            codes++, x.words += stride, ahead += fetch;
        };
        long left = kept.num_words[block];
        for (; left >= WORDS_AT_ONCE; left -= WORDS_AT_ONCE)
#pragma GCC unroll 2
            for (int i = 0; i < WORDS_AT_ONCE; i++) multiply_word();
        for (; left > 0; left--) multiply_word();
        totals.add(sum, [&](int part, int half) { return scales->scale[part][half]; }, scales->offset, has_offsets, x);
    }
    totals.end();
}

template <class C, class X> using MultiplyBlocks = void (*)(const Layout<C>&, const uint8_t*, BlockAt<X>, long,
                                                            const WordRows<X>&, bool, float*, Kept<X>*);
template <class X> using MultiplyKept = void (*)(const Kept<X>&, bool, const WordRows<X>&, bool, float*,
                                                      const uint8_t*, long);

template <class C, class X, bool KEEPS, int LEAST, int... I>
constexpr std::array<MultiplyBlocks<C, X>, sizeof...(I)> block_functions(std::integer_sequence<int, I...>) {
    return {multiply_blocks<C, X, LEAST + I, KEEPS>...};
}

template <class X, int LEAST, int... I>
constexpr std::array<MultiplyKept<X>, sizeof...(I)> kept_functions(std::integer_sequence<int, I...>) {
    return {multiply_kept<X, LEAST + I>...};
}

// Functions for 1, or LEAST_PASS, to PASS_ROWS rows.
template <class C, class X>
constexpr auto WIDEN = block_functions<C, X, false, 1>(std::make_integer_sequence<int, PASS_ROWS<X>>());
template <class X> using Several = std::make_integer_sequence<int, PASS_ROWS<X> - LEAST_PASS<X> + 1>;
template <class C, class X> constexpr auto KEEP = block_functions<C, X, true, LEAST_PASS<X>>(Several<X>());
template <class X> constexpr auto TAKE_KEPT = kept_functions<X, LEAST_PASS<X>>(Several<X>());

// See `Weight::multiply`.
template <class C, class X>
void multiply_words(X, const Layout<C>& weight, const uint8_t* panel, int count, const uint8_t* x, const Tiles& tiles,
                    float* sums) {
    const Blocks<X> blocks = weight.template blocks<X>();
    const long row_bytes = blocks.row_bytes(), stride = weight.panel_bytes();
    const bool keeps = tiles.rows > PASS_ROWS<X>;
    const long most_steps = keeps ? Kept<X>::STEPS : blocks.words() * X::STEPS;
    const long most_blocks = keeps ? Kept<X>::MOST_BLOCKS : blocks.count();
    alignas(64) Kept<X> kept;
    // The last passes, but for the first one, fetch the next part. One alone would wait for memory.
    long num_passes = 0;
    for (long tile = 0; tile < tiles.count; tile++) num_passes += tiles.size(tile) > PASS_ROWS<X> ? 2 : 1;
    const long num_fetching = std::clamp(num_passes - 1, 1L, MOST_FETCHING);
    const long fetch = X::STEPS * C::BYTES / C::UNIT / num_fetching;
    BlockAt<X> at{blocks, 0, 0};
    for (long first = 0, num_words = 0; at.group < blocks.groups;) {
        BlockAt<X> end = at;
        long steps = 0, num_blocks = 0;
        for (; end.group < blocks.groups && steps + end.steps() <= most_steps && num_blocks < most_blocks;
             end.advance(), num_blocks++)
            steps += end.steps();
        for (int i = 0; i < count; i++) {
            const uint8_t* own = panel + i * stride;
            // The next part: of the next panel, or behind this one.
            const uint8_t* ahead = i + 1 < count ? weight.find(own + stride, at.group * weight.group + at.first)
                                                 : weight.find(panel, end.group * weight.group + end.first);
            long pass = 0;
            for (long tile = 0; tile < tiles.count; tile++) {
                const int rows = tiles.size(tile), most = rows > PASS_ROWS<X> ? (rows + 1) / 2 : rows;
                WordRows<X> part(x + tiles.start(tile) * row_bytes, blocks, rows);
                part.advance(num_words, first);
                float* to = sums + (i * tiles.rows + tiles.start(tile)) * PANEL;
                for (int done = 0, count; done < rows; done += count, part.skip(count), to += count * PANEL, pass++) {
                    count = std::min(most, rows - done);
                    if (!keeps) WIDEN<C, X>[count - 1](weight, own, at, num_blocks, part, first == 0, to, nullptr);
                    else if (pass == 0)
                        KEEP<C, X>[count - LEAST_PASS<X>](weight, own, at, num_blocks, part, first == 0, to, &kept);
                    else {
                        const bool fetches = pass >= num_passes - num_fetching;
                        TAKE_KEPT<X>[count - LEAST_PASS<X>](kept, weight.adds_offsets(), part, first == 0, to, ahead,
                                                            fetches ? fetch : 0);
                        if (fetches) ahead += fetch * (steps / X::STEPS);
                    }
                }
            }
        }
        at.group = end.group, at.first = end.first, first += num_blocks, num_words += steps / X::STEPS;
    }
}

}  // namespace quantized
}  // namespace quire
#endif
