// Products of few rows, out = x w^T, of bfloat16: every warp makes 8 output columns of up to 16 rows, walking
// the inner size in steps of 16 with one accumulator per output, which is the order of cuBLAS without a
// workspace.
//
// The copy engine brings weights into a ring of shared memory, full before the kernel waits for its
// predecessor, and rows in pieces of the inner size where all of them would leave no room for the next
// kernel's block. Two warps do little but ask for the two: a warp that multiplies has about 25 cycles for a
// step.
//
// A column tile of the paired kinds holds 4 columns and their 4 partners, interleaved, so that what must be
// combined (gate and up, the halves of a head) meets in one thread.

#define HALF 64  // of a head
#define LINE 64  // inner elements of a line of 128 bytes, in which 16-byte chunks are permuted by the line
#define STAGE (2 * LINE)  // of one stage of the ring

enum Kind { PLAIN, ROPE, SWIGLU };

struct __align__(64) TensorMap {
    unsigned long long words[16];
};

struct RopeWrite {
    const float* cosine;  // [positions, HALF]
    const float* sine;
    const int* positions;  // [rows]
    const int* slots;      // [rows], -1: no K/V address
    u16* k;                // [blocks, kv_heads, block_size, 2 * HALF]
    u16* v;
    int slot_offset;
    int block_size;
    int num_heads;
    int num_kv_heads;
};

// silu(gate) * up of values rounded to bfloat16, with the operations of the separate kernel.
__device__ __forceinline__ float silu_times(float gate, float up) {
    float exponential, quotient;
    asm("ex2.approx.f32 %0, %1;" : "=f"(exponential) : "f"(__fmul_rn(-gate, 1.44269504f)));
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(gate), "f"(__fadd_rn(1.0f, exponential)));
    return __fmul_rn(quotient, up);
}

struct Rotation {
    float cosine, sine;
    int slot;
};

// One output pair of one row: partners, or neighbours of the plain kind.
template <Kind KIND>
__device__ __forceinline__ void store_pair(u16* out, int row, int tile, int lane, int columns, float first,
                                           float second, const RopeWrite& rope, const Rotation& at) {
    if (KIND == PLAIN) {
        *reinterpret_cast<u32*>(out + row * columns + tile * 8 + lane % 4 * 2) = to_bf16_pair(first, second);
    } else if (KIND == SWIGLU) {
        float result = silu_times(rounded_to_bf16(first), rounded_to_bf16(second));
        out[row * columns + tile * 4 + lane % 4] = to_bf16(result);
    } else {
        int head = tile / (HALF / 4), column = tile % (HALF / 4) * 4 + lane % 4;
        float low = rounded_to_bf16(first), high = rounded_to_bf16(second);
        u16 rotated_low = to_bf16(__fmaf_rn(low, at.cosine, __fmul_rn(-high, at.sine)));
        u16 rotated_high = to_bf16(__fmaf_rn(high, at.cosine, __fmul_rn(low, at.sine)));
        if (head < rope.num_heads) {
            u16* q = out + row * columns + head * (2 * HALF) + column;
            q[0] = rotated_low;
            q[HALF] = rotated_high;
        } else if (at.slot >= 0) {
            bool is_key = head < rope.num_heads + rope.num_kv_heads;
            int slot = at.slot + rope.slot_offset, kv_head = (head - rope.num_heads) % rope.num_kv_heads;
            long long place = (static_cast<long long>(slot / rope.block_size) * rope.num_kv_heads + kv_head) *
                              rope.block_size;
            u16* pool = (is_key ? rope.k : rope.v) + (place + slot % rope.block_size) * (2 * HALF) + column;
            pool[0] = is_key ? rotated_low : to_bf16(first);
            pool[HALF] = is_key ? rotated_high : to_bf16(second);
        }
    }
}

// A slot of the ring is full when its bytes are there, and empty when every warp has its words; likewise the
// two buffers of rows.
template <int STAGES>
struct Barriers {
    unsigned long long full[STAGES], empty[STAGES], first_rows, rows_full[2], rows_empty[2];
};

template <Kind KIND, int SIZE_IN, int WARPS, int STAGES, int PIECE>
struct Product {
    static constexpr int ALL_STAGES = SIZE_IN / STAGE, STEPS = STAGE / 16, LINES = STAGE / LINE;
    static constexpr int PIECES = SIZE_IN / PIECE, PIECE_ROUNDS = PIECE / STAGE / STAGES;
    static constexpr int LINE_BYTES = WARPS * 8 * LINE * 2, STAGE_BYTES = LINES * LINE_BYTES,
                         PITCH = PIECE * 2 + 16;
    static_assert(STAGES >= 2 && STAGES <= ALL_STAGES && ALL_STAGES * STAGE == SIZE_IN &&
                      PIECES * PIECE == SIZE_IN,
                  "whole stages");
    static_assert(PIECES == 1 || PIECE_ROUNDS * STAGES * STAGE == PIECE, "pieces of whole rounds");

    struct Words {
        u32 w[STEPS / 2][4], x[STEPS][4];
    };  // of a stage, ready for the tensor cores

