// Two components of a query's sum, with maximum and sum of weights. A thread has as many at once, so that all have some.
struct Sum {
    float2 value = make_float2(0, 0);
    float max = NOTHING, weight = 0;

    __device__ __forceinline__ void scale(float factor) { value.x *= factor, value.y *= factor, weight *= factor; }

    __device__ __forceinline__ void add(const float2& other, float other_weight, float factor) {
        value.x += factor * other.x, value.y += factor * other.y, weight += factor * other_weight;
    }

    // Divides by the sum of weights.
    __device__ __forceinline__ void write(const Arguments& a, u64 query, int component) const {
        const float divisor = weight == 0 ? 1 : weight;
        const u32 pair = float_to_element(value.x / divisor) | (u32)float_to_element(value.y / divisor) << 16;
        *reinterpret_cast<u32*>(a.out + query * D + component) = pair;
        if (component == 0 && a.log_sum_exp)
            a.log_sum_exp[query] = weight == 0 ? -infinity() : (max + log2f(weight)) * 0.69314718f;
    }
};

// Adds the tiles to the results of the warp.
__device__ __forceinline__ void add_tiles(const State& state, const Lane& lane) {
    float* results = warp_results(lane);
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
        float* result = results + q * RESULT;
        const bool mine = lane.holds && lane.turn == q / COPIES;
        const float weight = warp_sum(mine ? state.weight[q % COPIES] : 0);
        const float max = warp_max(mine ? state.max[q % COPIES] : NOTHING);
        const float exact_max = result[D], exact_weight = result[D + 1], top = fmaxf(max, exact_max);
        const float keep = exp2_approx(max - top), keep_exact = exp2_approx(exact_max - top);
        state.sums.add_to(result, q, keep_exact, keep, lane);
        __syncwarp(); // all lanes have read
        if (lane.lane == 0) result[D] = top, result[D + 1] = keep_exact * exact_weight + keep * weight;
    }
}

// The warps' results become the block's, and those of the blocks that share a sequence the output.
__device__ __forceinline__ void finish_sequence(const Arguments& a, Plan& plan, const State& state) {
    const Lane lane;
    const Place at;
    add_tiles(state, lane);
    __syncthreads();
    float* results = reinterpret_cast<float*>(shared + RESULTS);
    const u64 sequence_head = (u64)plan.sequence * a.heads + at.head;
    const u64 first_query = sequence_head * a.group + at.slice * QUERIES;
    const u32 live = min(a.group - at.slice * QUERIES, (u32)QUERIES);
    // A block shares at most its first and its last sequence with other blocks, so it has two places for partial results.
    const u32 pieces = plan.pieces, first_block = plan.first_block;
    float* partial = a.partials + ((u64)at.index() * 2 + (at.block == first_block)) * QUERIES * RESULT;
    for (int i = 2 * lane.thread; i < QUERIES * D; i += 2 * THREADS) {
        const int q = i / D, d = i % D;
        const float* result = results + q * RESULT;
        Sum sum;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum.max = fmaxf(sum.max, result[w * QUERIES * RESULT + D]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float* of_warp = result + w * QUERIES * RESULT;
            sum.add(*reinterpret_cast<const float2*>(of_warp + d), of_warp[D + 1], exp2_approx(of_warp[D] - sum.max));
        }
        if (pieces == 1) {
            if (q < live) sum.write(a, first_query + q, d);
        } else {
            *reinterpret_cast<float2*>(partial + q * RESULT + d) = sum.value;
            if (d == 0) *reinterpret_cast<float2*>(partial + q * RESULT + D) = make_float2(sum.max, sum.weight);
        }
    }
    if (pieces == 1) return;

    __syncthreads();
    if (lane.thread == 0) {
        u32* arrived = a.arrived + sequence_head * at.slices + at.slice;
        plan.last = add_and_order(arrived, 1) == pieces - 1;
        if (plan.last) *arrived = 0; // for the next launch
    }
    __syncthreads();
    if (!plan.last) return;
    // To the first block it was its last sequence, to the others their first.
    const float* pieces_of_first = a.partials + ((u64)at.index() - at.block + first_block) * 2 * QUERIES * RESULT;
    for (int i = 2 * lane.thread; i < QUERIES * D; i += 2 * THREADS) {
        const int q = i / D, d = i % D;
        Sum sum;
        constexpr int IN_FLIGHT = QUERIES > 2 ? 16 : 8; // by the registers that the warps leave
        for (u32 base = 0; base < pieces; base += IN_FLIGHT) {
            float2 value[IN_FLIGHT], max_weight[IN_FLIGHT];
            const float before = sum.max;
            const float* piece = pieces_of_first + (u64)base * 2 * QUERIES * RESULT + q * RESULT;
#pragma unroll
            for (int p = 0; p < IN_FLIGHT; p++) {
                const bool there = base + p < pieces;
                const float* from = piece + p * 2 * QUERIES * RESULT + (p == 0 && base == 0 ? QUERIES * RESULT : 0);
                value[p] = there ? __ldcg(reinterpret_cast<const float2*>(from + d)) : make_float2(0, 0);
                max_weight[p] = there ? __ldcg(reinterpret_cast<const float2*>(from + D)) : make_float2(NOTHING, 0);
            }
#pragma unroll
            for (int p = 0; p < IN_FLIGHT; p++) sum.max = fmaxf(sum.max, max_weight[p].x);
            sum.scale(exp2_approx(before - sum.max));
#pragma unroll
            for (int p = 0; p < IN_FLIGHT; p++) sum.add(value[p], max_weight[p].y, exp2_approx(max_weight[p].x - sum.max));
        }
        if (q < live) sum.write(a, first_query + q, d);
    }
}
