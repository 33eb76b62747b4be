// Decode attention on product-quantized keys and values (MILLION, DAC 2025, III-B), with exact tokens beside them.
//
// Compile-time shape: HEAD_DIM 64 or 128; QUERIES 1 to 4 (query heads of a group that one block serves, SLICES of them a
// group); KEY_BITS, VALUE_BITS 4, 6 or 8; KEY_SUB, VALUE_SUB 2, 4 or 8 components a code; COPIES 1 or 2 of the key table;
// WARPS; PAGED or not; BFLOAT or not.
//
// A decoded vector is WORDS = HEAD_DIM / 2 words of two halves. The tables of a head lie in shared memory with one row of
// 256 bytes a code, so that the address of a word is one byte permutation of (code, lane's offset), and so that 32 lanes that
// look up 32 different words never meet in a bank, whatever the codes. What follows from that:
//
// * Keys. Lane 4 g + l looks up words of tokens g and g + 8 of 16, but lanes of different g at different words: row g of the
//   matrix multiply-add has its words in an order of its own (a "variant"). A column of the other operand is a query in
//   the order of one variant, so that one element a row of the product is a score, and it is whole. With one table there
//   are 8 variants and one query an instruction; a second table with its halves of 32 words swapped leaves 4 variants and two
//   queries.
// * Values. Lane 4 g + l looks up word g of four chunks of 8 in rotated order for 8 tokens, and byte permutations
//   turn pairs of tokens into the operand; the weights are masked to the chunk that a column stands for.
// * Every warp works alone, with its own softmax, on tiles of 32 tokens whose codes arrive in registers. Scores are powers of
//   two; sums are rescaled when a maximum grows by more than 8, which halves still hold.
//
// The sequences of a batch lie behind each other as work items (an item is a tile, or 8 exact tokens), and the BLOCKS of a head
// cut that list into equal parts: each block finds its part from the lengths, on the device. A sequence that several blocks
// share is reduced by the last of them, in the order of the blocks.

constexpr int D = HEAD_DIM, WORDS = D / 2, HALVES = D / 64; // HALVES: 32-word halves of a row
constexpr int TILE = 32;
constexpr int EXACT = 8; // exact tokens of a work item
constexpr int ROW = 256; // bytes
constexpr int CHUNKS = WORDS / 4; // of 16 bytes, in a row of a table as it comes
constexpr int THREADS = WARPS * LANES;
constexpr int PAIRS = (QUERIES + 1) / 2;
constexpr int TURNS = (QUERIES + COPIES - 1) / COPIES; // multiply-adds per key operand

// A code stands for SUB / 2 words, m words apart: word w has components (w % m) * SUB + 2 (w / m) and the next.
template <int SUB>
__device__ __forceinline__ constexpr int component(int word) {
    return (word % (D / SUB)) * SUB + word / (D / SUB) * 2;
}

// How a lane's codes of one tile lie in memory, for keys and values alike: in the order in which they are used, but for words
// that share a code. LOADS times WIDTH 32-bit words a lane, [load][lane][width].
template <int BITS, int SUB>
struct Packed {
    static constexpr int CODES = TILE * WORDS / (SUB / 2) / LANES;
    static constexpr int EXPANDED = CODES / 4; // registers with a code a byte
    static constexpr int WORDS32 = CODES * BITS / 32;
    static constexpr int WIDTH = BITS == 6 ? WORDS32 / 3 : WORDS32 < 4 ? WORDS32 : 4;
    static constexpr int LOADS = WORDS32 / WIDTH;
    static constexpr int TILE_BYTES = WORDS32 * 4 * LANES;
    u32 words[WORDS32];

    __device__ __forceinline__ void load(const u8* tile, int lane) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) load_streaming<WIDTH>(words + i * WIDTH, tile + (i * LANES + lane) * WIDTH * 4);
    }

    __device__ __forceinline__ void expand(u32 (&codes)[EXPANDED]) const {
        if constexpr (BITS == 8) {
#pragma unroll
            for (int i = 0; i < EXPANDED; i++) codes[i] = words[i];
        } else if constexpr (BITS == 4) {
#pragma unroll
            for (int i = 0; i < WORDS32; i++) {
                codes[2 * i] = words[i] & 0x0f0f0f0fu;
                codes[2 * i + 1] = words[i] >> 4 & 0x0f0f0f0fu;
            }
        } else { // three words hold four: the fourth in the others' high bits
#pragma unroll
            for (int i = 0; i < EXPANDED / 4; i++) {
                const u32 a = words[3 * i], b = words[3 * i + 1], c = words[3 * i + 2];
                codes[4 * i] = a & 0x3f3f3f3fu;
                codes[4 * i + 1] = b & 0x3f3f3f3fu;
                codes[4 * i + 2] = c & 0x3f3f3f3fu;
                codes[4 * i + 3] = (a >> 6 & 0x03030303u) | (b >> 4 & 0x0c0c0c0cu) | (c >> 2 & 0x30303030u);
            }
        }
    }
};
using Keys = Packed<KEY_BITS, KEY_SUB>;
using Values = Packed<VALUE_BITS, VALUE_SUB>;

