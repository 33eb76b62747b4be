// Fills memory with hashed numbers (random.cuh), to time steps without a model or a prompt.
//
// CPU twin of the numbers: kv_device::hashed. Compile-time shape: ELEMENT, 1 (f16) or 2 (bf16). Launch: any.
#include "element.cuh"
#include "random.cuh"

struct FillArguments {
    Element* out; // (n,)
    u64 n;
    u32 tensor;
    float amplitude;
};

extern "C" __global__ void fill(const FillArguments a) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += (u64)gridDim.x * blockDim.x)
        a.out[i] = to_element(hashed(a.tensor, i, a.amplitude));
}

struct FillWordsArguments {
    u32* out; // (n,)
    u64 n;
    u32 tensor;
};

// The hashes themselves: codes of a product quantizer, four to a word.
extern "C" __global__ void fill_words(const FillWordsArguments a) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += (u64)gridDim.x * blockDim.x)
        a.out[i] = mix((u32)i ^ mix(a.tensor));
}
