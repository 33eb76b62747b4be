// The same for codes of up to 12 bits a token, subspaces together, in one kernel.
//
// A token's scores depend on its joint code alone, of which there are 4,096 at most. So tokens are counted, not scored: a cluster of
// BLOCKS blocks has a row; every block counts the joint codes of its tokens, all read each other's counts, and each finds softmax numbers
// and cut by itself from as many codes as it has threads times CODES. Only then does it look at its tokens again, to write. Of sm_90.
//
// Measured against it: scores a token, four kernels (search.cu).

constexpr int BLOCKS = 8, THREADS = 1024, WARPS = THREADS / LANES;
constexpr int JOINT_BITS = M * NBITS, JOINT = 1 << JOINT_BITS, KSUB = 1 << NBITS;
constexpr int CODES = JOINT > THREADS ? JOINT / THREADS : 1; // of a thread
constexpr int AT_ONCE = 4;                                   // queries
constexpr int EACH = 16;                                     // tokens of a thread at a time
constexpr u8 NOT = 0, TIE = 1, ABOVE = 2;

struct Shared {
    u32 counts[JOINT > THREADS ? JOINT : THREADS]; // of this block's tokens in the middle
    float luts[GROUP][M * KSUB];
    float of_warps[WARPS][AT_ONCE];
    u32 buckets[2048];
    u8 chosen[JOINT > THREADS ? JOINT : THREADS];
};

__device__ __forceinline__ u32 block_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 load_of_block(const u32* shared, u32 rank) {
    u32 address, x;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}

// Joint codes of 16 tokens, `token` being a multiple of 16, two in a word.
__device__ __forceinline__ void load_codes(const u8* codes, u32 token, u32 (&joint)[EACH / 2]) {
#pragma unroll
    for (int i = 0; i < EACH / 2; i++) joint[i] = 0;
#pragma unroll
    for (int j = 0; j < M; j++) {
        const u8* run = run_of<M, NBITS>(codes, token, j);
#pragma unroll
        for (int i = 0; i < EACH / 4; i++) {
            const u32 four = four_codes_of<NBITS>(run, token % BLOCK_TOKENS + 4 * i);
            joint[2 * i] |= permute_bytes(four, 0, 0x4140) << NBITS * j;
            joint[2 * i + 1] |= permute_bytes(four, 0, 0x4342) << NBITS * j;
        }
    }
}
__device__ __forceinline__ u32 nth(const u32 (&joint)[EACH / 2], int i) { return joint[i / 2] >> 16 * (i % 2) & 0xffff; }

__device__ __forceinline__ float score_of(const float* luts, u32 joint) {
    float score = 0;
#pragma unroll
    for (int j = 0; j < M; j++) score += luts[j * KSUB + (joint >> NBITS * j & (KSUB - 1))];
    return score;
}

// Calls `use(query, score)` for the tokens that were not counted, sinks and recent ones: they are few, and every block has them all.
template <class Use>
__device__ __forceinline__ void for_others(const Shared& shared, const Middle& middle, const u8* codes, int first_query, const Use& use) {
    const u32 sinks = middle.first, others = sinks + middle.n - middle.end;
    for (u32 i = threadIdx.x; i < others; i += THREADS) {
        const u32 token = i < sinks ? i : middle.end + i - sinks;
        u32 joint = 0;
#pragma unroll
        for (int j = 0; j < M; j++) joint |= code_of<NBITS>(run_of<M, NBITS>(codes, token, j), token % BLOCK_TOKENS) << NBITS * j;
#pragma unroll
        for (int q = 0; q < AT_ONCE; q++)
            if (first_query + q < GROUP) use(q, score_of(shared.luts[first_query + q], joint));
    }
}

// Sums, or greatest, of AT_ONCE numbers over the block.
template <class Operation>
__device__ __forceinline__ void reduce(Shared& shared, float (&x)[AT_ONCE], const Operation& operation) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    auto over_lanes = [&](float y) {
#pragma unroll
        for (int step = LANES / 2; step; step /= 2) y = operation(y, __shfl_xor_sync(FULL, y, step));
        return y;
    };