// Which code a look-up of keys uses: of tokens 16 `half` + 8 `high` + g, word 32 `part` + 16 `middle` + 4 (step ^ (g & 3)) + l.
__device__ __forceinline__ constexpr int key_code(int half, int part, int step, int middle, int high) {
    constexpr int M = D / KEY_SUB, MIDDLES = M < 32 ? 1 : 2, PARTS = M < 64 ? 1 : 2;
    return ((half * PARTS + part % PARTS) * 4 + step) * MIDDLES * 2 + middle % MIDDLES * 2 + high;
}

// Which code a look-up of values uses: of tokens 4 `half` + l + 8 (2 `high` + `odd`), word 32 `part` + 8 ((step + l) & 3) + g.
__device__ __forceinline__ constexpr int value_code(int half, int step, int high, int part, int odd) {
    constexpr int M = D / VALUE_SUB, STEPS = M < 32 ? 2 : 4, PARTS = M < 64 ? 1 : 2;
    return (((half * STEPS + step % STEPS) * 2 + high) * PARTS + part % PARTS) * 2 + odd;
}

// Shared memory.
constexpr int KEY_TABLE = 0, KEY_ROWS = 1 << KEY_BITS, VALUE_ROWS = 1 << VALUE_BITS;
constexpr bool FAR_COPY = COPIES == 2 && D == 128; // else the second copy is the second half of the rows
constexpr int COPY_DISTANCE = 65536;               // one bit of the address
constexpr int VALUE_TABLE = (FAR_COPY ? COPY_DISTANCE : 0) + KEY_ROWS * ROW;
constexpr int WEIGHTS = VALUE_TABLE + VALUE_ROWS * ROW;           // [WARPS][2 PAIRS][TILE] halves
constexpr int RESULTS = WEIGHTS + WARPS * PAIRS * 2 * TILE * 2;   // [WARPS][RESULT] floats
constexpr int RESULT = D + 4;                                     // components, maximum, sum, padding
constexpr int PLAN = RESULTS + WARPS * RESULT * 4;
constexpr int SHARED = PLAN + 80;
extern __shared__ __align__(128) u8 shared[];

// The host computes these, too.
static_assert(SHARED == SHARED_BYTES && Keys::TILE_BYTES == KEY_TILE_BYTES && Values::TILE_BYTES == VALUE_TILE_BYTES, "layout");

struct Arguments {
    const u8* key_codes;   // [page][head][tile of page][tile bytes]
    const u8* value_codes;
    const u8* key_table;   // [head][row][WORDS] pairs of halves
    const u8* value_table;
    const u16* queries;    // [sequence][head][query of group][D]
    const u32* lengths;    // [sequence] coded tokens
    const u32* pages;      // [sequence][page of sequence]; not read unless PAGED, a sequence is then its own page
    const u16* exact_keys; // [sequence][head][exact_capacity][D]
    const u16* exact_values;
    const u32* exact_lengths; // [sequence], or null
    float* partials;       // [block][2][QUERIES][RESULT]
    u32* arrived;          // [sequence][head][slice], zeros
    u16* out;              // as queries
    float* log_sum_exp;    // [sequence][head][query of group], or null
    u32 batch, heads, group;
    u32 blocks;            // of a head and slice
    u32 page_tiles, max_pages, exact_capacity;
    float scale;           // of scores, times log2 e
};

// Which thread of the block this is. Read anew wherever it is made, so that nothing of it stays in registers over the loop on
// tiles, which has none to spare.
struct Lane {
    int thread, warp, lane, g, l; // lane = 4 g + l
    int turn;                     // which of the TURNS products holds this lane's scores
    bool holds;                   // whether any does

