// Attention of items of up to 16 query rows, the bits of `executor.kernels.attention` with a split's tiles
// side by side.
//
// A cluster of four blocks takes one head of one item, split after split. Each block holds the keys of two of
// a split's eight tiles and a quarter of the columns of its values. Scores of all tiles are made at once. The
// running maximum of a row is exact in any order, so each tile's weights can be made before the tiles before
// it are summed; the weights then go to all four blocks, and every output column walks its keys in order.
//
// What the blocks send each other needs no second buffer but for the maxima: a warp sends those of the next
// step when it has read all of this one, and weights only when it has the maxima of every warp.

// Rows g and g + 8 of the queries as the left operand, g = lane / 4.
__device__ __forceinline__ void read_queries(u32 (&q)[8][4], const Step& step, const Attention& a) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = lane / 4 + 8 * half;
        bool is_real = row < step.num_rows;
        const u16* from = a.q + static_cast<long long>(step.first_row + row) * a.stride_q +
                          step.head * HEAD_DIM + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            q[i][half] = is_real ? *reinterpret_cast<const u32*>(from + i * 16) : 0;
            q[i][half + 2] = is_real ? *reinterpret_cast<const u32*>(from + i * 16 + 8) : 0;
        }
    }
}

// Scores of the warp's 32 keys, masked, and their largest of rows g and g + 8.
__device__ __forceinline__ void make_scores(float (&scores)[4][4], float (&largest)[2], const u32 (&q)[8][4],
                                            const Shared& shared, const Step& step, u32 rank) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 k = shared_address(shared.k) + warp * (2 * K_BYTES) + lane % 8 * 128,
        swizzle = (lane / 8 ^ lane % 8) * 16;
#pragma unroll
    for (int n = 0; n < 4; ++n) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 words[4][4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
            load_matrices(words[n], k + n / 2 * K_BYTES + n % 2 * (8 * 128) + i / 2 * (GROUP * 128) +
                                        (swizzle ^ (i % 2 * 64)));
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const u32(&left)[4] = q[2 * i + half];
                multiply_add(scores[n], left[0], left[1], left[2], left[3], words[n][2 * half],
                             words[n][2 * half + 1]);
            }
    }
    int first = step.first_key() + rank * BLOCK_KEYS + warp * 32 + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        largest[half] = NONE;
        if (half == step.halves()) break;
        int row = step.position + lane / 4 + 8 * half;
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int j = 2 * half; j < 2 * half + 2; ++j) {
                if (first + n * 8 + j % 2 > row) scores[n][j] = NONE;
                largest[half] = fmaxf(largest[half], scores[n][j]);
            }
        largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 1));
        largest[half] = fmaxf(largest[half], __shfl_xor_sync(~0u, largest[half], 2));
    }
}

__device__ __forceinline__ float base_of(float maximum) { return maximum == NONE ? 0.0f : maximum; }

// The warp's maxima to every block: lane l to block l % 4.
__device__ __forceinline__ void send_maxima(const float (&largest)[2], Shared& shared, int parity,
                                            const Step& step, u32 rank) {
    int lane = threadIdx.x % 32, half_tile = rank * WARPS + threadIdx.x / 32;
    u32 box = in_block(shared_address(&shared.maxima_box), lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half == step.halves()) break;
        u32 target = shared_address(&shared.maxima[parity][half_tile][lane / 4 + 8 * half]);
        send(in_block(target, lane % 4), __float_as_uint(largest[half]), box);
    }
}

// Weights of the warp's keys to every block, as bfloat16, and their sums as integers, multiples of 2^-22.
__device__ __forceinline__ void send_weights(const float (&scores)[4][4], Shared& shared, int parity,
                                             const Step& step, u32 rank, float scale) {
    int lane = threadIdx.x % 32, half_tile = rank * WARPS + threadIdx.x / 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half == step.halves()) break;
        int row = lane / 4 + 8 * half;
        float maximum = NONE;
#pragma unroll
        for (int i = 0; i < HALVES; ++i)
            maximum = fmaxf(maximum, i <= (half_tile | 1) ? shared.maxima[parity][i][row] : NONE);
        float offset = __fmul_rn(-base_of(maximum), scale);
        int count = 0;
        u32 pairs[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            float low = exp2_of(__fmaf_rn(scores[n][2 * half], scale, offset));
            float high = exp2_of(__fmaf_rn(scores[n][2 * half + 1], scale, offset));
            count += __float_as_int(__fmaf_rn(low, 4194304.0f, 8388608.0f));
            count += __float_as_int(__fmaf_rn(high, 4194304.0f, 8388608.0f));
            pairs[n] = to_bf16_pair(low, high);
        }
        count += __shfl_xor_sync(~0u, count, 1);
        count += __shfl_xor_sync(~0u, count, 2);
        if (row < step.num_rows) {
            u32 box = shared_address(&shared.weights_box),
                weights = shared_address(&shared.weights[half_tile][row][lane % 4]);
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block)
                send(in_block(weights, block), pairs, in_block(box, block));
            u32 counted = shared_address(&shared.counts[half_tile][row]);
            send(in_block(counted, lane % 4), count, in_block(box, lane % 4));
        }
    }
}

