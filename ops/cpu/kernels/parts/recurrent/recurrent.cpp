// Recurrent layers: convolutions over the last tokens, scans and delta rules. gates.cpp has the gates around them.
// `quire.ops.recurrent` defines the operations.
//
// A thread takes some columns of one state through all tokens of a row, one token after another. So a row has the same
// bits however it is cut into steps, and a state is read and written once a step. All arithmetic is in float32.
//
// Every function returns 0, or 1 if this machine's build has no code for the dtype; nothing is then written.

#include "kernels.h"
#include "threads.h"
#include "vector.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace quire {
namespace {

constexpr long WORTH_A_THREAD = 1 << 14;  // elements below which waking other threads costs more than they save

constexpr int WIDTH = 4;  // vectors of a state's columns that one task takes
constexpr long COLUMNS = WIDTH * LANES;

struct StepRows {
    const int64_t *slots, *starts;
    const bool* is_new;
    int64_t num_rows;
};

template <class Call> StepRows rows_of(const Call* call) {
    return {call->slots, call->starts, call->is_new, call->num_rows};
}

// Calls body(row, first column, number of columns) for all rows and for pieces of `size` columns.
template <class Body>
void for_each_piece(const StepRows& rows, long size, long piece, long work_per_token, long num_threads, Body body) {
    const long pieces = (size + piece - 1) / piece;
    const long work = rows.starts[rows.num_rows] * work_per_token;
    for_each(rows.num_rows * pieces, work > WORTH_A_THREAD ? num_threads : 1, [&](long i) {
        const long first = i % pieces * piece;
        body(i / pieces, first, std::min(piece, size - first));
    });
}

// Memory of the calling thread, which a later call may use again.
float* scratch(long size) {
    thread_local std::vector<float> memory;
    if ((long)memory.size() < size) memory.resize(size);
    return memory.data();
}

template <class T> void widen(const T* from, float* to, long size) {
    for (long i = 0; i < size; i += LANES) store(to + i, load(from + i, size - i), size - i);
}

// Widens `from` and scales it to the length `length`.
template <class T> void widen_to_length(const T* from, float* to, long size, float length) {
    Floats squares{};
    for (long i = 0; i < size; i += LANES) {
        const Floats part = load(from + i, size - i);
        squares += part * part;
    }
    const float factor = length / std::sqrt(sum(squares) + 1e-6f);
    for (long i = 0; i < size; i += LANES) store(to + i, load(from + i, size - i) * factor, size - i);
}

template <class T> float number(const T* from) { return load(from, 1)[0]; }

// Convolves channels [first, first + count) of one row, and keeps its last inputs in the state.
template <class T> void convolve(const CausalConv1dCall* call, long row, long first, long count) {
    const StepRows rows = rows_of(call);
    const long channels = call->channels, width = call->width, start = rows.starts[row];
    const long length = rows.starts[row + 1] - start;
    const bool is_new = rows.is_new[row];
    const T *x = (const T*)call->x + start * call->x_stride + first, *weight = (const T*)call->weight + first;
    const T* bias = call->bias ? (const T*)call->bias + first : nullptr;
    T* state = (T*)call->state + rows.slots[row] * (width - 1) * channels + first;
    T* out = (T*)call->out + start * channels + first;

    for (long token = 0; token < length; token++) {
        for (long i = 0; i < count; i += LANES) {
            Floats total = bias ? load(bias + i, count - i) : Floats{};
            for (long tap = 0; tap < width; tap++) {
                const long from = token + tap - (width - 1);  // token of the row; below 0, of the state
                if (from < 0 && is_new) continue;
                const T* source = from < 0 ? state + (from + width - 1) * channels : x + from * call->x_stride;
                total += load(weight + tap * channels + i, count - i) * load(source + i, count - i);
            }
            store(out + token * channels + i, call->is_silu ? silu(total) : total, count - i);
        }
    }
    for (long place = 0; place < width - 1; place++) {
        const long from = length + place - (width - 1);
        T* to = state + place * channels;
        if (from >= 0) std::memcpy(to, x + from * call->x_stride, count * sizeof(T));
        else if (is_new) std::memset((void*)to, 0, count * sizeof(T));
        else std::memcpy(to, state + (length + place) * channels, count * sizeof(T));
    }
}

// The scan of Mamba 1 for channels [first, first + count) of one row; count is at most COLUMNS.
template <class T> void scan(const SelectiveScanCall* call, long row, long first, long count) {
    const StepRows rows = rows_of(call);
    const long channels = call->channels, size = call->size;
    const long vectors = (count + LANES - 1) / LANES;
    float* state = call->state + rows.slots[row] * size * channels + first;
    float *held = scratch(size * COLUMNS + 2 * round_up(size, LANES)), *b = held + size * COLUMNS,
          *c = b + round_up(size, LANES);
    const auto visit_state = [&](auto body) {
        for (long n = 0; n < size; n++)
            for (long i = 0; i < vectors; i++)
                body(held + n * COLUMNS + i * LANES, state + n * channels + i * LANES, count - i * LANES);
    };
    visit_state([&](float* own, const float* from, long left) {
        store(own, rows.is_new[row] ? Floats{} : load(from, left));
    });
    for (long token = rows.starts[row]; token < rows.starts[row + 1]; token++) {
        widen((const T*)call->b + token * call->b_stride, b, size);
        widen((const T*)call->c + token * call->c_stride, c, size);
        for (long i = 0; i < vectors; i++) {
            const long at = first + i * LANES, left = count - i * LANES;
            const Floats x = load((const T*)call->x + token * call->x_stride + at, left);
            const Floats t =
                softplus(load((const T*)call->dt + token * call->dt_stride + at, left) + load(call->dt_bias + at, left));
            const Floats added = t * x, exponent = t * 1.44269504f;
            Floats out = load(call->d + at, left) * x;
            for (long n = 0; n < size; n++) {
                float* own = held + n * COLUMNS + i * LANES;
                const Floats decay = exp2(exponent * load(call->a + n * channels + at, left));
                const Floats updated = decay * load(own) + added * b[n];
                store(own, updated);
                out += updated * c[n];
            }
            const Floats gate = load((const T*)call->gate + token * call->gate_stride + at, left);
            store((T*)call->out + token * channels + at, out * silu(gate), left);
        }
    }
    visit_state([&](const float* own, float* to, long left) { store(to, load(own), left); });
}

// The averages of RWKV for channels [first, first + count) of one row.
template <class T> void average(const WkvCall* call, long row, long first, long count) {
    const StepRows rows = rows_of(call);
    const long channels = call->channels;
    float* state = call->state + rows.slots[row] * 3 * channels;
    const auto power = [](Floats x) { return exp2(x * 1.44269504f); };
    const auto greater = [](Floats x, Floats y) { return x > y ? x : y; };
    for (long at = first; at < first + count; at += LANES) {
        const long left = first + count - at;
        const Floats bonus = load(call->first + at, left), decay = load(call->log_decay + at, left);
        Floats total{}, weight{}, most = fill(-1e30f);
        if (!rows.is_new[row])
            total = load(state + at, left), weight = load(state + channels + at, left),
            most = load(state + 2 * channels + at, left);
        for (long token = rows.starts[row]; token < rows.starts[row + 1]; token++) {
            const Floats key = load((const T*)call->k + token * call->k_stride + at, left);
            const Floats value = load((const T*)call->v + token * call->v_stride + at, left);
            Floats highest = greater(most, bonus + key);
            Floats held = power(most - highest), added = power(bonus + key - highest);
            store((T*)call->out + token * channels + at, (held * total + added * value) / (held * weight + added), left);
            highest = greater(most + decay, key);
            held = power(most + decay - highest), added = power(key - highest);
            total = held * total + added * value, weight = held * weight + added, most = highest;
        }
        store(state + at, total, left);
        store(state + channels + at, weight, left);
        store(state + 2 * channels + at, most, left);
    }
}

// Takes one head's memory through one row's tokens. The memory's last column is that of the ones behind the values.
template <class T> void remember(const MlstmCall* call, long row, long head) {
    const StepRows rows = rows_of(call);
    const long key_dim = call->key_dim, value_dim = call->value_dim, width = value_dim + 1;
    const long memory_size = key_dim * width, padded = round_up(width, LANES);
    float* memory = call->state + (rows.slots[row] * call->heads + head) * (key_dim + 1) * width;
    float& kept_most = memory[memory_size + value_dim];
    if (rows.is_new[row]) std::fill_n(memory, memory_size + width, 0.0f);
    float *value = scratch(2 * padded + 2 * round_up(key_dim, LANES)), *out = value + padded, *key = out + padded,
          *query = key + round_up(key_dim, LANES);
    float most = kept_most;
    for (long token = rows.starts[row]; token < rows.starts[row + 1]; token++) {
        const float keep = -softplus(-number((const T*)call->keep + token * call->keep_stride + head));
        const float add = number((const T*)call->add + token * call->add_stride + head);
        const float now = std::max(keep + most, add), held = std::exp(keep + most - now), added = std::exp(add - now);
        most = now;
        widen((const T*)call->q + token * call->q_stride + head * key_dim, query, key_dim);
        widen((const T*)call->k + token * call->k_stride + head * key_dim, key, key_dim);
        widen((const T*)call->v + token * call->v_stride + head * value_dim, value, value_dim);
        value[value_dim] = 1;
        std::fill_n(out, padded, 0.0f);
        for (long k = 0; k < key_dim; k++) {
            float* own = memory + k * width;
            const Floats factor = fill(added * key[k]), asked = fill(query[k]);
            for (long i = 0; i < width; i += LANES) {
                const Floats updated = fill(held) * load(own + i, width - i) + factor * load(value + i);
                store(own + i, updated, width - i);
                store(out + i, load(out + i) + asked * updated);
            }
        }
        const float scale = 1 / std::sqrt((float)key_dim);
        const float divisor = std::max(std::abs(out[value_dim] * scale), std::exp(-most)) + (float)call->eps;
        T* to = (T*)call->out + (token * call->heads + head) * value_dim;
        for (long i = 0; i < value_dim; i += LANES) store(to + i, load(out + i) * (scale / divisor), value_dim - i);
    }
    kept_most = most;
}

// Columns [first, first + count) of one head's state, [key_dim, COLUMNS], dense, and its walk through tokens.
struct Columns {
    float* held;
    const long key_dim;

