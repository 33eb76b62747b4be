// KIVI's 4 bits, the baseline for product codes: keys quantized by channel over 64 tokens, values by token over 64
// channels, min + step * code with both in f16. Blocks of 64 tokens leave the window at once. CUDA cores read the codes
// in place; scales are applied to queries and weights, so that a code costs one multiply-add per query.
//
// CPU twins: PerChannel, PerToken, CodedStore. Compile-time shape: ELEMENT of rows and queries (1 for f16, 2 for bf16),
// HEAD_DIM, 64 or 128, and GROUP query heads of a key/value head.
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "warp.cuh"

constexpr u32 BLOCK = 64, THREADS = 128, WARPS = THREADS / LANES, SPANS = HEAD_DIM / 64; // spans of 64 channels

// A block of a head. Words of a code row are those of 8 channels, or 8 tokens, the first in the low bits.
struct CodeBlock {
    uint4 keys[HEAD_DIM / 32][BLOCK];          // 32 channels of a token
    uint4 values[BLOCK / 32][HEAD_DIM];        // 32 tokens of a channel
    u16 key_min[HEAD_DIM], key_step[HEAD_DIM]; // f16
    u16 value_min[SPANS][BLOCK], value_step[SPANS][BLOCK];
};

struct Window {
    u32 sinks, recent, ring, capacity; // token t after the sinks is row sinks + t % ring of a head's `capacity`

    // Coded tokens after the sinks in a sequence of `tokens`.
    __device__ __forceinline__ u32 coded(u32 tokens) const {
        return tokens > sinks + recent ? (tokens - sinks - recent) / BLOCK * BLOCK : 0;
    }
    __device__ __forceinline__ u32 row(u32 t) const { return sinks + t % ring; }
};

struct Scale {
    float min, step;

    __device__ __forceinline__ static u16 half(float x) { return float_to_half(fminf(fmaxf(x, -65504.f), 65504.f)); }
    // Rounds both and stores them.
    __device__ __forceinline__ static Scale fit(float low, float high, u16& min, u16& step) {
        min = half(low), step = half((high - low) / 15);
        return {half_to_float(min), half_to_float(step)};
    }
    __device__ __forceinline__ u32 code(float x) const {
        return step > 0 ? (u32)fminf(fmaxf(roundf((x - min) / step), 0), 15) : 0;
    }
};

// Eight codes of a word as floats.
__device__ __forceinline__ void unpack(u32 word, float (&codes)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) codes[i] = __uint_as_float(0x4b000000 | word >> 4 * i & 15) - 8388608.f;
}

struct EncodeArguments {
    const u16* rows;      // element [layer][keys and values][sequence][head][window.capacity][HEAD_DIM]
    CodeBlock* blocks;    // [layer][sequence][head][blocks]
    const u32* positions; // [sequence]: of the next token; null for blocks `first` and so on of one layer
    u64 rows_side;        // elements of the keys of a layer
    u32 blocks_of_head, heads, first;
    Window window;
};

// Quantizes the block that the next token evicts from the window, if any, in every layer; or blocks of a prompt.
//
// Launch: grid (heads, sequences, layers or blocks), THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS) encode(const EncodeArguments a) {
    __shared__ u8 codes[BLOCK][HEAD_DIM + 4];
    const u32 head = blockIdx.x, sequence = blockIdx.y, i = threadIdx.x;
    u32 layer = 0, block = a.first + blockIdx.z;
    if (a.positions) {
        const u32 tokens = a.positions[sequence] + 1, coded = a.window.coded(tokens);
        if (coded == 0 || coded == a.window.coded(tokens - 1)) return;
        layer = blockIdx.z, block = coded / BLOCK - 1;
    }
    const u64 own = (u64)sequence * a.heads + head;
    const u64 layer_heads = (u64)gridDim.y * a.heads; // of a prompt there is one layer
    CodeBlock& to = a.blocks[(layer * layer_heads + own) * a.blocks_of_head + block];
    const u16* keys = a.rows + 2 * layer * a.rows_side + own * a.window.capacity * HEAD_DIM;
    const u16* values = keys + a.rows_side;
    auto at = [&](u32 t) { return (u64)a.window.row(block * BLOCK + t) * HEAD_DIM; };

    for (u32 c = i; c < HEAD_DIM; c += THREADS) {
        float low = infinity(), high = -infinity();
        for (u32 t = 0; t < BLOCK; t++) {
            const float x = to_float(keys[at(t) + c]);
            low = fminf(low, x), high = fmaxf(high, x);
        }
        const Scale scale = Scale::fit(low, high, to.key_min[c], to.key_step[c]);
        for (u32 t = 0; t < BLOCK; t++) codes[t][c] = scale.code(to_float(keys[at(t) + c]));
    }
    __syncthreads();
    for (u32 j = i; j < HEAD_DIM / 8 * BLOCK; j += THREADS) {
        const u32 t = j / (HEAD_DIM / 8), c = j % (HEAD_DIM / 8) * 8;
        u32 word = 0;
        for (u32 k = 0; k < 8; k++) word |= (u32)codes[t][c + k] << 4 * k;
        reinterpret_cast<u32*>(&to.keys[c / 32][t])[c / 8 % 4] = word;
    }
    __syncthreads();
    for (u32 j = i; j < SPANS * BLOCK; j += THREADS) {
        const u32 t = j / SPANS, span = j % SPANS;
        const u16* row = values + at(t) + span * 64;
        float low = infinity(), high = -infinity();
        for (u32 c = 0; c < 64; c++) {
            const float x = to_float(row[c]);
            low = fminf(low, x), high = fmaxf(high, x);
        }
        const Scale scale = Scale::fit(low, high, to.value_min[span][t], to.value_step[span][t]);
        for (u32 c = 0; c < 64; c++) codes[t][span * 64 + c] = scale.code(to_float(row[c]));
    }
    __syncthreads();
    for (u32 j = i; j < BLOCK / 8 * HEAD_DIM; j += THREADS) {
        const u32 c = j % HEAD_DIM, t = j / HEAD_DIM * 8;
        u32 word = 0;
        for (u32 k = 0; k < 8; k++) word |= (u32)codes[t + k][c] << 4 * k;
        reinterpret_cast<u32*>(&to.values[t / 32][c])[t / 8 % 4] = word;
    }
}