// Bytes of all `send_weights` and of all `send_maxima` to one block.
__device__ __forceinline__ u32 weights_bytes(const Step& step) {
    return step.num_rows * (KEYS * 2 + HALVES * 4);
}
__device__ __forceinline__ u32 maxima_bytes(const Step& step) { return step.halves() * (HALVES * 8 * 4); }

struct Softmax {
    float maximum[2], sum[2], values[4];  // of rows g and g + 8; values of two columns each

    __device__ __forceinline__ void clear() {
        maximum[0] = maximum[1] = NONE;
        sum[0] = sum[1] = values[0] = values[1] = values[2] = values[3] = 0.0f;
    }
    // Joins the next split, the operations of `executor.kernels.fold`.
    __device__ __forceinline__ void fold(const Softmax& split, float scale) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float joined = fmaxf(maximum[half], split.maximum[half]), base = base_of(joined);
            float left = exp2_of(__fmul_rn(maximum[half] - base, scale));
            float right = exp2_of(__fmul_rn(split.maximum[half] - base, scale));
            sum[half] = __fmaf_rn(sum[half], left, __fmul_rn(split.sum[half], right));
            maximum[half] = joined;
#pragma unroll
            for (int j = 2 * half; j < 2 * half + 2; ++j)
                values[j] = __fmaf_rn(values[j], left, __fmul_rn(split.values[j], right));
        }
    }
};

struct Words {
    Chunk weights[2][2];
    u32 values[2][4];
};  // weights: half of the tile, rows g and g + 8

__device__ __forceinline__ void load_words(Words& words, const Shared& shared, u32 values, int tile) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        words.weights[i / 2][i % 2] = shared.weights[2 * tile + i / 2][lane / 4 + 8 * (i % 2)][lane % 4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        load_matrices_transposed(words.values[i], values + (tile * TILE + i * 32) * 64);
}

// The warp's eight columns over the split's tiles in order. A tile of which there are no keys changes
// nothing.
__device__ __forceinline__ void sum_values(Softmax& split, const Shared& shared, int parity, const Step& step,
                                           float scale) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_tiles = step.num_tiles();
    u32 values = shared_address(shared.v) + lane * 64 + (warp ^ (lane / 2 & 3)) * 16;
    Words words[2];
    load_words(words[0], shared, values, 0);
    split.clear();
    float factors[SPLIT_TILES][2];
#pragma unroll
    for (int tile = 0; tile < SPLIT_TILES; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            factors[tile][half] = 1.0f;
            if (half == step.halves()) break;
            int row = lane / 4 + 8 * half;
            float maximum =
                fmaxf(shared.maxima[parity][2 * tile][row], shared.maxima[parity][2 * tile + 1][row]);
            maximum = fmaxf(split.maximum[half], maximum);
            factors[tile][half] = exp2_of(__fmul_rn(split.maximum[half] - base_of(maximum), scale));
            int count = shared.counts[2 * tile][row] + shared.counts[2 * tile + 1][row] + 1073741824;
            float weight = __fmul_rn(static_cast<float>(count), 1.0f / 4194304.0f);
            split.sum[half] = __fmaf_rn(split.sum[half], factors[tile][half], weight);
            split.maximum[half] = maximum;
        }
#pragma unroll
    for (int tile = 0; tile < SPLIT_TILES; ++tile) {
        if (tile >= num_tiles) break;
        if (tile + 1 < SPLIT_TILES) load_words(words[(tile + 1) % 2], shared, values, tile + 1);
        const Words& now = words[tile % 2];
#pragma unroll
        for (int j = 0; j < 4; ++j) split.values[j] = __fmul_rn(split.values[j], factors[tile][j / 2]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Chunk(&w)[2] = now.weights[i / 2];
            u32 v0 = now.values[i / 2][i % 2 * 2], v1 = now.values[i / 2][i % 2 * 2 + 1];
            if (i % 2) multiply_add(split.values, w[0].z, w[1].z, w[0].w, w[1].w, v0, v1);
            else multiply_add(split.values, w[0].x, w[1].x, w[0].y, w[1].y, v0, v1);
        }
    }
}

__device__ __forceinline__ void store(const Softmax& total, const Step& step, const Attention& a, u32 rank) {
    int lane = threadIdx.x % 32, column = rank * COLUMNS + threadIdx.x / 32 * 8 + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = lane / 4 + 8 * half;
        if (row >= step.num_rows) continue;
        float low = total.values[2 * half], high = total.values[2 * half + 1];
        if (step.is_whole()) {
            float inverse;
            asm("div.full.f32 %0, %1, %2;" : "=f"(inverse) : "f"(1.0f), "f"(total.sum[half]));
            long long place = static_cast<long long>(step.first_row + row) * a.num_heads + step.head;
            *reinterpret_cast<u32*>(a.out + place * HEAD_DIM + column) =
                to_bf16_pair(__fmul_rn(low, inverse), __fmul_rn(high, inverse));
        } else {
            long long place = static_cast<long long>(step.first_partial + row) * a.num_heads + step.head;
            a.partial_sums[place * HEAD_DIM + column] = low;
            a.partial_sums[place * HEAD_DIM + column + 1] = high;
            if (column == 0) {
                a.partial_stats[place * 2] = total.maximum[half];
                a.partial_stats[place * 2 + 1] = total.sum[half];
            }
        }
    }
}