    const u16* x;
    int rows;
    u32 ring, pieces;
    Barriers<STAGES>& barriers;

    // Weights: one thread.
    __device__ __forceinline__ void copy_stage(const TensorMap& weights, int slot, int stage) const {
        u32 barrier = shared_address(&barriers.full[slot]), target = ring + slot * STAGE_BYTES;
        expect_bytes(barrier, STAGE_BYTES);
#pragma unroll
        for (int line = 0; line < LINES; ++line) {
            int inner = stage * STAGE + line * LINE;
            if (KIND == PLAIN)
                copy_box(target + line * LINE_BYTES, weights, barrier, inner, blockIdx.x * WARPS * 8);
            if (KIND == SWIGLU)
                copy_box(target + line * LINE_BYTES, weights, barrier, inner, blockIdx.x * WARPS * 4, 0);
            if (KIND == ROPE) {
#pragma unroll
                for (int warp = 0; warp < WARPS; ++warp) {
                    int tile = blockIdx.x * WARPS + warp;
                    u32 place = target + line * LINE_BYTES + warp * 1024;
                    copy_box(place, weights, barrier, inner, tile % (HALF / 4) * 4, 0, tile / (HALF / 4));
                }
            }
        }
    }
    __device__ __forceinline__ void copy_first_weights(const TensorMap& weights) const {
#pragma unroll 1
        for (int slot = 0; slot < STAGES; ++slot) copy_stage(weights, slot, slot);
    }
    __device__ __forceinline__ void copy_other_weights(const TensorMap& weights) const {
        int slot = 0;
        u32 parity = 0;
#pragma unroll 1
        for (int stage = STAGES; stage < ALL_STAGES; ++stage) {
            await(shared_address(&barriers.empty[slot]), parity);
            copy_stage(weights, slot, stage);
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
    }

    // A piece of the rows, by `THREADS` threads. Every block begins elsewhere: all want the same at once.
    template <int THREADS>
    __device__ __forceinline__ void copy_piece(int piece, int thread, u32 barrier) const {
        int all = rows * (PIECE / 8), begin = blockIdx.x * all / BLOCKS;
#pragma unroll 4
        for (int i = thread; i < all; i += THREADS) {
            int at = i + begin < all ? i + begin : i + begin - all, row = at / (PIECE / 8),
                chunk = at % (PIECE / 8);
            copy_16(pieces + (piece % 2 * rows + row) * PITCH + chunk * 16,
                    x + row * SIZE_IN + piece * PIECE + chunk * 8);
        }
        arrive_with_copies(barrier);
    }
    // The first by all threads but those of the weights, the others by a warp.
    static constexpr int FIRST_THREADS = (WARPS + 1) * 32;
    __device__ __forceinline__ void copy_first_rows(int thread) const {
        copy_piece<FIRST_THREADS>(0, thread, shared_address(&barriers.first_rows));
    }
    __device__ __forceinline__ void copy_other_rows() const {
#pragma unroll 1
        for (int piece = 1; piece < PIECES; ++piece) {
            if (piece >= 2) await(shared_address(&barriers.rows_empty[piece % 2]), piece / 2 - 1 & 1);
            copy_piece<32>(piece, threadIdx.x % 32, shared_address(&barriers.rows_full[piece % 2]));
        }
    }

    // The line of a stage's weights that holds row r of the warp's tile: 8 neighbours, or 4 and their
    // partners by turns.
    static __device__ __forceinline__ int line_of(int warp, int r) {
        if (KIND == PLAIN) return warp * 8 + r;
        if (KIND == SWIGLU) return r % 2 * (WARPS * 4) + warp * 4 + r / 2;
        return warp * 8 + r % 2 * 4 + r / 2;
    }
    // The words of step `i`: of weights of two steps at every second one.
    static __device__ __forceinline__ void load_step(Words& words, int i, u32 weights, u32 swizzle, u32 row) {
        load_matrices(words.x[i], row + i * 32);
        if (i % 2 == 0)
            load_matrices(words.w[i / 2], weights + i / 4 * LINE_BYTES + (swizzle ^ (i / 2 % 2 * 64)));
    }

    // The sums of the warp's tile.
    __device__ __forceinline__ void multiply(float (&sum)[4], int warp) const {
        int lane = threadIdx.x % 32, line = line_of(warp, lane % 8);
        u32 weights = ring + line * (LINE * 2), swizzle = ((lane / 8 ^ line) & 7) * 16;
        // Rows past the last are that one again; nobody stores what comes of them.
        u32 first_row = pieces + min(lane % 16, rows - 1) * PITCH + lane / 16 * 16, row = first_row;
        u32 full = shared_address(barriers.full), empty = shared_address(barriers.empty);
        Words words[2];  // that are multiplied, and the next stage's
        await(full, 0);
        await(shared_address(&barriers.first_rows), 0);
#pragma unroll
        for (int i = 0; i < STEPS; ++i) load_step(words[0], i, weights, swizzle, row);
        if (lane == 0) arrive(empty);
#pragma unroll 1
        for (int round = 0;; ++round) {
#pragma unroll
            for (int slot = 0; slot < STAGES; ++slot) {
                bool is_wrap = slot + 1 == STAGES, has_next = round * STAGES + slot + 1 < ALL_STAGES;
                int next = is_wrap ? 0 : slot + 1;
                row += STAGE * 2;
                if (has_next) {
                    await(full + next * 8, is_wrap ? round + 1 & 1 : round & 1);
                    if (PIECES > 1 && is_wrap && (round + 1) % PIECE_ROUNDS == 0) {
                        int piece = (round + 1) / PIECE_ROUNDS;
                        await(shared_address(&barriers.rows_full[piece % 2]), (piece - 1) / 2 & 1);
                        row = first_row + piece % 2 * rows * PITCH;
                    }
                } else {
                    row = first_row;  // words that nobody uses
                }
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    const Words& now = words[slot % 2];
                    const u32(&a)[4] = now.x[i];
                    multiply_add(sum, a[0], a[1], a[2], a[3], now.w[i / 2][i % 2 * 2],
                                 now.w[i / 2][i % 2 * 2 + 1]);
                    load_step(words[(slot + 1) % 2], i, weights + next * STAGE_BYTES, swizzle, row);
                }
                if (!has_next) return;
                if (lane == 0) {
                    arrive(empty + next * 8);
                    // the words of a piece's last stage
                    if (PIECES > 2 && slot + 2 == STAGES && (round + 1) % PIECE_ROUNDS == 0)
                        arrive(shared_address(&barriers.rows_empty[round / PIECE_ROUNDS % 2]));
                }
            }
            if (STAGES % 2) words[0] = words[1];
        }
    }
};

