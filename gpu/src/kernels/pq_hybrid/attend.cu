// Last kernel of hybrid attention: one softmax over the coded values of all tokens but the selected ones, and the exact
// rows of the selected tokens, the sinks and the window.
//
// shape.cuh has the compile-time shape and explains the method. Launch: grid (block of a head's work, head), THREADS
// threads, one block per multiprocessor. If CONCURRENT_SELECT, the selection runs concurrently and hides no tokens: the
// sums of coded values depend only on the scores, and the selected tokens are subtracted afterwards (CodedRows). A row
// that loses too much to rounding by that is summed again (recenter.cuh).
#include "pq_hybrid/rows.cuh"
#include "softmax_reduce.cuh"
#ifdef HISTOGRAM_VALUES // two ways to sum coded values
#include "pq_hybrid/code_weights.cuh"
static_assert(GROUP <= 2, "the queries of a row of counters");
#else
#include "pq_hybrid/coded_rows.cuh"
#include "pq_hybrid/values.cuh"
#endif
#include "pq_hybrid/recenter.cuh"

constexpr int WARPS = ATTEND_WARPS, THREADS = WARPS * LANES;

struct Shared {
    u8 values[VALUE_SHARED_BYTES]; // centroids or counters
    float results[WARPS][VEC][RESULT];
    float bases[GROUP];
    Plan<AttendArguments> plan;
    // In shared memory, for the registers of the loops.
    u32 is_again; // whether the block attends to the whole sequence, once more
    u32 lost;     // whether an output has lost too much to rounding
};
extern __shared__ __align__(128) u8 shared[];
static_assert(sizeof(Shared) <= ATTEND_SHARED_BYTES, "the host reserves it");
__device__ __forceinline__ Shared& block() { return *reinterpret_cast<Shared*>(shared); }
__device__ __forceinline__ float* warp_results() { return &block().results[threadIdx.x / LANES][0][0]; }

// The block's part of a sequence's exact rows, ROWS_PER_ITEM at a time, and of its tiles. Both are split evenly over
// the blocks: the loads of an item have a long latency, and a warp has few items.
struct Part {
    u32 exact_items, item_begin, item_end, tile_begin, tile_end;

