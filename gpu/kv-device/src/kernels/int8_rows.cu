// Rows to host memory in 8 bits, and back. int8_rows.cuh has the format; on sm_90 int8_load_sm90.cu replaces `load`.
#include "int8_rows.cuh"

constexpr int THREADS = 256, WARPS = THREADS / LANES;
constexpr int OF_LANE = D / LANES; // components of a lane that quantizes
constexpr int IN_FLIGHT = 4;       // loads of a lane
static_assert(OF_LANE == 2 || OF_LANE == 4, "a lane stores 2 or 4 bytes");

struct StoreArguments {
    const Element* keys; // [sequence][head][capacity][D]
    const Element* values;
    u8* records;       // [sequence][head][stored][RECORD]
    const u32* firsts; // [sequence]: the first token after the sinks, or null for `first`
    const u32* counts; // [sequence]: how many tokens, or null for `count`
    u32 first, count;
    u32 heads, sinks, ring, capacity, stored;
};

// Quantizes the rows of tokens after the sinks, in a ring or in order (a ring larger than any position).
//
// Launch: grid (heads, sequences, any number), THREADS threads. A warp has a token at a time.
extern "C" __global__ void __launch_bounds__(THREADS) store(const StoreArguments a) {
    const u32 lane = threadIdx.x % LANES, warp = blockIdx.z * WARPS + threadIdx.x / LANES, sequence = blockIdx.y;
    const u32 first = a.firsts ? a.firsts[sequence] : a.first, count = a.counts ? a.counts[sequence] : a.count;
    const u64 head = (u64)sequence * a.heads + blockIdx.x;
    for (u32 i = warp; i < count; i += gridDim.z * WARPS) {
        const u32 token = first + i, row = a.sinks + token % a.ring;
        u8* record = a.records + (head * a.stored + token) * RECORD;
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const Element* from = (side ? a.values : a.keys) + (head * a.capacity + row) * D + lane * OF_LANE;
            float x[OF_LANE], largest = 0;
#pragma unroll
            for (int c = 0; c < OF_LANE; c++) x[c] = to_float(from[c]), largest = fmaxf(largest, fabsf(x[c]));
#pragma unroll
            for (int bit = 1; bit < GROUP / OF_LANE; bit *= 2)
                largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, bit));
            const u16 scale = scale_of(largest);
            const float unit = half_to_float(scale) > 0 ? 1.f / half_to_float(scale) : 0;
            u32 bytes = 0;
#pragma unroll
            for (int c = 0; c < OF_LANE; c++) bytes |= quantized(x[c], unit, scale, lane * OF_LANE + c) << 8 * c;
            u8* to = record + side * D + lane * OF_LANE;
            if constexpr (OF_LANE == 4)
                *reinterpret_cast<u32*>(to) = bytes;
            else
                *reinterpret_cast<u16*>(to) = (u16)bytes;
        }
    }
}

// Dequantizes tokens.
//
// Launch: grid (any number, heads), THREADS threads. Over PCIe the number of outstanding reads limits the throughput: a
// warp has IN_FLIGHT times RECORDS records in flight. A block per multiprocessor leaves room for the next kernel.
extern "C" __global__ void __launch_bounds__(THREADS, 4) load(const LoadArguments a) {
    const u64 block = blockIdx.y * gridDim.x + blockIdx.x, blocks = (u64)gridDim.y * gridDim.x;
    prefetch_global_l2(a.prefetch, a.prefetch_len, block * THREADS + threadIdx.x, blocks * THREADS);
    pdl_wait();
    pdl_trigger();
    constexpr u32 RECORDS = LANES / SHARERS; // of a warp's load
    const Tokens tokens(a, blockIdx.y);
    const u32 lane = threadIdx.x % LANES, thread = blockIdx.x * THREADS + threadIdx.x;
    const u32 step = gridDim.x * WARPS * RECORDS;
    for (u32 first = thread / SHARERS; first < tokens.count; first += step * IN_FLIGHT) {
        uint4 groups[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u32 token = first + i * step;
            if (token < tokens.count)
                groups[i] = reinterpret_cast<const uint4*>(tokens.record(token))[lane % SHARERS];
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const u32 token = first + i * step;
            if (token < tokens.count) tokens.dequantize(groups[i], tokens.place(token), lane);
        }
    }
}
