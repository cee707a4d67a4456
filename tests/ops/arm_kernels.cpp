// Runs kernels of a library on an ARM processor, real or emulated, against plain formulas: `arm_kernels LIBRARY`.
//
// Prints a line for each kernel and dtype, and ends with 1 if a result is wrong.

#include "kernels.h"

#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

using namespace quire;

namespace {

enum { FLOAT32, BFLOAT16, FLOAT16 };
const char* const NAMES[] = {"float32", "bfloat16", "float16"};
const double TOLERANCES[] = {1e-5, 1e-2, 2e-3};  // of numbers around 1

void* library;
bool is_wrong = false;

template <class Call> int run(const char* name, const Call& call) {
    auto* kernel = reinterpret_cast<int (*)(const Call*)>(dlsym(library, name));
    return kernel ? kernel(&call) : -1;
}

// A tensor of a dtype; its numbers are rounded to the dtype.
struct Tensor {
    int dtype;
    std::vector<char> bytes;

    Tensor(int dtype, size_t size, const std::function<double(size_t)>& number) : dtype(dtype), bytes(4 * size) {
        for (size_t i = 0; i < size; i++) set(i, number(i));
    }
    void set(size_t i, double value) {
        const float number = (float)value;
        if (dtype == FLOAT32) std::memcpy(&bytes[4 * i], &number, 4);
        if (dtype == FLOAT16) reinterpret_cast<__fp16*>(bytes.data())[i] = (__fp16)number;
        if (dtype == BFLOAT16) std::memcpy(&bytes[2 * i], reinterpret_cast<const char*>(&number) + 2, 2);
    }
    double operator[](size_t i) const {
        float number = 0;
        if (dtype == FLOAT32) std::memcpy(&number, &bytes[4 * i], 4);
        if (dtype == FLOAT16) number = reinterpret_cast<const __fp16*>(bytes.data())[i];
        if (dtype == BFLOAT16) std::memcpy(reinterpret_cast<char*>(&number) + 2, &bytes[2 * i], 2);
        return number;
    }
    void* data() { return bytes.data(); }
};

double random_number(size_t i) { return std::sin(1.0 + 12.9898 * (double)i) * 1.5; }
double zero(size_t) { return 0; }

void expect(const char* kernel, int failed, const Tensor& out, size_t size, const std::function<double(size_t)>& number) {
    double worst = failed ? INFINITY : 0;
    for (size_t i = 0; i < size && !failed; i++) {
        const double error = std::fabs(out[i] - number(i)) / std::max(1.0, std::fabs(number(i)));
        worst = error > worst || std::isnan(error) ? error : worst;
    }
    const bool is_right = worst <= TOLERANCES[out.dtype];
    is_wrong |= !is_right;
    std::printf("%s %s: %s, error %.1e\n", kernel, NAMES[out.dtype], is_right ? "right" : "WRONG", worst);
}

void check_norm(int dtype) {
    constexpr int TOKENS = 3, SIZE = 37;
    Tensor x(dtype, TOKENS * SIZE, random_number), weight(dtype, SIZE, [](size_t i) { return 1 + 0.01 * (double)i; });
    Tensor out(dtype, TOKENS * SIZE, zero);
    const RmsNormCall call{x.data(), weight.data(), out.data(), TOKENS, 1, SIZE, SIZE, SIZE, 0, dtype, dtype, 2, 1e-6};
    expect("rms_norm", run("quire_rms_norm", call), out, TOKENS * SIZE, [&](size_t i) {
        double sum = 0;
        for (size_t at = i / SIZE * SIZE; at < (i / SIZE + 1) * SIZE; at++) sum += x[at] * x[at];
        return x[i] / std::sqrt(sum / SIZE + 1e-6) * weight[i % SIZE];
    });
}

void check_activation(int dtype) {
    constexpr int TOKENS = 5, SIZE = 19;
    Tensor x(dtype, TOKENS * 2 * SIZE, random_number), out(dtype, TOKENS * SIZE, zero);
    const ActivateAndMulCall call{x.data(), out.data(), TOKENS, SIZE, 2 * SIZE, 0, dtype, 2};
    expect("activate_and_mul", run("quire_activate_and_mul", call), out, TOKENS * SIZE, [&](size_t i) {
        const double gate = x[i / SIZE * 2 * SIZE + i % SIZE], up = x[i / SIZE * 2 * SIZE + SIZE + i % SIZE];
        return gate / (1 + std::exp(-gate)) * up;
    });
}

void check_attention(int dtype) {
    constexpr int LENGTH = 21, BLOCK = 16, HEADS = 4, KV_HEADS = 2, DIM = 24, PAGE = 2 * KV_HEADS * BLOCK * DIM;
    Tensor q(dtype, HEADS * DIM, random_number), out(dtype, HEADS * DIM, zero);
    Tensor cache(dtype, 2 * PAGE, [](size_t i) { return random_number(i + 1000); });
    const int64_t query_lens[] = {1}, seq_lens[] = {LENGTH};
    const int32_t table[] = {1, 0};  // the second page comes first
    AttentionCall call{};
    call.q = q.data(), call.out = out.data(), call.kv_cache = cache.data();
    call.query_lens = query_lens, call.seq_lens = seq_lens, call.block_tables = table;
    call.q_token_stride = HEADS * DIM, call.q_head_stride = DIM, call.num_requests = 1, call.table_stride = 2;
    call.page_stride = PAGE, call.block_size = BLOCK, call.num_kv_heads = KV_HEADS, call.group = HEADS / KV_HEADS;
    call.head_dim = call.row_size = DIM, call.q_dtype = call.kv_dtype = dtype, call.num_threads = 2, call.scale = 0.2;
    const auto at = [&](int is_value, int head, int position, int i) {
        return cache[table[position / BLOCK] * PAGE + ((is_value * KV_HEADS + head) * BLOCK + position % BLOCK) * DIM + i];
    };
    expect("attention", run("quire_attention", call), out, HEADS * DIM, [&](size_t index) {
        const int head = (int)index / DIM, kv_head = head / (HEADS / KV_HEADS);
        double total = 0, sum = 0;
        for (int position = 0; position < LENGTH; position++) {
            double score = 0;
            for (int i = 0; i < DIM; i++) score += q[head * DIM + i] * at(0, kv_head, position, i);
            total += std::exp(0.2 * score);
            sum += std::exp(0.2 * score) * at(1, kv_head, position, (int)index % DIM);
        }
        return sum / total;
    });
}

void check_multiplication(int dtype) {  // of floors.cpp; that of bfloat16 has instructions of its own on some levels
    float result = 0;
    int64_t operations = 0;
    const MultiplyCall call{&result, &operations, 2, dtype, 2, -1.0};
    const int failed = run("quire_multiply", call);
    is_wrong |= failed || operations <= 0;
    std::printf("multiply %s: %s\n", NAMES[dtype], failed || operations <= 0 ? "WRONG" : "right");
}

int least_bits() { return reinterpret_cast<int (*)()>(dlsym(library, "quire_least_activation_bits"))(); }

// Activations of 8 bits beside codes of 8 or 4 bits, in groups; the same for a row whatever rows are beside it. Levels that
// multiply no bytes take x as it is.
void check_byte_products(int dtype, int code_bits, int size, int group) {
    constexpr int ROWS = 29, OUTPUTS = 21;
    const bool has_bytes = least_bits() == 8;
    const auto code = [&](size_t i) { return (int)(i * 7919 % 1009) % (1 << code_bits) - (1 << (code_bits - 1)); };
    std::vector<int8_t> codes(OUTPUTS * size / (8 / code_bits));
    for (size_t i = 0; i < (size_t)(OUTPUTS * size); i++)
        if (code_bits == 8) codes[i] = (int8_t)code(i);
        else codes[i / 2] |= (int8_t)((code(i) & 15) << (i % 2 * 4));
    Tensor scales(FLOAT32, OUTPUTS * size / group, [](size_t i) { return 0.01 + 0.001 * (double)(i % 7); });
    Tensor offsets(FLOAT32, OUTPUTS * size / group, [](size_t i) { return 0.02 * (double)(i % 5); });
    Tensor x(dtype, ROWS * size, random_number), out(dtype, ROWS * OUTPUTS, zero), one(dtype, OUTPUTS, zero);
    const WeightForm form{OUTPUTS, size, group, code_bits == 8 ? 3 : 6, FLOAT32, 1, 0};
    PackQuantizedCall pack{codes.data(), scales.data(), offsets.data(), nullptr, form, 0, 2};
    auto* size_of = reinterpret_cast<long (*)(const PackQuantizedCall*)>(dlsym(library, "quire_quantized_size"));
    std::vector<uint8_t> panels(size_of(&pack) + 64);
    pack.panels = panels.data() + 64 - (uintptr_t)panels.data() % 64;
    int failed = run("quire_pack_quantized", pack);
    const float table[2] = {1, 0};
    QuantizedLinearCall call{x.data(), pack.panels, table, nullptr, nullptr, out.data(), ROWS, size, form, 0, dtype, 8, 2};
    failed |= run("quire_quantized_linear", call);
    const std::string name = "products of " + std::to_string(code_bits) + " bits in groups of " + std::to_string(group);
    const auto rounded = [&](size_t row, int at) {
        const int first = at / group * group + at % group / 128 * 128;
        const int end = std::min(first + 128, (at / group + 1) * group);
        double largest = 0;
        for (int i = first; i < end; i++) largest = std::max(largest, std::fabs(x[row * size + i]));
        const float inverse = 127 / (float)largest;
        return std::nearbyint((float)x[row * size + at] * inverse) * largest / 127;
    };
    const auto number = [&](size_t index) {
        const size_t row = index / OUTPUTS, output = index % OUTPUTS;
        double sum = 0;
        for (int i = 0; i < size; i++) {
            const size_t own = output * (size / group) + i / group;
            const double input = has_bytes ? rounded(row, i) : x[row * size + i];
            sum += input * (code(output * size + i) * scales[own] + offsets[own]);
        }
        return sum;
    };
    expect(name.c_str(), failed, out, ROWS * OUTPUTS, number);
    call.rows = 1, call.out = one.data();
    for (int row = 0; row < ROWS; row++) {
        call.x = (char*)x.data() + (size_t)row * size * (dtype == FLOAT32 ? 4 : 2);
        failed |= run("quire_quantized_linear", call);
        for (int i = 0; i < OUTPUTS; i++) failed |= one[i] != out[row * OUTPUTS + i];
    }
    is_wrong |= failed;
    std::printf("%s %s, one row and many: %s\n", name.c_str(), NAMES[dtype], failed ? "WRONG" : "right");
}

}  // namespace

int main(int count, char** arguments) {
    library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
    if (!library) return std::printf("no library: %s\n", count == 2 ? dlerror() : "name one"), 2;
    for (int dtype : {FLOAT32, BFLOAT16, FLOAT16}) {
        check_norm(dtype);
        check_activation(dtype);
        check_attention(dtype);
    }
    std::printf("activations of %d bits: right\n", least_bits());
    for (int dtype : {BFLOAT16, FLOAT16})
        for (int code_bits : {8, 4}) {
            check_byte_products(dtype, code_bits, 96, 32);
            check_byte_products(dtype, code_bits, 384, 192);
            check_byte_products(dtype, code_bits, 36, 12);
        }
    check_multiplication(FLOAT32);
    check_multiplication(BFLOAT16);
    std::fflush(stdout);
    std::_Exit(is_wrong);
}