    __device__ __forceinline__ Lane() {
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        warp = thread / LANES, lane = thread % LANES, g = lane / 4, l = lane % 4;
        turn = COPIES == 1 ? (l - g / 2) & 3 : l ^ (g & 3);
        holds = turn < TURNS;
    }
};

// Which head, slice of its group, and part of its work the block has; read anew, too.
struct Place {
    u32 slices, block, head, slice;

    __device__ __forceinline__ Place(const Arguments& a) {
        u32 index;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
        slices = (a.group + QUERIES - 1) / QUERIES;
        block = index % a.blocks, head = index / a.blocks / slices, slice = index / a.blocks % slices;
    }
};

// What a block does next, worked out by its first warp: a part of a sequence's items.
struct Plan {
    u64 total, begin, end; // items of the batch, and the block's
    u64 passed;            // items of the sequences before `group`
    u32 group;             // the 32 sequences that the current one is among
    u32 sequence, length, exact_length;
    u32 item, item_end;       // of the sequence; the exact tokens come first
    u32 first_block, pieces;  // the blocks that share the sequence
    u32 last;                 // whether this block was the last of them to arrive
};

__device__ __forceinline__ u32 items_of(const Arguments& a, u32 sequence, u32& length, u32& exact_length) {
    if (sequence >= a.batch) return 0;
    length = a.lengths[sequence];
    exact_length = a.exact_lengths ? a.exact_lengths[sequence] : 0;
    return max((length + TILE - 1) / TILE + (exact_length + EXACT - 1) / EXACT, 1u); // an empty one has an output, too
}

__device__ __forceinline__ void find_part(const Arguments& a, Plan& plan) {
    const u32 lane = threadIdx.x, block = Place(a).block;
    u64 total = 0;
    for (u32 group = 0; group < a.batch; group += LANES) {
        u32 length, exact_length;
        total += __reduce_add_sync(FULL, items_of(a, group + lane, length, exact_length));
    }
    if (lane == 0) {
        plan.total = total, plan.begin = total * block / a.blocks, plan.end = total * (block + 1) / a.blocks;
        plan.passed = 0, plan.group = 0;
    }
    __syncwarp();
}

// The first sequence from `next` on that the block has a part in; the batch's size if there is none.
__device__ __forceinline__ void find_sequence(const Arguments& a, u32 next, Plan& plan) {
    const int lane = threadIdx.x;
    const u64 begin = plan.begin, end = plan.end;
    u64 passed = plan.passed;
    u32 group = plan.group;
    for (; group < a.batch && passed < end; group += LANES) {
        u32 length, exact_length;
        const u32 items = items_of(a, group + lane, length, exact_length);
        u32 up_to = items;
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) {
            const u32 before = __shfl_up_sync(FULL, up_to, step);
            if (lane >= step) up_to += before;
        }
        const u64 to = passed + up_to, from = to - items;
        const u32 touched = __ballot_sync(FULL, group + lane >= next && items > 0 && to > begin && from < end);
        if (touched) {
            if (lane == __ffs(touched) - 1) {
                plan.passed = passed, plan.group = group;
                plan.sequence = group + lane, plan.length = length, plan.exact_length = exact_length;
                plan.item = (u32)(max(from, begin) - from), plan.item_end = (u32)(min(to, end) - from);
                plan.first_block = (u32)(((from + 1) * a.blocks - 1) / plan.total);
                plan.pieces = (u32)((to * a.blocks - 1) / plan.total) - plan.first_block + 1;
            }
            __syncwarp();
            return;
        }
        passed += __shfl_sync(FULL, up_to, LANES - 1);
    }
    if (lane == 0) plan.sequence = a.batch;
    __syncwarp();
}

// Divides by the sum of weights and writes one component of one query head.
__device__ __forceinline__ void write_output(const Arguments& a, u64 query, int component, float max, float weight, float sum) {
    a.out[query * D + component] = float_to_element(weight == 0 ? 0 : sum / weight);
    if (component == 0 && a.log_sum_exp)
        a.log_sum_exp[query] = weight == 0 ? -infinity() : (max + log2f(weight)) * 0.69314718f;
}

// A word of the first or second half of a table's row. The offset is added to the pointer, not the address: so it becomes
// a part of the instruction.
template <int TABLE>
__device__ __forceinline__ u32 look_up(u32 address, int part) {
    return *reinterpret_cast<const u32*>(shared + address + (TABLE + part * (ROW / 2)));
}

