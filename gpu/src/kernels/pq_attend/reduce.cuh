// Divides by the sum of weights and writes one component of one query head.
__device__ __forceinline__ void write_output(const Arguments& a, u64 query, int component, float max, float weight, float sum) {
    a.out[query * D + component] = float_to_element(weight == 0 ? 0 : sum / weight);
    if (component == 0 && a.log_sum_exp)
        a.log_sum_exp[query] = weight == 0 ? -infinity() : (max + log2f(weight)) * 0.69314718f;
}

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
    for (int i = lane.thread; i < QUERIES * D; i += THREADS) {
        const int q = i / D, d = i % D;
        const float* result = results + q * RESULT;
        float top = NOTHING, sum = 0, weight = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, result[w * QUERIES * RESULT + D]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float keep = exp2_approx(result[w * QUERIES * RESULT + D] - top);
            sum += keep * result[w * QUERIES * RESULT + d];
            weight += keep * result[w * QUERIES * RESULT + D + 1];
        }
        if (pieces == 1) {
            if (q < live) write_output(a, first_query + q, d, top, weight, sum);
        } else {
            partial[q * RESULT + d] = sum;
            if (d == 0) partial[q * RESULT + D] = top, partial[q * RESULT + D + 1] = weight;
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
    for (int i = lane.thread; i < QUERIES * D; i += THREADS) {
        const int q = i / D, d = i % D;
        float top = NOTHING, sum = 0, weight = 0;
        constexpr int IN_FLIGHT = 16;
        for (u32 base = 0; base < pieces; base += IN_FLIGHT) {
            float value[IN_FLIGHT], max[IN_FLIGHT], piece_weight[IN_FLIGHT];
            const float before = top;
            const float* piece = pieces_of_first + (u64)base * 2 * QUERIES * RESULT + q * RESULT;
#pragma unroll
            for (int p = 0; p < IN_FLIGHT; p++) {
                const bool there = base + p < pieces;
                const float* from = piece + p * 2 * QUERIES * RESULT + (p == 0 && base == 0 ? QUERIES * RESULT : 0);
                value[p] = there ? __ldcg(from + d) : 0;
                max[p] = there ? __ldcg(from + D) : NOTHING;
                piece_weight[p] = there ? __ldcg(from + D + 1) : 0;
            }
#pragma unroll
            for (int p = 0; p < IN_FLIGHT; p++) top = fmaxf(top, max[p]);
            sum *= exp2_approx(before - top), weight *= exp2_approx(before - top);
#pragma unroll
            for (int p = 0; p < IN_FLIGHT; p++) {
                const float keep = exp2_approx(max[p] - top);
                sum += keep * value[p];
                weight += keep * piece_weight[p];
            }
        }
        if (q < live) write_output(a, first_query + q, d, top, weight, sum);
    }
}