    __device__ __forceinline__ explicit Part(const Plan<AttendArguments>& plan) {
        const u32 units = plan.units;
        const auto before = [&](u32 unit, u32 count) {
            return unit == units ? count : min((u32)((float)unit * ((float)count / (float)units)), count);
        };
        exact_items = (plan.exact_length + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
        const u32 items = exact_items + (plan.selected + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
        const u32 tiles = (plan.length + TILE - 1) / TILE;
        item_begin = before(plan.from, items), item_end = before(plan.to, items);
        tile_begin = before(plan.from, tiles), tile_end = before(plan.to, tiles);
    }
};

// Sums the coded values of all tokens.
__device__ __forceinline__ void attend_to_tiles(const AttendArguments& a) {
    const Plan<AttendArguments>& plan = block().plan;
    const u64 row = (u64)plan.entry * a.heads + blockIdx.y;
    const Part part(plan);
    const TileWalk<WARPS> walk(part.tile_begin, threadIdx.x / LANES, (part.item_end - part.item_begin) % WARPS);
    sum_tiles(a, plan, row, walk, part.tile_end, block().bases, shared, warp_results());
}

// Subtracts the coded values of the selected tokens from the warp's results.
__device__ __forceinline__ void subtract_selected(const AttendArguments& a) {
    // In reverse order: the few warps with items in `attend_to_rows` are not those with items here.
    const u32 warp = WARPS - 1 - threadIdx.x / LANES;
    const Plan<AttendArguments>& plan = block().plan;
    const Part part(plan);
    // The items of `attend_to_rows`, without those of exact tokens, which have no codes.
    u32 item = part.item_begin + warp;
    if (item < part.exact_items) item += (part.exact_items - item + WARPS - 1) / WARPS * WARPS;
    if (!warp_uniform(item < part.item_end)) return;
    CodedRows rows;
    rows.begin(block().bases);
    for (; warp_uniform(item < part.item_end); item += WARPS) {
        const u32 first = (item - part.exact_items) * ROWS_PER_ITEM;
        const u32* selected = a.selected + ((u64)plan.entry * a.heads + blockIdx.y) * a.selected_len + first;
        rows.subtract(a, plan.entry, blockIdx.y, selected, plan.selected - first, shared);
    }
    rows.add_to(warp_results());
}

// Adds the exact rows to the warp's results.
__device__ __forceinline__ void attend_to_rows(const AttendArguments& a) {
    const u32 warp = threadIdx.x / LANES;
    const Plan<AttendArguments>& plan = block().plan;
    const Part part(plan);
    if (!warp_uniform(part.item_begin + warp < part.item_end)) return;
    const u64 row = (u64)plan.entry * a.heads + blockIdx.y;
    const u16* queries = a.queries + row * GROUP * D;
    RowSums rows;
    rows.clear();
    for (u32 item = part.item_begin + warp; warp_uniform(item < part.item_end); item += WARPS) {
        if (warp_uniform(item < part.exact_items)) {
            const u32 first = item * ROWS_PER_ITEM;
            const u64 at = row * a.exact_capacity + first;
            rows.add(queries, a.exact_keys, a.exact_values, plan.exact_length - first, a.scale,
                     [&](u32 i) { return at + i; });
        } else {
            const u32 first = (item - part.exact_items) * ROWS_PER_ITEM;
            const u32* list = a.row_list + row * a.selected_len + first;
            rows.add(queries, a.row_keys, a.row_values, plan.selected - first, a.scale,
                     [&](u32 i) { return row * a.row_capacity + (a.row_list ? list[i] : first + i); });
        }
    }
    rows.add_to(warp_results());
}

// On sm_90, unless CONCURRENT_SELECT, registers are left for one more warp per scheduler: blocks of a gather run
// concurrently.
#if __CUDA_ARCH__ >= 900
constexpr int NEIGHBORS = IS_BESIDE ? 0 : 4 * LANES;
#else
constexpr int NEIGHBORS = 0;
#endif

extern "C" __global__ void __launch_bounds__(THREADS + NEIGHBORS, 1) pq_hybrid_attend(const AttendArguments a) {
    Plan<AttendArguments>& plan = block().plan;
    // If IS_ADAPTIVE, the plan reads the numbers of rows that the selection writes.
    const bool waits_first = !IS_BESIDE && !a.rows_arrive;
    if (warp_uniform(threadIdx.x >= LANES)) {
        prepare_values<THREADS - LANES>(a, blockIdx.y, threadIdx.x - LANES, shared);
        if (waits_first) pdl_wait(), pdl_trigger();
    } else {
        if (waits_first) pdl_wait(), pdl_trigger();
        plan.find_first(a);
        if (IS_BESIDE) await_scores(a);
    }
    if (threadIdx.x == 0) block().is_again = block().lost = 0;
    __syncthreads();
    while (warp_uniform(plan.entry < a.batch)) {
        const u64 row = (u64)plan.entry * a.heads + blockIdx.y;
        if (warp_uniform(!block().is_again)) {
            if (const u32 query = threadIdx.x / LANES; query < GROUP) {
                const float base = weight_base(row_stats(a, row, query));
                if (threadIdx.x % LANES == 0) block().bases[query] = base;
            }
            __syncthreads();
            if (threadIdx.x == 0) plan.find_sharers();
        }
        attend_to_tiles(a);
        if (!waits_first) pdl_wait(), pdl_trigger();
        if (IS_BESIDE && warp_uniform(!block().is_again)) subtract_selected(a);
        attend_to_rows(a);
        add_coded_sums(a, blockIdx.y, block().bases, shared, warp_results());
        reduce<VEC, D, WARPS, RESULT>(&block().results[0][0][0], GROUP, plan, blockIdx.x,
                                      a.partials + ((u64)blockIdx.y * gridDim.x + blockIdx.x) * 2 * VEC * RESULT,
                                      a.counts + row, [&](u32 query, int component, const Sum& sum) {
                                          *reinterpret_cast<u32*>(a.out + (row * GROUP + query) * D + component) =
                                              sum.normalized();
                                          if (component > 0) return;
                                          if (a.log_sum_exp) a.log_sum_exp[row * GROUP + query] = sum.log_sum_exp();
                                          if (is_lost(sum, block().bases[query])) block().lost = 1;
                                      });
        __syncthreads();
        const bool recenters = warp_uniform(!block().is_again && block().lost);
        __syncthreads(); // all threads have read
        if (recenters) {
            recenter<WARPS>(a.scores_of(row), plan.length, a.selected + row * a.selected_len,
                            IS_BESIDE ? plan.selected : 0, &block().results[0][0][0], block().bases);
            if (threadIdx.x == 0) plan.take_whole(blockIdx.x);
        } else if (threadIdx.x == 0) {
            plan.find_next(a);
        }
        if (threadIdx.x == 0) block().is_again = recenters, block().lost = 0;
        __syncthreads();
    }
}