    void read(const float* state, long stride, long count, bool is_new) {
        for (long k = 0; k < key_dim; k++)
            for (long i = 0; i < COLUMNS; i += LANES) {
                const bool is_there = !is_new && i < count;
                store(held + k * COLUMNS + i, is_there ? load(state + k * stride + i, count - i) : Floats{});
            }
    }

    void write(float* state, long stride, long count) const {
        for (long k = 0; k < key_dim; k++)
            for (long i = 0; i < count; i += LANES)
                store(state + k * stride + i, load(held + k * COLUMNS + i), count - i);
    }

    // out = state · key
    void look_up(const float* key, Floats* out) const {
        Floats totals[WIDTH] = {};
        for (long k = 0; k < key_dim; k++)
            for (int i = 0; i < WIDTH; i++) totals[i] += load(held + k * COLUMNS + i * LANES) * key[k];
        for (int i = 0; i < WIDTH; i++) out[i] = totals[i];
    }

    // state = decays * state + key ⊗ added; out = state · query
    void update(const float* decays, const float* key, const Floats* added, const float* query, Floats* out) {
        Floats totals[WIDTH] = {}, values[WIDTH];
        for (int i = 0; i < WIDTH; i++) values[i] = added[i];
        for (long k = 0; k < key_dim; k++) {
            for (int i = 0; i < WIDTH; i++) {
                float* own = held + k * COLUMNS + i * LANES;
                const Floats updated = load(own) * decays[k] + values[i] * key[k];
                store(own, updated);
                totals[i] += updated * query[k];
            }
        }
        for (int i = 0; i < WIDTH; i++) out[i] = totals[i];
    }
};

// Writes how much a head keeps of each of its keys' channels at one token, [key_dim], and returns the head's step.
template <class T> float read_decays(const OuterProductsCall* call, long token, long head, float* decays) {
    const long count = call->decays;
    const float a = call->a[head];
    const Floats low = fill((float)call->dt_low), high = fill((float)call->dt_high);
    Floats step = fill(1), raw{};
    for (long i = 0; i < count; i += LANES) {
        if (call->dt) {
            raw = load((const T*)call->dt + token * call->dt_stride + head * count + i, count - i) +
                  load(call->dt_bias + head * count + i, count - i);
            step = softplus(raw);
            step = step < low ? low : step > high ? high : step;
        }
        const Floats log_decay =
            call->least_log_decay < 0 ? times_sigmoid(fill((float)call->least_log_decay), raw * -a) : step * a;
        store(decays + i, exp2(log_decay * 1.44269504f), count - i);
    }
    if (count == 1) std::fill_n(decays, call->key_dim, decays[0]);
    return step[0];
}

// Takes columns [first, first + count) of one head through one row's tokens. With `beta`, the delta rule.
template <class T> void outer_products(const OuterProductsCall* call, long row, long head, long first, long count) {
    const StepRows rows = rows_of(call);
    const long key_dim = call->key_dim, value_dim = call->value_dim, heads = call->heads;
    const long key_at = head / (heads / call->key_heads) * key_dim, value_at = head * value_dim + first;
    const long padded = round_up(key_dim, LANES);
    float* memory = scratch(key_dim * COLUMNS + 4 * padded);
    float *key = memory + key_dim * COLUMNS, *query = key + padded, *decays = query + padded, *faded = decays + padded;
    float* state = call->state + (rows.slots[row] * heads + head) * key_dim * value_dim + first;
    Columns columns{memory, key_dim};
    columns.read(state, value_dim, count, rows.is_new[row]);

    for (long token = rows.starts[row]; token < rows.starts[row + 1]; token++) {
        const T *k = (const T*)call->k + token * call->k_stride + key_at;
        const T *q = (const T*)call->q + token * call->q_stride + key_at;
        const T *v = (const T*)call->v + token * call->v_stride + value_at;
        const float step = read_decays<T>(call, token, head, decays);
        Floats values[WIDTH] = {}, out[WIDTH], added[WIDTH];
        for (int i = 0; i < WIDTH && i * LANES < count; i++) values[i] = load(v + i * LANES, count - i * LANES);
        if (call->beta) {
            widen_to_length(k, key, key_dim, 1);
            widen_to_length(q, query, key_dim, 1 / std::sqrt((float)key_dim));
            const float gate = number((const T*)call->beta + token * call->beta_stride + head);
            const float beta = (float)call->beta_scale / (1 + std::exp(-gate));
            for (long k = 0; k < key_dim; k++) faded[k] = decays[k] * key[k];
            Floats known[WIDTH];
            columns.look_up(faded, known);
            for (int i = 0; i < WIDTH; i++) added[i] = (values[i] - known[i]) * beta;
        } else {
            widen(k, key, key_dim);
            widen(q, query, key_dim);
            for (int i = 0; i < WIDTH; i++) added[i] = values[i] * step;
        }
        columns.update(decays, key, added, query, out);
        const float skip = call->d ? call->d[head] : 0;
        T* to = (T*)call->out + token * heads * value_dim + value_at;
        for (int i = 0; i < WIDTH && i * LANES < count; i++)
            store(to + i * LANES, out[i] + values[i] * skip, count - i * LANES);
    }
    columns.write(state, value_dim, count);
}

// The gated linear unit for channels [first, first + count) of one row.
template <class T> void unit(const RgLruCall* call, long row, long first, long count) {
    const StepRows rows = rows_of(call);
    const bool is_new = rows.is_new[row];
    for (long at = first; at < first + count; at += LANES) {
        const long left = first + count - at;
        float* state = call->state + rows.slots[row] * call->channels + at;
        const Floats input_bias = load(call->input_bias + at, left), decay_bias = load(call->decay_bias + at, left);
        const Floats log_decay = load(call->log_decay + at, left);
        Floats held = is_new ? Floats{} : load(state, left);
        for (long token = rows.starts[row]; token < rows.starts[row + 1]; token++) {
            const Floats x = load((const T*)call->x + token * call->x_stride + at, left);
            const Floats input = load((const T*)call->input_gate + token * call->input_stride + at, left) + input_bias;
            const Floats decay = load((const T*)call->decay_gate + token * call->decay_stride + at, left) + decay_bias;
            const Floats log_a = times_sigmoid(log_decay, decay);
            Floats factor = fill(1);
            if (!is_new || token > rows.starts[row])
                for (int lane = 0; lane < LANES; lane++) factor[lane] = std::sqrt(-std::expm1(2 * log_a[lane]));
            held = exp2(log_a * 1.44269504f) * held + times_sigmoid(x, input) * factor;
            store((T*)call->out + token * call->channels + at, held, left);
        }
        store(state, held, left);
    }
}

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" int quire_causal_conv1d(const CausalConv1dCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long channels = call->channels, piece = 16 * LANES;
        for_each_piece(rows_of(call), channels, piece, channels * call->width, call->num_threads,
                       [&](long row, long first, long count) { convolve<T>(call, row, first, count); });
    });
}