// Values of the last tile past the last key become 0: their weight is, and what the pool holds there may be
// no number.
__device__ __forceinline__ void clear_tail(Shared& shared, const Step& step) {
    Chunk* v = reinterpret_cast<Chunk*>(shared.v);
    for (int i = step.num_keys() * 4 + threadIdx.x; i < step.num_tiles() * TILE * 4; i += WARPS * 32)
        v[i] = Chunk{0, 0, 0, 0};
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before the copy engine writes here again
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
}

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 2)
    attention(const __grid_constant__ Attention a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    u32 rank = cluster_rank();
    int clusters = gridDim.x / BLOCKS, lane = threadIdx.x % 32;
    allow_next();
    int num_units = *a.num_items * a.num_heads;
    Step step;
    step.unit = blockIdx.x / BLOCKS;
    if (step.unit >= num_units) return;  // the whole cluster
    step.read(a);
    u32 maxima_box = shared_address(&shared.maxima_box), weights_box = shared_address(&shared.weights_box);
    if (threadIdx.x == 0) {
        open_barrier(maxima_box, 1);
        open_barrier(weights_box, 1);
        open_barrier(shared_address(&shared.k_full), 1);
        open_barrier(shared_address(&shared.k_empty), WARPS);
        open_barrier(shared_address(&shared.v_full), 1);
        open_barrier(shared_address(&shared.v_empty), WARPS);
        publish_barriers();
    }
    meet_cluster();  // every block is here and its barriers are open
    if (threadIdx.x >= WARPS * 32) {
        Loader{shared, a, rank}.run(step, clusters, num_units);
        return;
    }
    wait_for_inputs();
    u32 q[8][4];
    read_queries(q, step, a);
    Softmax total, split;
    total.clear();
    for (u32 parity = 0; step.unit < num_units; parity ^= 1) {
        if (threadIdx.x == 0) {
            expect_bytes(maxima_box, maxima_bytes(step));
            expect_bytes(weights_box, weights_bytes(step));
        }
        await(shared_address(&shared.k_full), parity);
        float scores[4][4], largest[2];
        make_scores(scores, largest, q, shared, step, rank);
        if (lane == 0) arrive(shared_address(&shared.k_empty));
        send_maxima(largest, shared, parity, step, rank);
        Step next = step;
        next.advance(a, clusters, num_units);
        if (next.unit < num_units && next.unit != step.unit) read_queries(q, next, a);
        await_bytes(maxima_box, parity);
        send_weights(scores, shared, parity, step, rank, a.scale);
        await(shared_address(&shared.v_full), parity);
        if (step.num_keys() < step.num_tiles() * TILE) clear_tail(shared, step);
        await_bytes(weights_box, parity);
        sum_values(split, shared, parity, step, a.scale);
        __syncwarp();
        if (lane == 0) arrive(shared_address(&shared.v_empty));
        total.fold(split, a.scale);
        if (step.is_last_split()) {
            store(total, step, a, rank);
            total.clear();
        }
        step = next;
    }
}

// Joins the partial results of rows that were split, in the order of the splits: a warp for each head of a
// row.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    combine(const int* combines, const int* num_combines, const float* partial_sums,
            const float* partial_stats, u16* out, int num_heads, float scale) {
    allow_next();
    int lane = threadIdx.x % 32, num_units = *num_combines * num_heads;
    wait_for_inputs();
    for (int unit = blockIdx.x * WARPS + threadIdx.x / 32; unit < num_units; unit += gridDim.x * WARPS) {
        const int* entry = combines + unit / num_heads * 4;
        int head = unit % num_heads;
        Softmax total, split;
        total.clear();
        split.clear();
        for (int i = 0; i < entry[3]; ++i) {
            long long place = static_cast<long long>(entry[1] + i * entry[2]) * num_heads + head;
            split.maximum[0] = split.maximum[1] = partial_stats[place * 2];
            split.sum[0] = split.sum[1] = partial_stats[place * 2 + 1];
#pragma unroll
            for (int j = 0; j < 4; ++j) split.values[j] = partial_sums[place * HEAD_DIM + lane * 4 + j];
            total.fold(split, scale);
        }
        float inverse;
        asm("div.full.f32 %0, %1, %2;" : "=f"(inverse) : "f"(1.0f), "f"(total.sum[0]));
        u32* target = reinterpret_cast<u32*>(
            out + (static_cast<long long>(entry[0]) * num_heads + head) * HEAD_DIM + lane * 4);
        target[0] = to_bf16_pair(__fmul_rn(total.values[0], inverse), __fmul_rn(total.values[1], inverse));
        target[1] = to_bf16_pair(__fmul_rn(total.values[2], inverse), __fmul_rn(total.values[3], inverse));
    }
}