struct DecodeArguments {
    const CodeBlock* blocks; // [head][blocks_of_head]
    u16* keys;               // element [head][capacity][HEAD_DIM], from the first token after the sinks on
    u16* values;             // the same of values
    u32 blocks_of_head, capacity;
};

// Rows of one sequence from its codes. Launch: grid (blocks, heads), THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS) decode(const DecodeArguments a) {
    const CodeBlock& from = a.blocks[(u64)blockIdx.y * a.blocks_of_head + blockIdx.x];
    const u64 at = ((u64)blockIdx.y * a.capacity + blockIdx.x * BLOCK) * HEAD_DIM;
    for (u32 i = threadIdx.x; i < BLOCK * HEAD_DIM; i += THREADS) {
        const u32 t = i / HEAD_DIM, c = i % HEAD_DIM, span = c / 64;
        const u32 key = reinterpret_cast<const u32*>(&from.keys[c / 32][t])[c / 8 % 4] >> 4 * (c % 8) & 15;
        const u32 value = reinterpret_cast<const u32*>(&from.values[t / 32][c])[t / 8 % 4] >> 4 * (t % 8) & 15;
        a.keys[at + i] = to_element(half_to_float(from.key_min[c]) + half_to_float(from.key_step[c]) * key);
        a.values[at + i] =
            to_element(half_to_float(from.value_min[span][t]) + half_to_float(from.value_step[span][t]) * value);
    }
}

struct AttendArguments {
    const CodeBlock* blocks; // [sequence][head][blocks_of_head]
    const u16* keys;         // element [sequence][head][window.capacity][HEAD_DIM]
    const u16* values;
    const u16* queries;      // element [sequence][head][GROUP][HEAD_DIM]
    const u32* positions;    // [sequence]: of the last token
    float* partials;         // [sequence][head][part][GROUP][HEAD_DIM + 2]: sums of weighted values, maximum, sum
    u32 blocks_of_head, heads;
    float scale;             // of the scores, in units of log2
    Window window;
};

constexpr u32 PARTIAL = HEAD_DIM + 2;
// A thread has a token and half of the channels of its key, then a channel and a part of the tokens.
constexpr u32 VALUE_PARTS = THREADS / HEAD_DIM, VALUE_TOKENS = BLOCK / VALUE_PARTS;

// One part of a head's tokens, 64 at a time: a pass of scores, then a pass of values.
struct Pass {
    float queries[GROUP][HEAD_DIM];     // times the steps of the keys
    float scores[2][GROUP][BLOCK];      // of both halves of the channels
    float weights[GROUP][SPANS][BLOCK]; // times the steps of the values
    float offsets[WARPS][GROUP];        // of the scores
    float mins[GROUP][SPANS];           // sums of weights times minima
    float rescale[GROUP], max[GROUP], sum[GROUP];

