// The shapes of wgmma that attention uses: scores, with both operands in shared memory, and sums of values, with the
// weights in registers.
#pragma once
#include "wgmma_sm90.cuh"

#define REGISTERS_8(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define REGISTERS_16 REGISTERS_8(0, 1, 2, 3, 4, 5, 6, 7) ", " REGISTERS_8(8, 9, 10, 11, 12, 13, 14, 15)
#define REGISTERS_32                                                                                                   \
    REGISTERS_16 ", " REGISTERS_8(16, 17, 18, 19, 20, 21, 22, 23) ", " REGISTERS_8(24, 25, 26, 27, 28, 29, 30, 31)
#define REGISTERS_48                                                                                                   \
    REGISTERS_32 ", " REGISTERS_8(32, 33, 34, 35, 36, 37, 38, 39) ", " REGISTERS_8(40, 41, 42, 43, 44, 45, 46, 47)
#define REGISTERS_64                                                                                                   \
    REGISTERS_48 ", " REGISTERS_8(48, 49, 50, 51, 52, 53, 54, 55) ", " REGISTERS_8(56, 57, 58, 59, 60, 61, 62, 63)

// wgmma.m64n128k16: c = x y, or c += x y where `add`; neither is transposed.
__device__ __forceinline__ void wgmma(float (&c)[64], u64 x, u64 y, bool add) {
    asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, %66, 0;\n wgmma.mma_async.sync.aligned.m64n128k16." WGMMA_TYPES
                 " {" REGISTERS_64 "}, %64, %65, add, 1, 1, 0, 0;\n}"
                 : WGMMA_32(c, 0), WGMMA_32(c, 32)
                 : "l"(x), "l"(y), "r"((int)add));
}

// wgmma.m64nNk16, N = 2 * the length of c: c += x y. x is in registers: warp w of the warpgroup holds rows 16 w to
// 16 w + 15 as `mma_m16n8k16` has them. y is transposed in shared memory.
__device__ __forceinline__ void wgmma(float (&c)[16], const u32 (&x)[4], u64 y) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16." WGMMA_TYPES " {" REGISTERS_16
                 "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 1;"
                 : WGMMA_16(c, 0)
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y));
}
__device__ __forceinline__ void wgmma(float (&c)[32], const u32 (&x)[4], u64 y) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16." WGMMA_TYPES " {" REGISTERS_32
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : WGMMA_32(c, 0)
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y));
}
__device__ __forceinline__ void wgmma(float (&c)[48], const u32 (&x)[4], u64 y) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n96k16." WGMMA_TYPES " {" REGISTERS_48
                 "}, {%48, %49, %50, %51}, %52, 1, 1, 1, 1;"
                 : WGMMA_32(c, 0), WGMMA_16(c, 32)
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y));
}
__device__ __forceinline__ void wgmma(float (&c)[64], const u32 (&x)[4], u64 y) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16." WGMMA_TYPES " {" REGISTERS_64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : WGMMA_32(c, 0), WGMMA_32(c, 32)
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y));
}
