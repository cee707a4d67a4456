// What this processor can do at best: reading memory, and multiplying with a level's instructions.
//
// `quire bench ops` divides the times of other kernels by these. They run on the same threads and with the same flags.

#include "amx.h"
#include "codecs.h"
#include "kernels.h"
#include "rows.h"
#include "threads.h"
#include "vector.h"

namespace quire {
namespace {

constexpr long CHUNK = 256 << 10;  // bytes of a piece of memory
constexpr long ROUNDS = 32768;     // of a piece of multiplications: far longer than a helper takes to wake up
constexpr int CHAINS = LANES == 16 ? 24 : 12;  // sums that do not wait for one another, in 32 or 16 registers

// A number that depends on all of memory [num_bytes], a multiple of 4 vectors.
uint32_t read_all(const char* memory, long num_bytes) {
    constexpr long SIZE = sizeof(Words);
    Words sums[4] = {};
    for (long at = 0; at < num_bytes; at += 4 * SIZE)
        for (int i = 0; i < 4; i++) sums[i] ^= read<Words>(memory + at + i * SIZE);
    const Words sum = (sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]);
    uint32_t result = 0;
    for (int i = 0; i < LANES; i++) result ^= sum[i];
    return result;
}

// Each of these multiplies ROUNDS times CHAINS vectors or 4 tiles, and returns a number that depends on them. All loops over
// the sums are unrolled: a sum that is found by a variable is in memory, and then storing takes longer than multiplying.

struct Float32 {
    static constexpr long OPERATIONS = 2 * CHAINS * LANES;  // of a round
    static float run(float start) {
        Floats sums[CHAINS];
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++) sums[i] = fill(start + i);
        const Floats factor = fill(0.999f), addend = fill(0.001f);
        for (long round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 24
            for (int i = 0; i < CHAINS; i++) sums[i] = multiply_add(sums[i], factor, addend);
        }
        Floats total = sums[0];
#pragma GCC unroll 24
        for (int i = 1; i < CHAINS; i++) total += sums[i];
        return sum(total);
    }
};

#if defined(QUIRE_HAS_AMX)
struct BFloat16Products {
    static constexpr long OPERATIONS = 4 * 2 * 16 * 16 * 32;
    static float run(float start) {
        if (!may_use_tiles()) return 0;
        TileRegisters tiles;
        tiles.shape(1, [](int) { return TileShape{}; });
        alignas(64) float from[16 * 16], to[16 * 16];
        for (float& number : from) number = start;
        _tile_loadd(4, from, 64);
        _tile_loadd(5, from, 64);
        _tile_loadd(6, from, 64);
        _tile_loadd(7, from, 64);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (long round = 0; round < ROUNDS; round++) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        float total = 0;
        _tile_stored(0, to, 64);
        total += to[0];
        _tile_stored(1, to, 64);
        total += to[0];
        _tile_stored(2, to, 64);
        total += to[0];
        _tile_stored(3, to, 64);
        total += to[0];
        return total;
    }
};
#elif defined(QUIRE_HAS_AVX512_BF16)
struct BFloat16Products {
    static constexpr long OPERATIONS = 4 * CHAINS * LANES;
    static float run(float start) {
        __m512 sums[CHAINS];
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_set1_ps(start + i);
        const __m512bh factor = (__m512bh)_mm512_set1_ps(start);
        for (long round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 24
            for (int i = 0; i < CHAINS; i++) {
                sums[i] = _mm512_dpbf16_ps(sums[i], factor, factor);
                asm("" : "+v"(sums[i]));
            }
        }
        __m512 total = sums[0];
#pragma GCC unroll 24
        for (int i = 1; i < CHAINS; i++) total += sums[i];
        return sum((Floats)total);
    }
};
#else
using BFloat16Products = Float32;  // bfloat16 is converted, and multiplied as float32
#endif

#if defined(QUIRE_HAS_PAIRS)
template <class Kind> struct ProductsOfWords {
    static constexpr long OPERATIONS = 2 * Kind::STEPS * CHAINS * LANES;
    static float run(float start) {
        typename Kind::Sum sums[CHAINS];
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++) sums[i] = (typename Kind::Sum)(Ints{} + ((int)start + i));
        Ints x = Ints{} + 0x01020304;
        for (long round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 24
            for (int i = 0; i < CHAINS; i++) {
                asm("" : "+v"(x));  // without VNNI the product is loop-invariant, and could be computed once
                sums[i] = quantized::add_products(sums[i], x, (typename Kind::Codes)x);
                asm("" : "+v"(sums[i]));
            }
        }
#pragma GCC unroll 24
        for (int i = 1; i < CHAINS; i++) sums[0] += sums[i];
        return (float)sum((Ints)sums[0]);
    }
};
#if defined(QUIRE_HAS_QUADS)
using NibbleProducts = ProductsOfWords<quantized::Int4::InBytes>;
using ByteProducts = ProductsOfWords<quantized::Int8::InBytes>;
#else
using NibbleProducts = ProductsOfWords<quantized::InPairs>;
using ByteProducts = NibbleProducts;
#endif
#else
using NibbleProducts = Float32;  // codes are dequantized, and multiplied as float32
using ByteProducts = Float32;
#endif

template <class Kind> void multiply(const MultiplyCall& call) {
    for_each(call.num_pieces, call.num_threads, [&](long piece) {
        const float number = Kind::run((float)piece);
        if (number == call.start) *call.result = number;  // is seldom true, and the compiler does not know that
    });
    *call.operations = call.num_pieces * ROUNDS * Kind::OPERATIONS;
}

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" int quire_read_memory(const ReadMemoryCall* call) {
    const long num_chunks = call->num_bytes / CHUNK;
    for_each(num_chunks, call->num_threads, [=](long chunk) {
        const uint32_t number = read_all(static_cast<const char*>(call->memory) + chunk * CHUNK, CHUNK);
        __atomic_fetch_xor(call->result, number, __ATOMIC_RELAXED);
    });
    return 0;
}

extern "C" int quire_multiply(const MultiplyCall* call) {
    if (call->dtype == FLOAT32) multiply<Float32>(*call);
    if (call->dtype == BFLOAT16) multiply<BFloat16Products>(*call);
    if (call->dtype == INT8_CODES) multiply<ByteProducts>(*call);
    if (call->dtype == INT4_CODES) multiply<NibbleProducts>(*call);
    return call->dtype != FLOAT32 && call->dtype != BFLOAT16 && call->dtype != INT8_CODES && call->dtype != INT4_CODES;
}
