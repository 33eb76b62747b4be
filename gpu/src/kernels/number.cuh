// Numbers of rows that come from outside or go there: ELEMENT 0 (f32), 1 (f16) or 2 (bf16).
#if ELEMENT == 0
typedef float Number;
__device__ __forceinline__ float to_float(Number x) { return x; }
__device__ __forceinline__ Number to_number(float x) { return x; }
#elif ELEMENT == 1
typedef u16 Number;
__device__ __forceinline__ float to_float(Number x) { return half_to_float(x); }
__device__ __forceinline__ Number to_number(float x) { return float_to_half(x); }
#else
typedef u16 Number;
__device__ __forceinline__ float to_float(Number x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ Number to_number(float x) { return float_to_bfloat(x); }
#endif
