// The tile registers of AMX in software, for processors with AVX-512 but no AMX: `-include` it before the kernels.
//
// The instructions follow Intel's "Architecture Instruction Set Extensions Programming Reference" to the bit: the order
// and the rounding of sums, denormal numbers as zeros, and zeros past a tile's shape. What raises an exception on such a
// processor, a wrong configuration or shapes that do not fit, ends the process with a message.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

// What the kernels ask the compiler.
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1

// Linux refuses the permission for registers that are not there.
#define syscall(number, ...) ((number) == SYS_arch_prctl ? 0L : (syscall)(number, __VA_ARGS__))

namespace emulated {

struct Config {  // as in memory
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

struct Tiles {
    alignas(64) uint8_t data[8][16][64];
    Config config;
    bool is_configured;
};

inline thread_local Tiles tiles;

inline std::atomic<long> bfloat_products, byte_products;

inline void expect(bool is_right, const char* what) {
    if (is_right) return;
    std::fprintf(stderr, "emulated AMX: %s\n", what);
    std::abort();
}

inline void load_config(const void* from) {
    Config config;
    std::memcpy(&config, from, 64);
    expect(config.palette == 1 && config.start == 0, "the palette must be 1, and the first row 0");
    for (uint8_t byte : config.reserved) expect(byte == 0, "reserved bytes must be 0");
    for (int tile = 0; tile < 16; tile++) {
        const int rows = config.rows[tile], bytes = config.bytes[tile];
        expect(tile < 8 ? rows <= 16 && bytes <= 64 && !rows == !bytes : !rows && !bytes, "a tile has a wrong shape");
    }
    tiles = Tiles();
    tiles.config = config, tiles.is_configured = true;
}

inline void release() { tiles = Tiles(); }

inline void use(int tile) {
    expect(tiles.is_configured, "a tile is used without a configuration");
    expect(tiles.config.rows[tile] > 0, "a tile is used that has no rows");
}

inline void zero(int tile) {
    use(tile);
    std::memset(tiles.data[tile], 0, sizeof(tiles.data[tile]));
}

inline void load(int tile, const void* from, long stride) {
    zero(tile);
    for (int row = 0; row < tiles.config.rows[tile]; row++)
        std::memcpy(tiles.data[tile][row], (const char*)from + row * stride, tiles.config.bytes[tile]);
}

inline void store(int tile, void* to, long stride) {
    use(tile);
    for (int row = 0; row < tiles.config.rows[tile]; row++)
        std::memcpy((char*)to + row * stride, tiles.data[tile][row], tiles.config.bytes[tile]);
}

// For sums [m][n] += x [m][k] * y [k][n] of words. Returns k.
inline int fit(int sums, int x, int y) {
    for (int tile : {sums, x, y}) {
        use(tile);
        expect(tiles.config.bytes[tile] % 4 == 0, "a factor has parts of words");
    }
    expect(sums != x && sums != y && x != y, "a product's tiles must differ");
    expect(tiles.config.rows[sums] == tiles.config.rows[x], "sums and the first factor differ in rows");
    expect(tiles.config.bytes[sums] == tiles.config.bytes[y], "sums and the second factor differ in columns");
    expect(tiles.config.bytes[x] == 4 * tiles.config.rows[y], "the factors' inner sizes differ");
    return tiles.config.rows[y];
}

inline __m512i word(int x, int row, int k) {
    int32_t word;
    std::memcpy(&word, &tiles.data[x][row][4 * k], 4);
    return _mm512_set1_epi32(word);
}

inline __m512i line(int tile, int row) { return _mm512_load_si512(tiles.data[tile][row]); }

// Products of the first and of the second numbers of pairs have sums of their own, which are added at the end.
__attribute__((noinline)) inline void multiply_bfloats(int sums, int x, int y, int depth) {
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    for (int row = 0; row < tiles.config.rows[sums]; row++) {
        __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
        for (int k = 0; k < depth; k++) {
            const __m512i a = word(x, row, k), b = line(y, k);
            first = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16), first);
            second = _mm512_fmadd_ps((__m512)_mm512_and_si512(a, high), (__m512)_mm512_and_si512(b, high), second);
        }
        const __m512 sum = _mm512_add_ps((__m512)line(sums, row), _mm512_add_ps(first, second));
        _mm512_mask_storeu_ps(tiles.data[sums][row], (__mmask16)((1u << (tiles.config.bytes[sums] / 4)) - 1), sum);
    }
}

inline void dpbf16ps(int sums, int x, int y) {
    bfloat_products++;
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0);  // no exceptions, to the nearest, denormal numbers are zeros
    multiply_bfloats(sums, x, y, fit(sums, x, y));
    _mm_setcsr(before);
}

// Products of bytes: those of x have a sign or none, and those of y. Sums of 32 bits wrap.
template <class X, class Y> inline void multiply_bytes(int sums, int x, int y) {
    byte_products++;
    const int depth = fit(sums, x, y), columns = tiles.config.bytes[sums] / 4;
    for (int row = 0; row < tiles.config.rows[sums]; row++) {
        uint32_t sum[16];
        std::memcpy(sum, tiles.data[sums][row], 64);
        for (int k = 0; k < 4 * depth; k++)
            for (int n = 0; n < columns; n++)
                sum[n] += (uint32_t)((X)tiles.data[x][row][k] * (Y)tiles.data[y][k / 4][4 * n + k % 4]);
        std::memcpy(tiles.data[sums][row], sum, 4 * columns);
    }
}

}  // namespace emulated

// How many instructions multiplied so far.
extern "C" __attribute__((used)) inline long emulated_bfloat_products() { return emulated::bfloat_products; }
extern "C" __attribute__((used)) inline long emulated_byte_products() { return emulated::byte_products; }

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stream_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::dpbf16ps
#define _tile_dpbssd(sums, x, y) emulated::multiply_bytes<int8_t, int8_t>(sums, x, y)
#define _tile_dpbsud(sums, x, y) emulated::multiply_bytes<int8_t, uint8_t>(sums, x, y)
#define _tile_dpbusd(sums, x, y) emulated::multiply_bytes<uint8_t, int8_t>(sums, x, y)
#define _tile_dpbuud(sums, x, y) emulated::multiply_bytes<uint8_t, uint8_t>(sums, x, y)