extern "C" int quire_selective_scan(const SelectiveScanCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_each_piece(rows_of(call), call->channels, COLUMNS, call->channels * call->size, call->num_threads,
                       [&](long row, long first, long count) { scan<T>(call, row, first, count); });
    });
}

extern "C" int quire_mlstm(const MlstmCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long work = call->heads * call->key_dim * call->value_dim;
        for_each_piece(rows_of(call), call->heads, 1, work, call->num_threads,
                       [&](long row, long head, long) { remember<T>(call, row, head); });
    });
}

extern "C" int quire_wkv(const WkvCall* call) {
    constexpr long WORK = 64;  // of two averages and four powers, in multiplications
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_each_piece(rows_of(call), call->channels, COLUMNS, call->channels * WORK, call->num_threads,
                       [&](long row, long first, long count) { average<T>(call, row, first, count); });
    });
}

extern "C" int quire_outer_products(const OuterProductsCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const long pieces = (call->value_dim + COLUMNS - 1) / COLUMNS;
        const long work = call->heads * call->key_dim * call->value_dim;
        for_each_piece(rows_of(call), call->heads * pieces, 1, work, call->num_threads, [&](long row, long i, long) {
            const long first = i % pieces * COLUMNS;
            outer_products<T>(call, row, i / pieces, first, std::min(COLUMNS, call->value_dim - first));
        });
    });
}

// state = a * state + sqrt(1 - a^2) * x * sigmoid(input_gate), with a = exp(log_decay * sigmoid(decay_gate))
extern "C" int quire_rg_lru(const RgLruCall* call) {
    return with_type(call->dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_each_piece(rows_of(call), call->channels, COLUMNS, call->channels, call->num_threads,
                       [&](long row, long first, long count) { unit<T>(call, row, first, count); });
    });
}
