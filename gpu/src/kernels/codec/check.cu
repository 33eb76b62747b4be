// Compares the CRC-32 of the bytes of each block of a frame with the checksum in the frame's index.
//
// CPU twin: codec_core::Frame::check_block. Bitstream: codec-core/FORMAT.md. The frame is on the device as it was sent;
// the host has checked its header and index, but not its payload. There is no compile-time shape.
//
// A CRC is a remainder of polynomials over GF(2): the message, with its first 32 bits inverted, times x^32, modulo
// POLYNOMIAL. Bits are reflected: the highest bit of a word is the coefficient of 1. Leading zeros do not change the
// remainder, so words are counted from the end, whatever the length. Prepending INITIAL to a message inverts its first
// 32 bits, even if it has fewer.
//
// Launch: grid (blocks of tokens, planes), 256 threads. A thread reduces every 256th word by Horner's rule; a product
// with x^(32 * 256) takes four look-ups in shared memory. The threads' remainders are combined pairwise. The floor is
// reading the frame.
#include "codec/frame.cuh"
#include "warp.cuh"

constexpr int THREADS = 256, WARPS = THREADS / LANES;
constexpr u32 POLYNOMIAL = 0xedb88320; // the coefficients below x^32, which are also x^32 modulo the polynomial
constexpr u32 INITIAL = 0x9226f562;    // its product with x^32 is all ones

struct Arguments {
    const u8* frame;
    u32* wrong; // maximum of (index of the block in the frame) + 1 over blocks with a wrong checksum
    u32 frame_planes, frame_blocks, tiles;
    u32 first_plane; // first plane of this launch
};

// The product of two remainders.
__device__ __forceinline__ u32 product(u32 a, u32 b) {
    u32 sum = 0;
#pragma unroll
    for (int bit = 31; bit >= 0; bit--) {
        sum ^= a & 0 - (b >> bit & 1);
        a = a >> 1 ^ (POLYNOMIAL & 0 - (a & 1));
    }
    return sum;
}

// The words of INITIAL followed by a block. Word 0 is the last one.
struct Words {
    const u8 *start, *end;

    __device__ u32 count() const { return (u32)(end - start + sizeof(INITIAL) + 3) / 4; }
    // The number of words that are entirely within the block.
    __device__ u32 whole() const { return (u32)(end - start) / 4; }

    __device__ __forceinline__ u32 of_block(u32 i) const {
        const u64 address = (u64)end - 4 * (i + 1), aligned = address & ~3ull;
        const u32 low = *(const u32*)aligned, high = address & 3 ? *(const u32*)(aligned + 4) : 0;
        return __funnelshift_r(low, high, 8 * (address & 3));
    }

    // Any word: bytes in front of INITIAL are 0.
    __device__ u32 any(u32 i) const {
        if (i < whole()) return of_block(i);
        u32 word = 0;
        for (int byte = 0; byte < 4; byte++) {
            const long long at = end - start - 4ll * (i + 1) + byte;
            const u32 value = at >= 0 ? start[at] : at >= -4 ? INITIAL >> 8 * (at + 4) & 0xff : 0;
            word |= value << 8 * byte;
        }
        return word;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) codec_check(Arguments a) {
    __shared__ u32 products[4][256]; // [byte of a remainder][its value]: product with x^(32 * THREADS)
    __shared__ u32 remainders[WARPS];
    u32 power = POLYNOMIAL;
#pragma unroll
    for (int n = 1; n < THREADS; n *= 2) power = product(power, power);
#pragma unroll
    for (int byte = 0; byte < 4; byte++) products[byte][threadIdx.x] = product(power, threadIdx.x << 8 * byte);
    __syncthreads();

    const FrameIndex index(a.frame, a.frame_planes, a.frame_blocks, a.tiles);
    const u64 entry = (u64)(a.first_plane + blockIdx.y) * a.frame_blocks + blockIdx.x;
    const Words words{index.start(entry), index.end(entry)};
    u32 remainder = 0;
    auto add = [&](u32 word) {
        remainder = products[0][remainder & 0xff] ^ products[1][remainder >> 8 & 0xff] ^
                    products[2][remainder >> 16 & 0xff] ^ products[3][remainder >> 24] ^ word;
    };
    u32 rounds = (words.count() + THREADS - 1) / THREADS;
    const u32 whole = words.whole() / THREADS; // rounds whose words are all within the block
    for (; rounds > whole; rounds--) add(words.any((rounds - 1) * THREADS + threadIdx.x));
#pragma unroll 4
    for (; rounds; rounds--) add(words.of_block((rounds - 1) * THREADS + threadIdx.x));

    // A thread's remainder ends at its last word, threadIdx.x words from the end of the block.
    power = POLYNOMIAL;
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        remainder ^= product(power, __shfl_down_sync(FULL, remainder, step));
        power = product(power, power);
    }
    const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    if (lane == 0) remainders[warp] = remainder;
    __syncthreads();
    if (warp > 0) return;
    remainder = remainders[lane % WARPS];
#pragma unroll
    for (int step = 1; step < WARPS; step *= 2) {
        remainder ^= product(power, __shfl_down_sync(FULL, remainder, step));
        power = product(power, power);
    }
    if (lane == 0 && ~product(POLYNOMIAL, remainder) != index.checksum(entry)) atomicMax(a.wrong, (u32)entry + 1);
}
