// Merges attention over exact tokens with attention over stored ones.
//
// CPU twin: merge_part. Compile-time shape: ELEMENT (1 for f16, 2 for bf16), HEAD_DIM, and GROUP query heads of a
// key/value head.
#include "element.cuh"
#include "primitives_sm80.cuh"

struct MergeArguments {
    u16* out;          // element [sequence][head][GROUP][HEAD_DIM]: attention to the exact tokens, then to all
    const u16* stored; // the same of the stored tokens, up to the rank
    const float* exact_log_sums;  // [sequence][head][GROUP]: log-sum-exp of the scores
    const float* stored_log_sums; // the same of the stored tokens
    const u32* ranks;             // [head]: components of the stored values; null: all
};

// Launch: grid (query heads of a sequence, sequences), HEAD_DIM threads.
extern "C" __global__ void __launch_bounds__(HEAD_DIM) merge(const MergeArguments a) {
    pdl_wait(); // the previous kernels write both parts
    pdl_trigger();
    const u64 query = (u64)blockIdx.y * gridDim.x + blockIdx.x;
    const float exact = a.exact_log_sums[query], stored = a.stored_log_sums[query], most = fmaxf(exact, stored);
    const float own = __expf(exact - most), other = __expf(stored - most), scale = 1 / (own + other);
    const u64 at = query * HEAD_DIM + threadIdx.x;
    const bool is_stored = !a.ranks || threadIdx.x < a.ranks[blockIdx.x / GROUP];
    const float part = is_stored ? to_float(a.stored[at]) : 0;
    a.out[at] = to_element((own * to_float(a.out[at]) + other * part) * scale);
}
