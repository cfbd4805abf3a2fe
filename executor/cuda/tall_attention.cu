// Attention of items of up to 128 query rows: the bits of `executor.kernels.attention` in another division of
// labour.
//
// A block takes one head of one item at a time. Four warps ask the copy engine for queries, keys and values;
// two warpgroups, the sides, of 64 query rows each multiply and make weights. The tensor cores work for one
// while the other makes exponentials, and scores of the next tile are asked for before the values of this are
// summed, in the next split as well.
//
// A tile's keys and values lie in shared memory as the copy engine permutes them: lines of 128 bytes, half of a
// head's columns each. Keys: [half][64 keys]; values: [group of 16 keys][half][16 keys].

#define GROUPS (TILE / GROUP)
#define SIDES 2
#define SIDE_ROWS 64
#define STAGES 4   // of keys and values
#define Q_SLOTS 2  // units whose queries there is room for
#define TILE_BYTES (TILE * HEAD_DIM * 2)
#define HALF_BYTES (TILE_BYTES / 2)
#define GROUP_BYTES (GROUP * HEAD_DIM * 2)
#define THREADS ((SIDES + 1) * 128)
#define SIDE_WARPS 4

typedef unsigned long long u64;

struct Attention : Batch {  // with values in boxes of both halves, one after the other, of a group of one head
    TensorMap q;            // boxes of half a head's columns of 64 rows
};

static_assert(sizeof(Attention) == 512, "as `Arguments` in `tall_attention.py`");

struct Shared {
    u16 q[Q_SLOTS][SIDES][SIDE_ROWS * HEAD_DIM];
    u16 k[STAGES][TILE * HEAD_DIM];
    u16 v[STAGES][TILE * HEAD_DIM];
    u64 q_full[Q_SLOTS], q_empty[Q_SLOTS], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    u32 unused[4];
};

static_assert(sizeof(Shared) == SHARED_BYTES, "shared memory as it is asked for");

// One head of one item. Units are dealt out there and back, as by the Triton kernel.
struct Unit : Item {
    int first, index;

    __device__ __forceinline__ bool read(const Batch& a, int num_units) {
        int programs = gridDim.x;
        index = first + (first / programs % 2 ? programs - 1 - static_cast<int>(blockIdx.x)
                                              : static_cast<int>(blockIdx.x));
        if (index >= num_units) return false;
        Item::read(a, index);
        return true;
    }
};

// Descriptor of a matrix in lines of 128 permuted bytes: `leading` and `stride` bytes between its cores.
__device__ __forceinline__ u64 matrix_at(u32 address, u32 leading, u32 stride) {
    return (1ull << 62) | static_cast<u64>(stride >> 4) << 32 | static_cast<u64>(leading >> 4) << 16 |
           (address & 0x3ffff) >> 4;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define FLOATS_4(c, i) "+f"(c[i]), "+f"(c[(i) + 1]), "+f"(c[(i) + 2]), "+f"(c[(i) + 3])
#define FLOATS_16(c, i) FLOATS_4(c, i), FLOATS_4(c, (i) + 4), FLOATS_4(c, (i) + 8), FLOATS_4(c, (i) + 12)
#define FLOATS_32(c, i) FLOATS_16(c, i), FLOATS_16(c, (i) + 16)

// scores [64, 64] (+)= q [64, 16] k [64, 16]^T
template <bool IS_FIRST>
__device__ __forceinline__ void multiply_scores(float (&c)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 k) {
    asm volatile(
        "{\n\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, %37, 1, 1, 0;\n\t}"
        : FLOATS_32(c, 0)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(k), "n"(IS_FIRST ? 0 : 1));
}

// values [64, 128] += weights [64, 16] v [16, 128]
__device__ __forceinline__ void multiply_values(float (&c)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 v) {
    asm volatile(
        "{\n\twgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n\t}"
        : FLOATS_32(c, 0), FLOATS_32(c, 32)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(v));
}

// A warp's 16 rows of the queries, as the tensor cores take them from registers: out of shared memory, they and
// the keys would need all of its bandwidth.
typedef u32 Query[HEAD_DIM / 16][4];

__device__ __forceinline__ void load_query(Query& q, u32 rows) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 % SIDE_WARPS * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; ++i)
        load_matrices(q[i], rows + i / 4 * (SIDE_ROWS * 128) + row * 128 +
                                ((i % 4 * 2 + lane / 16) ^ row % 8) * 16);
}