// Byte 0: offset byte `b` of the lane; byte 1: code `k`; byte 2: the copy's bit. Byte 3: zero.
__device__ __forceinline__ constexpr u32 key_selector(int k, int b) { return 4 + b | k << 4 | 7 << 8 | 15 << 12; }
__device__ __forceinline__ constexpr u32 value_selector(int k, int b) { return 4 + b | k << 4 | (12 + b) << 8 | (12 + b) << 12; }

// A warp's softmax of its tokens so far, spread as the multiply-adds leave it.
struct State {
    float sums[HALVES][PAIRS][4]; // see `component_of_sum`
    float max[COPIES], weight[COPIES]; // of the lane's queries, COPIES * turn + i; `weight` is the lane's part of the sum
};

constexpr float NOTHING = -1e30f; // below every score, and yet a number

// Element `i` of sums[part][query / 2] (i = query & 1, or that + 2) is this component.
__device__ __forceinline__ int component_of_sum(int part, bool upper, const Lane& lane) {
    const int word = 8 * lane.l + lane.g;
    return HALVES == 2 ? component<VALUE_SUB>(word + (upper ? 32 : 0)) + part : component<VALUE_SUB>(word) + upper;
}

// Exact tokens: lanes share the components of a vector. Leaves the warp's state as if they had been in a tile.
__device__ __forceinline__ void attend_exact(const Arguments& a, const Plan& plan, State& state) {
    const Lane here;
    const Place place(a);
    const u64 sequence_head = (u64)plan.sequence * a.heads + place.head, row = sequence_head * a.exact_capacity;
    const u16* queries = a.queries + (sequence_head * a.group + place.slice * QUERIES) * D;
    const int live = min(a.group - place.slice * QUERIES, (u32)QUERIES);
    const int lane = here.lane;
    float* exchange = reinterpret_cast<float*>(shared + RESULTS) + here.warp * RESULT;
    constexpr int E = D / LANES; // components a lane
    float q[QUERIES][E], sum[QUERIES][E], max[QUERIES], weight[QUERIES];
#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
        max[i] = NOTHING, weight[i] = 0;
#pragma unroll
        for (int e = 0; e < E; e++) {
            q[i][e] = i < live ? element_to_float(queries[i * D + lane * E + e]) * a.scale : 0;
            sum[i][e] = 0;
        }
    }
    const u32 item_end = min(plan.item_end, (plan.exact_length + EXACT - 1) / EXACT);
    for (u32 item = plan.item + here.warp; uniform(item < item_end); item += WARPS) {
        const u32 first = item * EXACT, count = min(plan.exact_length - first, (u32)EXACT);
        const u16* keys = a.exact_keys + (row + first) * D + lane * E;
        const u16* values = a.exact_values + (row + first) * D + lane * E;
        for (u32 t = 0; uniform(t < count); t++) {
            float key[E], value[E];
#pragma unroll
            for (int e = 0; e < E; e++) key[e] = element_to_float(keys[t * D + e]);
#pragma unroll
            for (int e = 0; e < E; e++) value[e] = element_to_float(values[t * D + e]);
#pragma unroll
            for (int i = 0; i < QUERIES; i++) {
                float score = 0;
#pragma unroll
                for (int e = 0; e < E; e++) score += q[i][e] * key[e];
                score = warp_sum(score);
                const float top = fmaxf(max[i], score), keep = exp2_approx(max[i] - top), p = exp2_approx(score - top);
                max[i] = top;
                weight[i] = weight[i] * keep + p;
#pragma unroll
                for (int e = 0; e < E; e++) sum[i][e] = sum[i][e] * keep + p * value[e];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
        __syncwarp();
#pragma unroll
        for (int e = 0; e < E; e++) exchange[lane * E + e] = sum[i][e];
        __syncwarp();
#pragma unroll
        for (int part = 0; part < HALVES; part++)
#pragma unroll
            for (int upper = 0; upper < 2; upper++)
                state.sums[part][i / 2][(i & 1) + 2 * upper] = exchange[component_of_sum(part, upper, here)];
        if (here.turn == i / COPIES) state.max[i % COPIES] = max[i];
        if (here.turn == i / COPIES && here.g == 0) state.weight[i % COPIES] = weight[i];
    }
    __syncwarp();
}

// Where a tile of a sequence lies among all tiles, of which there are fewer than 2^32.
struct Tiles {
#ifdef PAGED
    const u32* pages;
    u32 head;
    __device__ __forceinline__ Tiles(const Arguments& a, u32 sequence, u32 head)
        : pages(a.pages + (u64)sequence * a.max_pages), head(head) {}
    __device__ __forceinline__ u32 at(const Arguments& a, u32 tile) const {
        return (__ldg(pages + tile / a.page_tiles) * a.heads + head) * a.page_tiles + tile % a.page_tiles;
    }
#else
    u32 first;
    __device__ __forceinline__ Tiles(const Arguments& a, u32 sequence, u32 head)
        : first((sequence * a.heads + head) * a.page_tiles) {}
    __device__ __forceinline__ u32 at(const Arguments&, u32 tile) const { return first + tile; }
#endif
};

// The warps' results become the block's, one query after the other, and those of the blocks that share a sequence the output.
__device__ __forceinline__ void finish_sequence(const Arguments& a, Plan& plan, const State& state) {
    const Lane lane;
    const Place at(a);
    float* results = reinterpret_cast<float*>(shared + RESULTS);
    float* exchange = results + lane.warp * RESULT;
    const u64 sequence_head = (u64)plan.sequence * a.heads + at.head;
    const u64 first_query = sequence_head * a.group + at.slice * QUERIES;
    const u32 live = min(a.group - at.slice * QUERIES, (u32)QUERIES);
    // A block shares at most its first and its last sequence with other blocks, so it has two places for partial results.
    const u32 pieces = plan.pieces, first_block = plan.first_block;
    float* partial = a.partials + ((u64)blockIdx.x * 2 + (at.block == first_block)) * QUERIES * RESULT;
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
        const bool mine = lane.holds && lane.turn == q / COPIES;
        const float weight = warp_sum(mine ? state.weight[q % COPIES] : 0);
        const float max = warp_max(mine ? state.max[q % COPIES] : NOTHING);
        if (lane.lane == 0) exchange[D] = max, exchange[D + 1] = weight;
#pragma unroll
        for (int part = 0; part < HALVES; part++)
#pragma unroll
            for (int upper = 0; upper < 2; upper++)
                exchange[component_of_sum(part, upper, lane)] = state.sums[part][q / 2][(q & 1) + 2 * upper];
        __syncthreads();
        if (lane.thread < D) {
            float top = NOTHING, sum = 0, weights_sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) top = fmaxf(top, results[w * RESULT + D]);
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float keep = exp2_approx(results[w * RESULT + D] - top);
                sum += keep * results[w * RESULT + lane.thread];
                weights_sum += keep * results[w * RESULT + D + 1];
            }
            if (pieces > 1) {
                partial[q * RESULT + lane.thread] = sum;
                if (lane.thread == 0) partial[q * RESULT + D] = top, partial[q * RESULT + D + 1] = weights_sum;
            } else if (q < live) {
                write_output(a, first_query + q, lane.thread, top, weights_sum, sum);
            }
        }
        __syncthreads();
    }
    if (pieces > 1) { // the last block to arrive reduces the sequence
        __threadfence();
        __syncthreads();
        if (lane.thread == 0) {
            u32* arrived = a.arrived + sequence_head * at.slices + at.slice;
            plan.last = atomicAdd(arrived, 1) == pieces - 1;
            if (plan.last) *arrived = 0; // for the next launch
        }
        __syncthreads();
    }
    if (pieces > 1 && plan.last) {
        __threadfence();
        const auto piece = [&](u32 i, int q) { // to the first block it was the last sequence, to the others their first
            return a.partials + (((u64)blockIdx.x - at.block + first_block + i) * 2 + (i == 0)) * QUERIES * RESULT + q * RESULT;
        };
        for (u32 i = lane.thread; i < pieces * QUERIES; i += THREADS) {
            const float* from = piece(i / QUERIES, i % QUERIES);
            results[2 * i] = __ldcg(from + D), results[2 * i + 1] = __ldcg(from + D + 1);
        }
        __syncthreads();
        for (int i = lane.thread; i < QUERIES * D; i += THREADS) {
            const int q = i / D, d = i % D;
            float top = NOTHING, sum = 0, weights_sum = 0;
            for (u32 p = 0; p < pieces; p++) top = fmaxf(top, results[2 * (p * QUERIES + q)]);
            for (u32 base = 0; base < pieces; base += 16) { // 16 loads in flight
                float value[16];
#pragma unroll
                for (int p = 0; p < 16; p++) value[p] = base + p < pieces ? __ldcg(piece(base + p, q) + d) : 0;
#pragma unroll
                for (int p = 0; p < 16; p++)
                    if (base + p < pieces) {
                        const u32 at = 2 * ((base + p) * QUERIES + q);
                        const float keep = exp2_approx(results[at] - top);
                        sum += keep * value[p];
                        weights_sum += keep * results[at + 1];
                    }
            }
            if (q < live) write_output(a, first_query + q, d, top, weights_sum, sum);
        }
    }
}