// x [rows, SIZE_IN], out [rows, columns] (SWIGLU: columns is half the weight's rows).
template <Kind KIND, int SIZE_IN, int WARPS, int STAGES, int PIECE>
__device__ __forceinline__ void run_product(const TensorMap& weights, const u16* x, u16* out, int rows,
                                            int columns, const RopeWrite& rope) {
    using Mine = Product<KIND, SIZE_IN, WARPS, STAGES, PIECE>;
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ Barriers<STAGES> barriers;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = blockIdx.x * WARPS + warp;
    u32 ring = shared_address(memory);
    Mine mine{x, rows, ring, ring + STAGES * Mine::STAGE_BYTES, barriers};
    allow_next();
    // Blocks without work, one for each multiprocessor that would have none: two blocks would go there, and
    // everyone wait for them.
    if (blockIdx.x >= BLOCKS) {
        wait_for_inputs();
        return;
    }
    if (warp == WARPS && lane == 0) {
        for (int slot = 0; slot < STAGES; ++slot) {
            open_barrier(shared_address(&barriers.full[slot]), 1);
            open_barrier(shared_address(&barriers.empty[slot]), WARPS);
        }
        for (int buffer = 0; buffer < 2; ++buffer) {
            open_barrier(shared_address(&barriers.rows_full[buffer]), 32);
            open_barrier(shared_address(&barriers.rows_empty[buffer]), WARPS);
        }
        open_barrier(shared_address(&barriers.first_rows), Mine::FIRST_THREADS);
        publish_barriers();
        mine.copy_first_weights(weights);
    }
    Rotation at[2];
    if (KIND == ROPE && warp < WARPS) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = min(lane / 4 + 8 * half, rows - 1), column = tile % (HALF / 4) * 4 + lane % 4;
            int position = rope.positions[row];
            at[half] = {rope.cosine[position * HALF + column], rope.sine[position * HALF + column],
                        rope.slots[row]};
        }
    }
    __syncthreads();
    if (warp == WARPS) {
        if (lane == 0) mine.copy_other_weights(weights);
        return;
    }
    wait_for_inputs();
    mine.copy_first_rows(min(warp, WARPS) * 32 + lane);
    if (warp > WARPS) {
        mine.copy_other_rows();
        return;
    }
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mine.multiply(sum, warp);
#pragma unroll
    for (int half = 0; half < 2; ++half)
        if (int row = lane / 4 + 8 * half; row < rows)
            store_pair<KIND>(out, row, tile, lane, columns, sum[2 * half], sum[2 * half + 1], rope, at[half]);
}

#define PRODUCT(NAME, KIND, SIZE_IN, WARPS, STAGES, PIECE)                                             \
    extern "C" __global__ void __launch_bounds__((WARPS + 2) * 32, 1)                                  \
        NAME(const __grid_constant__ TensorMap weights, const u16* x, u16* out, int rows, int columns, \
             RopeWrite rope) {                                                                         \
        run_product<KIND, SIZE_IN, WARPS, STAGES, PIECE>(weights, x, out, rows, columns, rope);        \
    }

PRODUCT(rope, ROPE, ROPE_IN, ROPE_WARPS, ROPE_STAGES, ROPE_PIECE)
PRODUCT(o, PLAIN, O_IN, O_WARPS, O_STAGES, O_PIECE)
PRODUCT(swiglu, SWIGLU, SWIGLU_IN, SWIGLU_WARPS, SWIGLU_STAGES, SWIGLU_PIECE)
PRODUCT(down, PLAIN, DOWN_IN, DOWN_WARPS, DOWN_STAGES, DOWN_PIECE)
