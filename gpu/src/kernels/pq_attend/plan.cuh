// What a block does next: a part of a sequence's items, which are its exact tokens, EXACT at a time, and then its tiles.
struct Plan : Work {
    u32 length, exact_length;
};

static_assert(sizeof(Plan) <= BARRIER - PLAN, "room for the plan");

// The items of a sequence; an empty one has an output, too.
struct Items {
    const Arguments& a;

    __device__ __forceinline__ u32 operator()(u32 sequence) const {
        const u32 exact = a.exact_lengths ? a.exact_lengths[sequence] : 0;
        return max((a.lengths[sequence] + TILE - 1) / TILE + (exact + EXACT - 1) / EXACT, 1u);
    }
};

// For the block's first warp: the first sequence from `next` on.
__device__ __forceinline__ void find_sequence(const Arguments& a, u32 next, Plan& plan) {
    plan.find(a.batch, next, Items{a});
    if (threadIdx.x == 0 && plan.entry < a.batch) {
        plan.length = a.lengths[plan.entry];
        plan.exact_length = a.exact_lengths ? a.exact_lengths[plan.entry] : 0;
    }
}