// Asks for both tables of a head.
__device__ __forceinline__ void load_tables(const Arguments& a) {
    const Lane lane;
    const Place place(a);
    const u8* keys = a.key_table + (u64)place.head * KEY_ROWS * WORDS * 4;
    const u8* values = a.value_table + (u64)place.head * VALUE_ROWS * WORDS * 4;
    for (int i = lane.thread; i < KEY_ROWS * CHUNKS; i += THREADS)
        copy_async_16(shared + KEY_TABLE + i / CHUNKS * ROW + i % CHUNKS * 16, keys + i * 16);
    for (int i = lane.thread; i < VALUE_ROWS * CHUNKS; i += THREADS)
        copy_async_16(shared + VALUE_TABLE + i / CHUNKS * ROW + i % CHUNKS * 16, values + i * 16);
}

// Waits for them, and makes the second copy of the keys': the halves of every 32 words swapped.
__device__ __forceinline__ void finish_tables() {
    wait_for_copies();
    __syncthreads();
    if constexpr (COPIES == 2) {
        const Lane lane;
#pragma unroll 4
        for (int i = lane.thread; i < KEY_ROWS * CHUNKS; i += THREADS) {
            const uint4 chunk = *reinterpret_cast<const uint4*>(shared + KEY_TABLE + i / CHUNKS * ROW + i % CHUNKS * 16);
            constexpr int COPY = KEY_TABLE + (FAR_COPY ? COPY_DISTANCE : ROW / 2);
            *reinterpret_cast<uint4*>(shared + COPY + i / CHUNKS * ROW + (i % CHUNKS ^ 4) * 16) = chunk;
        }
        __syncthreads();
    }
}