    // Loads queries (GROUP, HEAD_DIM) times the steps of the keys, and their products with the minima.
    template <class Scales>
    __device__ __forceinline__ void take_queries(const u16* from, Scales scale_of) {
        float offset[GROUP] = {};
        for (u32 c = threadIdx.x; c < HEAD_DIM; c += THREADS) {
            const Scale key = scale_of(c);
#pragma unroll
            for (u32 g = 0; g < GROUP; g++) {
                const float q = to_float(from[g * HEAD_DIM + c]);
                queries[g][c] = q * key.step, offset[g] += q * key.min;
            }
        }
#pragma unroll
        for (u32 g = 0; g < GROUP; g++) {
            offset[g] = warp_sum(offset[g]);
            if (threadIdx.x % LANES == 0) offsets[threadIdx.x / LANES][g] = offset[g];
        }
    }

    // Adds the weighted values of a channel to `out`, of a part of the tokens; `values_of(t, x)` are those of eight.
    template <class Values>
    __device__ __forceinline__ void add_values(float (&out)[GROUP], u32 channel, u32 part, Values values_of) const {
        const u32 span = channel / 64;
#pragma unroll
        for (u32 g = 0; g < GROUP; g++) out[g] = out[g] * rescale[g] + (part == 0 ? mins[g][span] : 0);
        for (u32 t = part * VALUE_TOKENS; t < (part + 1) * VALUE_TOKENS; t += 8) {
            float x[8];
            values_of(t, x);
#pragma unroll
            for (u32 g = 0; g < GROUP; g++)
#pragma unroll
                for (u32 k = 0; k < 8; k++) out[g] += weights[g][span][t + k] * x[k];
        }
    }

    // Turns scores into weights. Lanes of a warp have the tokens of a query; `scales_of(span, t)` are a value's.
    template <class Scales>
    __device__ __forceinline__ void softmax(u32 count, float scale, Scales scales_of) {
        const u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        for (u32 g = warp; g < GROUP; g += WARPS) {
            float offset = 0, score[2], most = max[g];
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) offset += offsets[w][g];
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                const u32 t = lane + k * LANES;
                score[k] = t < count ? (scores[0][g][t] + scores[1][g][t] + offset) * scale : -infinity();
                most = fmaxf(most, score[k]);
            }
            most = warp_max(most);
            float total = 0, minima[SPANS] = {};
#pragma unroll
            for (u32 k = 0; k < 2; k++) {
                const u32 t = lane + k * LANES;
                const float weight = exp2f(score[k] - most);
                total += weight;
#pragma unroll
                for (u32 span = 0; span < SPANS; span++) {
                    const Scale value = t < count ? scales_of(span, t) : Scale{0, 0};
                    weights[g][span][t] = weight * value.step, minima[span] += weight * value.min;
                }
            }
            total = warp_sum(total);
#pragma unroll
            for (u32 span = 0; span < SPANS; span++) minima[span] = warp_sum(minima[span]);
            if (lane == 0) {
                rescale[g] = exp2f(max[g] - most), max[g] = most, sum[g] = sum[g] * rescale[g] + total;
#pragma unroll
                for (u32 span = 0; span < SPANS; span++) mins[g][span] = minima[span];
            }
            __syncwarp();
        }
    }
};