__device__ __forceinline__ void ask_scores(float (&scores)[32], const Query& q, u32 k) {
    u64 right = matrix_at(k, 16, 1024);
    begin_products();
    multiply_scores<true>(scores, q[0][0], q[0][1], q[0][2], q[0][3], right);
#pragma unroll
    for (int i = 1; i < HEAD_DIM / 16; ++i)
        multiply_scores<false>(scores, q[i][0], q[i][1], q[i][2], q[i][3],
                               right + (i % 4 * 2 + i / 4 * (HALF_BYTES >> 4)));
    commit_products();
}
__device__ __forceinline__ void ask_values(float (&values)[64], const u32 (&weights)[16], u32 v) {
    u64 right = matrix_at(v, GROUP_BYTES / 2, 1024);
    begin_products();
#pragma unroll
    for (int i = 0; i < GROUPS; ++i)
        multiply_values(values, weights[4 * i], weights[4 * i + 1], weights[4 * i + 2], weights[4 * i + 3],
                        right + i * (GROUP_BYTES >> 4));
    commit_products();
}

__device__ __forceinline__ float base_of(float maximum) { return maximum == NONE ? 0.0f : maximum; }

// Of rows g and g + 8 of a warp's 16, g = lane / 4, over the whole warp's columns.
struct Softmax {
    float maximum[2], sum[2];
};