// The block's part of one sequence. `tables` waits for the tables, the first time.
template <typename Tables>
__device__ __forceinline__ void attend_sequence(const Arguments& a, const Plan& plan, Tables tables, State& state) {
    const Lane lane;
    const Place place(a);
    const u32 sequence = plan.sequence, head = place.head;
    const Tiles tiles(a, sequence, head);
    u32 tile, tile_end;
    {
        const u32 exact_items = (plan.exact_length + EXACT - 1) / EXACT;
        u32 item = plan.item + lane.warp;
        if (item < exact_items) item += (exact_items - item + WARPS - 1) / WARPS * WARPS;
        tile = item - exact_items;
        tile_end = min(max(plan.item_end, exact_items) - exact_items, (plan.length + TILE - 1) / TILE);
    }

    Keys key_codes;
    Values value_codes;
    u32 index = 0;
    if (tile < tile_end) {
        index = tiles.at(a, tile);
        key_codes.load(a.key_codes + (u64)index * Keys::TILE_BYTES, lane.lane);
        value_codes.load(a.value_codes + (u64)index * Values::TILE_BYTES, lane.lane);
    }

#pragma unroll
    for (int part = 0; part < HALVES; part++)
#pragma unroll
        for (int i = 0; i < PAIRS * 4; i++) state.sums[part][i / 4][i % 4] = 0;
#pragma unroll
    for (int i = 0; i < COPIES; i++) state.max[i] = NOTHING, state.weight[i] = 0;
    if (uniform(plan.item * EXACT < plan.exact_length)) attend_exact(a, plan, state);
    tables();


    const int g = lane.g, l = lane.l;
    // Where the lane's words lie in a row. Lanes of g >= 4 have the 16-word halves swapped: they read them in the other order
    // (one copy), or from the copy in which they are swapped.
    u32 key_offset[3] = {0, 0, 0}, value_offset = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 word = 16 * ((i / 4) ^ (g / 4)) + 4 * ((i % 4) ^ (g & 3)) + l;
        key_offset[i / 3] |= (word * 4 + (COPIES == 2 && !FAR_COPY && g >= 4 ? ROW / 2 : 0)) << (8 * (i % 3));
    }
