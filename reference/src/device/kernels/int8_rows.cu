// Exact rows in 8 bits in host memory: the key and the value of a token and head as one record.
//
// CPU twin: RowFormat::Int8, whose bytes these are. Compile-time shape: ELEMENT, HEAD_DIM 64 or 128. A record has a
// byte for every component of the key, then of the value, then the f16 scales of both, one for GROUP components. It is
// padded to pieces of 16 bytes.
#include "element.cuh"
#include "primitives_sm80.cuh"
#include "warp.cuh"

constexpr int D = HEAD_DIM, GROUP = 32, SCALES = 2 * D / GROUP, PIECE = 16;
constexpr int RECORD = (2 * D + 2 * SCALES + PIECE - 1) / PIECE * PIECE, PIECES = RECORD / PIECE;
constexpr int BYTE_PIECES = 2 * D / PIECE; // the next piece has all scales
constexpr int THREADS = 256, WARPS = THREADS / LANES;
constexpr int OF_LANE = D / LANES, SHARERS = GROUP / OF_LANE; // components of a lane; lanes of a scale
constexpr int IN_FLIGHT = 4;                                  // records of a warp
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
            for (int bit = 1; bit < SHARERS; bit *= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, bit));
            const u16 scale = float_to_half(fminf(largest / 127.f, 65504.f));
            const float unit = half_to_float(scale) > 0 ? 1.f / half_to_float(scale) : 0;
            u32 bytes = 0;
#pragma unroll
            for (int c = 0; c < OF_LANE; c++) {
                const int byte = (int)fminf(fmaxf(roundf(x[c] * unit), -128.f), 127.f);
                bytes |= (u32)(byte & 0xff) << 8 * c;
            }
            u8* to = record + side * D + lane * OF_LANE;
            if constexpr (OF_LANE == 4)
                *reinterpret_cast<u32*>(to) = bytes;
            else
                *reinterpret_cast<u16*>(to) = (u16)bytes;
            if (lane % SHARERS == 0)
                reinterpret_cast<u16*>(record + 2 * D)[side * (SCALES / 2) + lane / SHARERS] = scale;
        }
    }
}

struct LoadArguments {
    const uint4* records; // [head][stored][PIECES]; a head is one of a sequence
    const u32* tokens;    // [head][list_len]: after the sinks, or null for the first `count`
    const u32* places;    // [head][list_len]: the row of each, or null for rows in order from `first_place` on
    const u32* counts;    // [head]: how many tokens, or null for `count`
    Element* keys;        // [head][capacity][D]
    Element* values;
    const u8* prefetch; // bytes for L2, as in `pq::Gather`
    u64 prefetch_len;
    u32 stored, list_len, count, first_place, capacity;
};

// Dequantizes listed rows, or the first ones.
//
// Launch: grid (any number, heads), THREADS threads. Over PCIe the number of outstanding reads limits the throughput:
// lanes read a record in pieces, IN_FLIGHT records at a time. A block a multiprocessor leaves room for the next kernel.
extern "C" __global__ void __launch_bounds__(THREADS, 4) load(const LoadArguments a) {
    const u64 block = blockIdx.y * gridDim.x + blockIdx.x, blocks = (u64)gridDim.y * gridDim.x;
    prefetch_global_l2(a.prefetch, a.prefetch_len, block * THREADS + threadIdx.x, blocks * THREADS);
    pdl_wait();
    pdl_trigger();
    const u32 lane = threadIdx.x % LANES, warp = blockIdx.x * WARPS + threadIdx.x / LANES, head = blockIdx.y;
    const u32 count = a.counts ? a.counts[head] : a.count;
    const u32* tokens = a.tokens + (u64)head * a.list_len;
    const u32* places = a.places + (u64)head * a.list_len;
    const uint4* records = a.records + (u64)head * a.stored * PIECES;
    for (u32 first = warp * IN_FLIGHT; first < count; first += gridDim.x * WARPS * IN_FLIGHT) {
        uint4 pieces[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            pieces[i] = make_uint4(0, 0, 0, 0);
            if (first + i >= count || lane >= PIECES) continue;
            const u32 token = a.tokens ? tokens[first + i] : first + i;
            pieces[i] = records[(u64)token * PIECES + lane];
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const uint4 piece = pieces[i];
            // The scale of the lane's 16 bytes is half `lane / 2` of the piece after them.
            u32 scales = __shfl_sync(FULL, piece.x, BYTE_PIECES), words[3];
            words[0] = __shfl_sync(FULL, piece.y, BYTE_PIECES), words[1] = __shfl_sync(FULL, piece.z, BYTE_PIECES);
            words[2] = __shfl_sync(FULL, piece.w, BYTE_PIECES);
#pragma unroll
            for (int word = 1; word < 4; word++)
                if (lane / 4 == word) scales = words[word - 1];
            if (first + i >= count || lane >= BYTE_PIECES) continue;
            const float scale = half_to_float((u16)(scales >> lane / 2 % 2 * 16));
            const u32 bytes[4] = {piece.x, piece.y, piece.z, piece.w};
            u32 elements[8];
#pragma unroll
            for (int pair = 0; pair < 8; pair++) {
                const int shifted = (int)(bytes[pair / 2] << (pair % 2 ? 0 : 16)); // the pair in the high half
                elements[pair] = pack_elements(scale * (float)(shifted << 8 >> 24), scale * (float)(shifted >> 24));
            }
            const u32 row = a.places ? places[first + i] : a.first_place + first + i, at = lane % (BYTE_PIECES / 2);
            const bool is_values = lane >= BYTE_PIECES / 2;
            Element* side = is_values ? a.values : a.keys;
            uint4* to = reinterpret_cast<uint4*>(side + ((u64)head * a.capacity + row) * D) + 2 * at;
            to[0] = make_uint4(elements[0], elements[1], elements[2], elements[3]);
            to[1] = make_uint4(elements[4], elements[5], elements[6], elements[7]);
        }
    }
}