// Scores to weights; the sums and maxima after this tile, and what everything before it is scaled by. Returns
// bits of all weights, with one of 0xb0000000 always set.
template <bool IS_OPEN>
__device__ __forceinline__ u32 weigh(float (&s)[32], float (&factors)[2], Softmax& split, int first_key,
                                      int row, float scale) {
    int key = first_key + threadIdx.x % 4 * 2;
    float largest[2][2], offset[2];  // of even and odd columns
    u32 count[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        int half = i / 2 % 2;
        if (!IS_OPEN && key + i / 4 * 8 + i % 2 > row + 8 * half) s[i] = NONE;
        largest[half][i % 2] = i < 4 ? s[i] : fmaxf(largest[half][i % 2], s[i]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float maximum = fmaxf(largest[half][0], largest[half][1]);
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
        maximum = fmaxf(split.maximum[half], maximum);
        float base = base_of(maximum);
        factors[half] = exp2_of(__fmul_rn(split.maximum[half] - base, scale));
        offset[half] = __fmul_rn(-base, scale);
        split.maximum[half] = maximum;
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        int half = i / 2 % 2;
        s[i] = exp2_of(__fmaf_rn(s[i], scale, offset[half]));
        count[half] += __float_as_uint(__fmaf_rn(s[i], 4194304.0f, 8388608.0f));
    }
    u32 bits = count[0] | count[1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        count[half] += __shfl_xor_sync(~0u, count[half], 1);
        count[half] += __shfl_xor_sync(~0u, count[half], 2);
        float total = static_cast<float>(static_cast<int>(count[half] + 1073741824u));
        split.sum[half] = __fmaf_rn(split.sum[half], factors[half], __fmul_rn(total, 1.0f / 4194304.0f));
    }
    return bits;
}

// What follows waits for products only after `bits` has been computed: the assembler would wait as early as it
// can, and the exponentials would not run beside the products. `bits` is never 1.
__device__ __forceinline__ void stay_behind(u32 bits, u32 unused) {
    asm volatile("{\n\t.reg .pred never;\n\tsetp.eq.u32 never, %0, 1;\n\t@never st.shared.u32 [%1], %0;\n\t}" ::
                     "r"(bits),
                 "r"(unused)
                 : "memory");
}

__device__ __forceinline__ void pack_weights(u32 (&words)[16], const float (&s)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) words[i] = to_bf16_pair(s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void scale_values(float (&values)[64], const float (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) values[i] = __fmul_rn(values[i], factors[i / 2 % 2]);
}

// Joins the next split, the operations of `executor.kernels.fold`.
__device__ __forceinline__ void fold(Softmax& total, float (&sums)[64], const Softmax& split,
                                     const float (&values)[64], float scale) {
    float left[2], right[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float joined = fmaxf(total.maximum[half], split.maximum[half]), base = base_of(joined);
        left[half] = exp2_of(__fmul_rn(total.maximum[half] - base, scale));
        right[half] = exp2_of(__fmul_rn(split.maximum[half] - base, scale));
        total.sum[half] = __fmaf_rn(total.sum[half], left[half], __fmul_rn(split.sum[half], right[half]));
        total.maximum[half] = joined;
    }
#pragma unroll
    for (int i = 0; i < 64; ++i)
        sums[i] = __fmaf_rn(sums[i], left[i / 2 % 2], __fmul_rn(values[i], right[i / 2 % 2]));
}

// Where in a ring of stages one side, or the loader, stands.
struct Place {
    u32 stage, parity;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// After an instruction that the whole warp has passed together.
__device__ __forceinline__ void arrive_warp(u64& barrier) {
    if (threadIdx.x % 32 == 0) arrive(shared_address(&barrier));
}

// Values past the last key become 0: their weight is, and what the pool holds there may be no number.
__device__ __forceinline__ void clear_tail(u16* v, int num_keys, int side) {
    for (int i = num_keys * 16 + threadIdx.x % 128; i < TILE * 16; i += 128) {
        int key = i / 16, chunk = i % 16;
        Chunk* at = reinterpret_cast<Chunk*>(v) + key / GROUP * (GROUP_BYTES / 16) +
                          chunk / 8 * (GROUP_BYTES / 32) + key % GROUP * 8 + chunk % 8;
        *at = Chunk{0, 0, 0, 0};
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(side + 1) : "memory");
}

// One warpgroup's 64 rows of a unit.
struct Side {
    Shared& shared;
    const Attention& a;
    int side;
    Place k, v;
    bool is_paired;  // the other side has rows, too

    // Sides take turns to ask for products, so that one makes weights while the tensor cores work for the
    // other. Every tile has one turn of each side.
    __device__ __forceinline__ void begin_turn() {
        if (is_paired) asm volatile("bar.sync %0, 256;" ::"r"(side + 3) : "memory");
    }
    __device__ __forceinline__ void end_turn() {
        if (is_paired) asm volatile("bar.arrive %0, 256;" ::"r"(4 - side) : "memory");
    }

    // Of a side without rows: what it is brought goes back at once.
    __device__ __forceinline__ void pass(const Unit& unit) {
        for (int tile = unit.first_tile; tile < unit.end_tile; ++tile) {
            await(shared_address(&shared.k_full[k.stage]), k.parity);
            __syncwarp();
            arrive_warp(shared.k_empty[k.stage]);
            k.advance();
            await(shared_address(&shared.v_full[v.stage]), v.parity);
            __syncwarp();
            arrive_warp(shared.v_empty[v.stage]);
            v.advance();
        }
    }

    __device__ __forceinline__ void ask_next_scores(float (&scores)[32], const Query& q) {
        await(shared_address(&shared.k_full[k.stage]), k.parity);
        ask_scores(scores, q, shared_address(shared.k[k.stage]));
    }

    __device__ __forceinline__ void ask_next_values(float (&values)[64], const u32 (&weights)[16],
                                                    int num_keys) {
        await(shared_address(&shared.v_full[v.stage]), v.parity);
        if (num_keys < TILE) clear_tail(shared.v[v.stage], num_keys, side);
        ask_values(values, weights, shared_address(shared.v[v.stage]));
    }

    __device__ __forceinline__ void store(const Unit& unit, const Softmax& total, const float (&sums)[64]) {
        bool is_whole = unit.is_whole();
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % SIDE_WARPS;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = side * SIDE_ROWS + warp * 16 + lane / 4 + 8 * half;
            if (row >= unit.num_rows) continue;
            if (is_whole) {
                float inverse;
                asm("div.full.f32 %0, %1, %2;" : "=f"(inverse) : "f"(1.0f), "f"(total.sum[half]));
                long long place = static_cast<long long>(unit.first_row + row) * a.num_heads + unit.head;
                u16* out = a.out + place * HEAD_DIM + lane % 4 * 2;
#pragma unroll
                for (int n = 0; n < 16; ++n) {
                    float low = sums[4 * n + 2 * half], high = sums[4 * n + 2 * half + 1];
                    *reinterpret_cast<u32*>(out + n * 8) =
                        to_bf16_pair(__fmul_rn(low, inverse), __fmul_rn(high, inverse));
                }
            } else {
                long long place = static_cast<long long>(unit.first_partial + row) * a.num_heads + unit.head;
                float* out = a.partial_sums + place * HEAD_DIM + lane % 4 * 2;
#pragma unroll
                for (int n = 0; n < 16; ++n) {
                    out[n * 8] = sums[4 * n + 2 * half];
                    out[n * 8 + 1] = sums[4 * n + 2 * half + 1];
                }
                if (lane % 4 == 0) {
                    a.partial_stats[place * 2] = total.maximum[half];
                    a.partial_stats[place * 2 + 1] = total.sum[half];
                }
            }
        }
    }

    // Makes weights of the scores of `tile`, which have come.
    __device__ __forceinline__ u32 weigh_next(float (&scores)[32], float (&factors)[2], Softmax& split,
                                              int tile, int end_open, int row) {
        arrive_warp(shared.k_empty[k.stage]);
        k.advance();
        return tile < end_open ? weigh<true>(scores, factors, split, tile * TILE, row, a.scale)
                               : weigh<false>(scores, factors, split, tile * TILE, row, a.scale);
    }

    // One walk over all tiles of a unit, whatever splits they belong to.
    __device__ __forceinline__ void attend(const Unit& unit, const Query& q) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % SIDE_WARPS;
        int first_position = unit.position + side * SIDE_ROWS;
        int row = first_position + warp * 16 + lane / 4;
        int end_open = (first_position + 1) / TILE;
        float sums[64], values[64], scores[32], factors[2];
        u32 weights[16];
        Softmax total, split;
        total.maximum[0] = total.maximum[1] = NONE, total.sum[0] = total.sum[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[i] = 0.0f;
        split = total;
#pragma unroll
        for (int i = 0; i < 64; ++i) values[i] = 0.0f;
        begin_turn();
        ask_next_scores(scores, q);
        end_turn();
        await_products<0>();
        weigh_next(scores, factors, split, unit.first_tile, end_open, row);
        pack_weights(weights, scores);
        for (int tile = unit.first_tile + 1; tile < unit.end_tile; ++tile) {
            bool is_next_split = tile % SPLIT_TILES == 0;
            Softmax last = split;
            if (is_next_split) split.maximum[0] = split.maximum[1] = NONE, split.sum[0] = split.sum[1] = 0.0f;
            begin_turn();
            ask_next_scores(scores, q);
            ask_next_values(values, weights, TILE);
            end_turn();
            await_products<1>();
            u32 bits = weigh_next(scores, factors, split, tile, end_open, row);
            stay_behind(bits, shared_address(shared.unused));
            await_products<0>();
            arrive_warp(shared.v_empty[v.stage]);
            v.advance();
            if (is_next_split) {
                fold(total, sums, last, values, a.scale);
#pragma unroll
                for (int i = 0; i < 64; ++i) values[i] = 0.0f;
            } else {
                scale_values(values, factors);
            }
            pack_weights(weights, scores);
        }
        ask_next_values(values, weights, unit.key_limit() - (unit.end_tile - 1) * TILE);
        await_products<0>();
        arrive_warp(shared.v_empty[v.stage]);
        v.advance();
        fold(total, sums, split, values, a.scale);
        store(unit, total, sums);
    }

    __device__ __forceinline__ void run(int num_units) {
        Unit unit;
        u32 turn = 0;
        for (unit.first = 0; unit.first < num_units; unit.first += gridDim.x) {
            if (!unit.read(a, num_units)) continue;
            u32 slot = turn % Q_SLOTS;
            await(shared_address(&shared.q_full[slot]), turn / Q_SLOTS % 2);
            is_paired = unit.num_rows > SIDE_ROWS;
            Query q;
            load_query(q, shared_address(shared.q[slot][side]));
            __syncwarp();
            arrive_warp(shared.q_empty[slot]);
            if (unit.num_rows > side * SIDE_ROWS) attend(unit, q);
            else pass(unit);
            ++turn;
        }
    }
};

// Asks for keys and values: warp w of four for group w of every tile, and for quarter w of the queries. One
// lane of each, since the copy engine takes one request at a time from a warp: twelve lanes of one warp were
// the limit of the whole kernel.
struct Loader {
    Shared& shared;
    const Attention& a;
    int warp;

    // The row of the pools at which the warp's group of `tile` begins. Past the last key the last group again.
    __device__ __forceinline__ int row_of(const Unit& unit, int tile) const {
        int group = min(tile * GROUPS + warp, (unit.key_limit() - 1) / GROUP);
        return a.row_of(unit.ring, unit.plane, unit.head, group);
    }

    __device__ __forceinline__ void ask_queries(const Unit& unit, u32 turn) const {
        u32 slot = turn % Q_SLOTS, full = shared_address(&shared.q_full[slot]);
        int side = warp / 2, half = warp % 2;
        await(shared_address(&shared.q_empty[slot]), turn / Q_SLOTS % 2 ^ 1);
        expect_bytes(full, SIDE_ROWS * 128);
        copy_box(shared_address(shared.q[slot][side]) + half * (SIDE_ROWS * 128), a.q, full,
                 unit.head * HEAD_DIM + half * 64, unit.first_row + side * SIDE_ROWS);
    }

    __device__ __forceinline__ void run(int num_units) {
        Unit unit;
        Place place{0, 0};
        u32 turn = 0;
        for (unit.first = 0; unit.first < num_units; unit.first += gridDim.x) {
            if (!unit.read(a, num_units)) continue;
            int row = row_of(unit, unit.first_tile);
            ask_queries(unit, turn);
            for (int tile = unit.first_tile; tile < unit.end_tile; ++tile) {
                int next = tile + 1 < unit.end_tile ? row_of(unit, tile + 1) : 0;
                u32 k_full = shared_address(&shared.k_full[place.stage]);
                u32 v_full = shared_address(&shared.v_full[place.stage]);
                u32 k = shared_address(shared.k[place.stage]) + warp * (GROUP * 128);
                u32 v = shared_address(shared.v[place.stage]) + warp * GROUP_BYTES;
                await(shared_address(&shared.k_empty[place.stage]), place.parity ^ 1);
                expect_bytes(k_full, GROUP_BYTES);
                copy_box(k, a.k, k_full, 0, row);
                copy_box(k + HALF_BYTES, a.k, k_full, 64, row);
                await(shared_address(&shared.v_empty[place.stage]), place.parity ^ 1);
                expect_bytes(v_full, GROUP_BYTES);
                copy_box(v, a.v, v_full, 0, row, 0);
                row = next;
                place.advance();
            }
            ++turn;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    tall_attention(const __grid_constant__ Attention a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    allow_next();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < Q_SLOTS; ++i) {
            open_barrier(shared_address(&shared.q_full[i]), 2 * SIDES);
            open_barrier(shared_address(&shared.q_empty[i]), SIDES * SIDE_WARPS);
        }
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            open_barrier(shared_address(&shared.k_full[i]), GROUPS);
            open_barrier(shared_address(&shared.v_full[i]), GROUPS);
            open_barrier(shared_address(&shared.k_empty[i]), SIDES * SIDE_WARPS);
            open_barrier(shared_address(&shared.v_empty[i]), SIDES * SIDE_WARPS);
        }
        publish_barriers();
    }
    __syncthreads();
    // Shuffled, so that the compiler knows that a warp agrees: descriptors are made by its scalar unit then.
    int num_units = *a.num_items * a.num_heads, side = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (side == SIDES) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x % 32) return;
        wait_for_inputs();
        Loader{shared, a, static_cast<int>(threadIdx.x) / 32 % GROUPS}.run(num_units);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        Side one{shared, a, side, {0, 0}, {0, 0}, true};
        if (side == 1) one.end_turn();  // the first turn is the other's
        one.run(num_units);
    }
}