#pragma unroll
    for (int i = 0; i < 3; i++) key_offset[i] |= (FAR_COPY && g >= 4 ? 1u : 0u) << 24;
#pragma unroll
    for (int i = 0; i < 4; i++) value_offset |= (u32)((8 * ((l + i) & 3) + g) * 4) << (8 * i);
    const int swap = COPIES == 1 && g >= 4 ? 16 : 0; // bits
    const int chunk_step = (g / 2 - l) & 3;          // the step at which the lane's chunk is that of its column

    u8* weights = shared + WEIGHTS + lane.warp * PAIRS * 2 * TILE * 2;
    for (int i = lane.lane; i < PAIRS * 2 * TILE / 2; i += LANES) reinterpret_cast<u32*>(weights)[i] = 0;

    // The queries in the order of each column's variant.
    const u32 live = min(a.group - place.slice * QUERIES, (u32)QUERIES);
    const u16* queries = a.queries + (((u64)sequence * a.heads + head) * a.group + place.slice * QUERIES) * D;
    u32 query[TURNS][HALVES * 4][2];
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const int variant = COPIES == 1 ? (g - 2 * i) & 7 : (g / 2) ^ i;
        const u32 q = COPIES == 1 ? i : 2 * i + (g & 1);
#pragma unroll
        for (int step = 0; step < HALVES * 4; step++)
#pragma unroll
            for (int middle = 0; middle < 2; middle++) {
                const int flipped = COPIES == 1 ? middle ^ (variant / 4) : middle;
                const int word = step / 4 * 32 + 16 * flipped + 4 * ((step % 4) ^ (variant & 3)) + l;
                u32 pair = 0;
                if (q < live) pair = *reinterpret_cast<const u32*>(queries + q * D + component<KEY_SUB>(word));
#ifdef BFLOAT
                pair = pack_half2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
#endif
                query[i][step][middle] = pair;
            }
    }

    while (uniform(tile < tile_end)) {
        // Scores of tokens g, g + 8, g + 16, g + 24 for the lane's queries.
        float scores[COPIES][4];
        {
            u32 codes[Keys::EXPANDED];
            key_codes.expand(codes);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float product[TURNS][4];
#pragma unroll
                for (int part = 0; part < HALVES; part++)
#pragma unroll
                    for (int step = 0; step < 4; step++) {
                        u32 operand[4];
#pragma unroll
                        for (int i = 0; i < 4; i++) { // high = i & 1, middle = i / 2
                            const int code = key_code(half, part, step, i / 2, i & 1), offset = i / 2 * 4 + step;
                            u32 word = codes[code / 4];
                            if (COPIES == 1 && D / KEY_SUB >= 32) word = __funnelshift_l(word, word, swap);
                            const u32 selector = key_selector(code % 4, offset % 3);
                            operand[i] = look_up<KEY_TABLE>(permute_bytes(word, key_offset[offset / 3], selector), part);
                        }
#pragma unroll
                        for (int i = 0; i < TURNS; i++) {
                            const u32* q = query[i][part * 4 + step];
                            if (part + step == 0)
                                multiply(product[i], operand, q[0], q[1]);
                            else
                                multiply_add(product[i], operand, q[0], q[1]);
                        }
                    }
#pragma unroll
                for (int high = 0; high < 2; high++)
#pragma unroll
                    for (int i = 0; i < COPIES; i++) {
                        float score = 0;
#pragma unroll
                        for (int t = 0; t < TURNS; t++) {
                            const float* row = product[t] + 2 * high;
                            if (t == 0 || lane.turn == t) score = COPIES == 2 ? row[i] : lane.g & 1 ? row[1] : row[0];
                        }
                        scores[i][half * 2 + high] = score;
                    }
            }
        }
        const u32 here = tile * TILE;
        tile += WARPS;
        const bool more = tile < tile_end;
        if (more) {
            index = tiles.at(a, tile);
            key_codes.load(a.key_codes + (u64)index * Keys::TILE_BYTES, lane.lane);
        }

        bool grows = false;
        float top[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
#pragma unroll
            for (int t = 0; t < 4; t++) scores[i][t] = lane.holds ? scores[i][t] * a.scale : -infinity();
            if (here + TILE > plan.length) // the sequence's last tile
#pragma unroll
                for (int t = 0; t < 4; t++)
                    if (here + lane.g + 8 * t >= plan.length) scores[i][t] = -infinity();
            top[i] = fmaxf(fmaxf(scores[i][0], scores[i][1]), fmaxf(scores[i][2], scores[i][3]));
            grows |= top[i] > state.max[i] + 8;
        }
        if (__any_sync(FULL, grows)) {
#pragma unroll
            for (int q = 0; q < QUERIES; q++) {
                const int i = q % COPIES;
                const bool mine = lane.turn == q / COPIES;
                const float max = warp_max(mine ? fmaxf(top[i], state.max[i]) : NOTHING);
                const float old = warp_max(mine ? state.max[i] : NOTHING), keep = exp2_approx(old - max);
                if (mine) state.max[i] = max, state.weight[i] *= keep;
#pragma unroll
                for (int part = 0; part < HALVES; part++) {
                    state.sums[part][q / 2][q & 1] *= keep;
                    state.sums[part][q / 2][(q & 1) + 2] *= keep;
                }
            }
        }
        uint2 packed[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            float p[4];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                p[t] = exp2_approx(scores[i][t] - state.max[i]);
                state.weight[i] += p[t];
            }
            packed[i] = make_uint2(pack_half2(p[0], p[1]), pack_half2(p[2], p[3]));
        }
        __syncwarp();
        if (lane.holds)