// Launch: grid (parts, heads, sequences), THREADS threads. The last part has the exact tokens, too.
extern "C" __global__ void __launch_bounds__(THREADS) attend(const AttendArguments a) {
    __shared__ Pass pass;
    const u32 part = blockIdx.x, parts = gridDim.x, head = blockIdx.y, sequence = blockIdx.z, i = threadIdx.x;
    const u32 tokens = a.positions[sequence] + 1, coded = a.window.coded(tokens);
    const u64 own = (u64)sequence * a.heads + head;
    pdl_wait(); // the previous kernel writes queries and rows; `positions` are older
    pdl_trigger();
    const u16* queries = a.queries + own * GROUP * HEAD_DIM;
    const u32 token = i % BLOCK, half = i / BLOCK, channel = i % HEAD_DIM, value_part = i / HEAD_DIM;
    if (i < GROUP) pass.max[i] = -1e30f, pass.sum[i] = 0;
    float out[GROUP] = {};

    const u32 blocks = coded / BLOCK, first = (u64)blocks * part / parts, end = (u64)blocks * (part + 1) / parts;
    for (u32 b = first; b < end; b++) {
        const CodeBlock& block = a.blocks[own * a.blocks_of_head + b];
        pass.take_queries(queries, [&](u32 c) {
            return Scale{half_to_float(block.key_min[c]), half_to_float(block.key_step[c])};
        });
        uint4 keys[HEAD_DIM / 64];
#pragma unroll
        for (u32 k = 0; k < HEAD_DIM / 64; k++) keys[k] = block.keys[half * (HEAD_DIM / 64) + k][token];
        __syncthreads();
        float scores[GROUP] = {};
#pragma unroll
        for (u32 k = 0; k < HEAD_DIM / 64; k++) {
            const u32 words[4] = {keys[k].x, keys[k].y, keys[k].z, keys[k].w};
#pragma unroll
            for (u32 w = 0; w < 4; w++) {
                float x[8];
                unpack(words[w], x);
                const u32 c = half * (HEAD_DIM / 2) + k * 32 + w * 8;
#pragma unroll
                for (u32 g = 0; g < GROUP; g++)
#pragma unroll
                    for (u32 j = 0; j < 8; j++) scores[g] += pass.queries[g][c + j] * x[j];
            }
        }
#pragma unroll
        for (u32 g = 0; g < GROUP; g++) pass.scores[half][g][token] = scores[g];
        __syncthreads();
        pass.softmax(BLOCK, a.scale, [&](u32 span, u32 t) {
            return Scale{half_to_float(block.value_min[span][t]), half_to_float(block.value_step[span][t])};
        });
        __syncthreads();
        pass.add_values(out, channel, value_part, [&](u32 t, float (&x)[8]) {
            unpack(reinterpret_cast<const u32*>(&block.values[t / 32][channel])[t / 8 % 4], x);
        });
        __syncthreads();
    }

    if (part == parts - 1) {
        const u64 at = own * a.window.capacity * HEAD_DIM;
        const u16 *keys = a.keys + at, *values = a.values + at;
        const u32 exact = tokens - coded, sinks = min(a.window.sinks, tokens);
        auto row = [&](u32 e) { return (u64)(e < sinks ? e : a.window.row(coded + e - sinks)) * HEAD_DIM; };
        for (u32 e = 0; e < exact; e += BLOCK) {
            const u32 count = min(exact - e, BLOCK);
            pass.take_queries(queries, [&](u32) { return Scale{0, 1}; });
            __syncthreads();
            float scores[GROUP] = {};
            if (token < count)
                for (u32 c = half * (HEAD_DIM / 2); c < (half + 1) * (HEAD_DIM / 2); c++) {
                    const float x = to_float(keys[row(e + token) + c]);
#pragma unroll
                    for (u32 g = 0; g < GROUP; g++) scores[g] += pass.queries[g][c] * x;
                }
#pragma unroll
            for (u32 g = 0; g < GROUP; g++) pass.scores[half][g][token] = scores[g];
            __syncthreads();
            pass.softmax(count, a.scale, [&](u32, u32) { return Scale{0, 1}; });
            __syncthreads();
            pass.add_values(out, channel, value_part, [&](u32 t, float (&x)[8]) {
                for (u32 k = 0; k < 8; k++) x[k] = t + k < count ? to_float(values[row(e + t + k) + channel]) : 0;
            });
            __syncthreads();
        }
    }

    float* to = a.partials + (own * parts + part) * GROUP * PARTIAL;
    if constexpr (VALUE_PARTS > 1) { // sums over the parts of the tokens
#pragma unroll
        for (u32 g = 0; g < GROUP; g++)
            if (value_part == 1) pass.queries[g][channel] = out[g];
        __syncthreads();
#pragma unroll
        for (u32 g = 0; g < GROUP; g++)
            if (value_part == 0) out[g] += pass.queries[g][channel];
    }
#pragma unroll
    for (u32 g = 0; g < GROUP; g++)
        if (value_part == 0) to[g * PARTIAL + channel] = out[g];
    if (i < GROUP) to[i * PARTIAL + HEAD_DIM] = pass.max[i], to[i * PARTIAL + HEAD_DIM + 1] = pass.sum[i];
}

struct MergeArguments {
    const float* partials; // as above
    u16* out;              // element [sequence][head][GROUP][HEAD_DIM]
    u32 parts;
};

// Launch: grid (heads, GROUP, sequences), HEAD_DIM threads.
extern "C" __global__ void __launch_bounds__(HEAD_DIM) merge(const MergeArguments a) {
    pdl_wait();
    pdl_trigger();
    const u64 head = (u64)blockIdx.z * gridDim.x + blockIdx.x;
    const float* from = a.partials + (head * a.parts * GROUP + blockIdx.y) * PARTIAL;
    float most = -infinity(), sum = 0, out = 0;
    for (u32 p = 0; p < a.parts; p++) most = fmaxf(most, from[(u64)p * GROUP * PARTIAL + HEAD_DIM]);
    for (u32 p = 0; p < a.parts; p++) {
        const float* part = from + (u64)p * GROUP * PARTIAL;
        const float scale = exp2f(part[HEAD_DIM] - most);
        out += scale * part[threadIdx.x], sum += scale * part[HEAD_DIM + 1];
    }
    a.out[(head * GROUP + blockIdx.y) * HEAD_DIM + threadIdx.x] = to_element(out / sum);
}