#pragma unroll
    for (int q = 0; q < AT_ONCE; q++) x[q] = over_lanes(x[q]);
    __syncthreads();
    if (lane == 0)
#pragma unroll
        for (int q = 0; q < AT_ONCE; q++) shared.of_warps[warp][q] = x[q];
    __syncthreads();
#pragma unroll
    for (int q = 0; q < AT_ONCE; q++) x[q] = over_lanes(shared.of_warps[lane][q]);
}

// The cut among keys that occur `count` times each.
__device__ Cut find_cut(Shared& shared, const u32 (&keys)[CODES], const u32 (&count)[CODES], u32 wanted) {
    u32 high = 0;
    int shift = 20; // 11 bits, then 10, then 10
    for (;;) {
        const int low_bits = shift == 20 ? 11 : 10;
        for (int i = threadIdx.x; i < 2048; i += THREADS) shared.buckets[i] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < CODES; i++)
            if (count[i] && (shift == 20 || keys[i] >> shift >> 10 == high))
                atomicAdd(&shared.buckets[keys[i] >> shift & ((1u << low_bits) - 1)], count[i]);
        __syncthreads();
        const Found found = find_bucket<THREADS, 2048>(shared.buckets, wanted);
        high = high << low_bits | found.bucket;
        wanted -= found.above;
        if (wanted == found.count) return keys_from(high << shift);
        if (shift == 0) return {high, wanted};
        shift -= 10;
    }
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1) pq_search_joint(const Arguments a) {
    __shared__ Shared shared;
    wait_for_previous_kernel();
    let_next_kernel_start();
    const u32 row = blockIdx.y, rank = block_in_cluster();
    const Middle middle(a, row / a.heads);
    const u8* codes = a.codes + row * a.code_stride;
    for (int i = threadIdx.x; i < GROUP * M * KSUB; i += THREADS) (&shared.luts[0][0])[i] = a.luts[(u64)row * GROUP * M * KSUB + i];
    for (int i = threadIdx.x; i < JOINT || i < THREADS; i += THREADS) shared.counts[i] = 0;
    __syncthreads();

    const u32 span = (middle.n + BLOCKS * EACH - 1) / (BLOCKS * EACH) * EACH, first = rank * span, end = min(middle.n, first + span);
    for (u32 token = first + EACH * threadIdx.x; token < end; token += EACH * THREADS) {
        u32 joint[EACH / 2];
        load_codes(codes, token, joint);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (token + i < end && middle.has(token + i)) atomicAdd(&shared.counts[nth(joint, i)], 1);
    }
    cluster_barrier();
    u32 before[CODES], all[CODES];
#pragma unroll
    for (int i = 0; i < CODES; i++) {
        before[i] = all[i] = 0;
#pragma unroll
        for (u32 block = 0; block < BLOCKS; block++) {
            const u32 count = load_of_block(shared.counts + threadIdx.x + i * THREADS, block);
            if (block < rank) before[i] += count;
            all[i] += count;
        }
    }

    float weights[CODES] = {};
#pragma unroll
    for (int first_query = 0; first_query < GROUP; first_query += AT_ONCE) {
        float scores[CODES][AT_ONCE], max[AT_ONCE], sum[AT_ONCE];
#pragma unroll
        for (int q = 0; q < AT_ONCE; q++) {
            max[q] = -infinity(), sum[q] = 0;
#pragma unroll
            for (int i = 0; i < CODES; i++) {
                scores[i][q] = first_query + q < GROUP ? score_of(shared.luts[first_query + q], (threadIdx.x + i * THREADS) & (JOINT - 1)) : 0;
                if (all[i]) max[q] = fmaxf(max[q], scores[i][q]);
            }
        }
        for_others(shared, middle, codes, first_query, [&](int q, float score) { max[q] = fmaxf(max[q], score); });
        reduce(shared, max, [](float x, float y) { return fmaxf(x, y); });
        const Softmax nothing = no_scores();
        float base[AT_ONCE];
#pragma unroll
        for (int q = 0; q < AT_ONCE; q++) {
            base[q] = max[q] == nothing.max ? 0 : max[q];
#pragma unroll
            for (int i = 0; i < CODES; i++) {
                scores[i][q] = weight_of(scores[i][q], base[q], 1);
                if (all[i]) sum[q] += scores[i][q] * (float)all[i];
            }
        }
        for_others(shared, middle, codes, first_query, [&](int q, float score) { sum[q] += weight_of(score, base[q], 1); });
        reduce(shared, sum, [](float x, float y) { return x + y; });
#pragma unroll
        for (int q = 0; q < AT_ONCE; q++) {
            if (first_query + q >= GROUP) continue;
            const float scale = 1.f / sum[q];
#pragma unroll
            for (int i = 0; i < CODES; i++) weights[i] = combine(weights[i], scores[i][q] * scale);
            if (a.stats && rank == 0 && threadIdx.x == 0) {
                float* stats = a.stats + ((u64)row * GROUP + first_query + q) * 2;
                stats[0] = max[q], stats[1] = sum[q];
            }
        }
    }

    u32 keys[CODES];
#pragma unroll
    for (int i = 0; i < CODES; i++) keys[i] = key_of(weights[i]);
    const u32 competing = middle.end - middle.first;
    Cut cut = middle.wanted ? all_keys() : no_keys();
    if (middle.wanted && middle.wanted < competing) cut = find_cut(shared, keys, all, middle.wanted);

    u32 above = 0, ties = 0; // of the blocks before this one
#pragma unroll
    for (int i = 0; i < CODES; i++) {
        const bool is_above = keys[i] > cut.key, is_tie = keys[i] == cut.key;
        above += is_above ? before[i] : 0, ties += is_tie ? before[i] : 0;
        shared.chosen[threadIdx.x + i * THREADS] = is_above ? ABOVE : is_tie ? TIE : NOT;
    }
    above = __reduce_add_sync(FULL, above), ties = __reduce_add_sync(FULL, ties);
    if (threadIdx.x % LANES) above = ties = 0;
    u32 above_before, ties_before;
    scan_chosen<THREADS>(above, ties, above_before, ties_before);
    // All counts have been read: blocks may leave.
    cluster_barrier();

    const Output out{a.tokens + row * a.tokens_len, a.tokens_len, middle};
    if (rank == 0 && threadIdx.x == 0 && row % a.heads == 0) a.counts[row / a.heads] = middle.found();
    for (u32 start = first; start < end; start += EACH * THREADS) {
        const u32 token = start + EACH * threadIdx.x;
        u32 joint[EACH / 2], is_above = 0, is_tie = 0;
        if (token < end) {
            load_codes(codes, token, joint);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (token + i >= end) continue;
                if (!middle.has(token + i)) {
                    out.put_anyway(token + i);
                    continue;
                }
                const u8 chosen = shared.chosen[nth(joint, i)];
                is_above |= (chosen == ABOVE) << i, is_tie |= (chosen == TIE) << i;
            }
        }
        u32 place = __popc(is_above), tie = __popc(is_tie), all_above, all_ties;
        scan_chosen<THREADS>(place, tie, all_above, all_ties);
        place += above_before, tie += ties_before;
        above_before += all_above, ties_before += all_ties;
        for (u32 rest = is_above | is_tie; rest; rest &= rest - 1) {
            const int i = __ffs(rest) - 1;
            if (is_above >> i & 1) {
                out.put_chosen(place + min(tie, cut.ties), token + i);
                place++;
            } else {
                if (tie < cut.ties) out.put_chosen(place + tie, token + i);
                tie++;
            }
        }
    }
}