#pragma unroll
            for (int i = 0; i < COPIES; i++)
                *reinterpret_cast<uint2*>(weights + (lane.turn * COPIES + i) * TILE * 2 + lane.g * 8) = packed[i];
        __syncwarp();

        {
            u32 codes[Values::EXPANDED];
            value_codes.expand(codes);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint2 p[PAIRS]; // tokens 4 half + l + 8 (0, 1, 2, 3) for query lane.g & 1 of the pair
#pragma unroll
                for (int i = 0; i < PAIRS; i++)
                    p[i] = *reinterpret_cast<const uint2*>(weights + (2 * i + (lane.g & 1)) * TILE * 2 + (half * 4 + lane.l) * 8);
#pragma unroll
                for (int step = 0; step < 4; step++) {
                    u32 word[HALVES][4]; // tokens 4 half + l + 8 (0, 1, 2, 3)
#pragma unroll
                    for (int part = 0; part < HALVES; part++)
#pragma unroll
                        for (int t = 0; t < 4; t++) {
                            const int code = value_code(half, step, t / 2, part, t & 1);
                            const u32 selector = value_selector(code % 4, step);
                            word[part][t] = look_up<VALUE_TABLE>(permute_bytes(codes[code / 4], value_offset, selector), part);
                        }
                    const bool mine = step == chunk_step;
#pragma unroll
                    for (int e = 0; e < HALVES; e++) {
                        u32 operand[4]; // rows g: words of part 0; rows g + 8: of part 1, or the odd components
#pragma unroll
                        for (int t = 0; t < 2; t++) {
                            constexpr u32 LOW = 0x5410, HIGH = 0x7632;
                            operand[2 * t] = permute_bytes(word[0][2 * t], word[0][2 * t + 1], e ? HIGH : LOW);
                            operand[2 * t + 1] = permute_bytes(word[HALVES - 1][2 * t], word[HALVES - 1][2 * t + 1],
                                                               e || HALVES == 1 ? HIGH : LOW);
                        }
#pragma unroll
                        for (int i = 0; i < PAIRS; i++)
                            multiply_add(state.sums[e][i], operand, mine ? p[i].x : 0, mine ? p[i].y : 0);
                    }
                }
            }
        }
        if (more) value_codes.load(a.value_codes + (u64)index * Values::TILE_BYTES, lane.lane);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) pq_attend(const Arguments a) {
    load_tables(a);
    Plan& plan = *reinterpret_cast<Plan*>(shared + PLAN);
    if (threadIdx.x < LANES) {
        find_part(a, plan);
        find_sequence(a, 0, plan);
    }
    __syncthreads();
    bool waits = true;
    while (uniform(plan.sequence < a.batch)) {
        State state;
        const auto tables = [&] {
            if (waits) finish_tables();
            waits = false;
        };
        attend_sequence(a, plan, tables, state);
        finish_sequence(a, plan, state);
        if (threadIdx.x < LANES) find_sequence(a, plan.sequence + 1, plan);
        __syncthreads();
    }
    wait_for_copies(); // of a block without work
}
