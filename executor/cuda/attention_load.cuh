// What attention works on, and how it gets there: the arguments, shared memory, the steps of a cluster, and
// the warp of a block that asks the copy engine for keys and values.

#define HALVES (2 * SPLIT_TILES)  // half tiles, one per warp of the cluster
#define BLOCKS 4                  // of a cluster
#define WARPS 4
#define COLUMNS (HEAD_DIM / BLOCKS)
#define KEYS (TILE * SPLIT_TILES)
#define BLOCK_KEYS (KEYS / BLOCKS)
#define MAX_ROWS 16
#define SPLIT_GROUPS (KEYS / GROUP)
#define BLOCK_GROUPS (SPLIT_GROUPS / BLOCKS)
#define K_BYTES (GROUP * HEAD_DIM * 2)  // of one group
#define V_BYTES (GROUP * COLUMNS * 2)   // of one group's columns of a block

struct Attention : Batch {  // with values in boxes of COLUMNS columns of a group of one head
    const u16* q;           // rows of stride `stride_q`, heads first
    const int* positions;   // [rows]
    int stride_q;
    int is_plane_alone;  // no two segments of a batch share a ring and a plane
};

static_assert(sizeof(Attention) == 448, "as `Arguments` in `attention.py`");

struct Shared {
    u16 k[BLOCK_KEYS * HEAD_DIM];
    u16 v[KEYS * COLUMNS];
    Chunk weights[HALVES][MAX_ROWS]
                 [4];  // as a lane needs them: of lane l % 4, two keys of each of four groups of 8
    float maxima[2][HALVES][MAX_ROWS];  // of even and odd steps
    int counts[HALVES][MAX_ROWS];
    unsigned long long maxima_box, weights_box, k_full, k_empty, v_full, v_empty;
};

static_assert(sizeof(Shared) == SHARED_BYTES, "shared memory as it is asked for");

// A step of a cluster: one split of one head of one item.
struct Step : Item {
    int unit, split;

    __device__ __forceinline__ void read(const Batch& a) {
        Item::read(a, unit);
        split = first_tile / SPLIT_TILES;
    }
    __device__ __forceinline__ int first_key() const { return split * KEYS; }
    __device__ __forceinline__ int num_keys() const { return min(KEYS, key_limit() - first_key()); }
    __device__ __forceinline__ int num_tiles() const {
        return min(SPLIT_TILES, end_tile - split * SPLIT_TILES);
    }
    __device__ __forceinline__ int halves() const {
        return num_rows > 8 ? 2 : 1;
    }  // of the 16 rows of a tile
    __device__ __forceinline__ bool is_last_split() const { return (split + 1) * SPLIT_TILES >= end_tile; }
    // Keys of the split that no kernel of this batch writes: of a row that is alone in its segment, those
    // before it.
    __device__ __forceinline__ int num_settled(const Attention& a) const {
        bool is_alone = num_rows == 1 && (first_row == 0 || a.positions[first_row - 1] != position - 1);
        return is_alone && a.is_plane_alone ? position - first_key() : 0;
    }
    __device__ __forceinline__ void advance(const Attention& a, int clusters, int num_units) {
        if (!is_last_split()) ++split;
        else if ((unit += clusters) < num_units) read(a);
    }
};

// Asks for keys and values: lane l for group l of the split, of keys only those of the block's own tiles.
struct Loader {
    Shared& shared;
    const Attention& a;
    u32 rank;

    __device__ __forceinline__ int row_of(const Step& step) const {
        int lane = threadIdx.x % 32,
            group = min(step.first_key() / GROUP + lane, (step.key_limit() - 1) / GROUP);
        return a.row_of(step.ring, step.plane, step.head, group);
    }
    __device__ __forceinline__ static int num_groups(const Step& step) {
        return (step.num_keys() + GROUP - 1) / GROUP;
    }
    __device__ __forceinline__ void expect_keys(const Step& step) const {
        int mine = max(0, min(BLOCK_GROUPS, num_groups(step) - static_cast<int>(rank) * BLOCK_GROUPS));
        if (threadIdx.x % 32 == 0) expect_bytes(shared_address(&shared.k_full), mine * K_BYTES);
        __syncwarp();
    }
    __device__ __forceinline__ void expect_values(const Step& step) const {
        if (threadIdx.x % 32 == 0) expect_bytes(shared_address(&shared.v_full), num_groups(step) * V_BYTES);
        __syncwarp();
    }
    // Of the split's groups [first, end).
    __device__ __forceinline__ void copy_keys(int row, int first, int end) const {
        int lane = threadIdx.x % 32, within = lane - static_cast<int>(rank) * BLOCK_GROUPS;
        if (lane >= first && lane < end && within >= 0 && within < BLOCK_GROUPS)
#pragma unroll
            for (int line = 0; line < 2; ++line) {
                u32 target = shared_address(shared.k) + within * K_BYTES + line * (GROUP * 128);
                copy_box(target, a.k, shared_address(&shared.k_full), line * 64, row);
            }
    }
    __device__ __forceinline__ void copy_values(int row, int first, int end) const {
        int lane = threadIdx.x % 32;
        if (lane >= first && lane < end)
            copy_box(shared_address(shared.v) + lane * V_BYTES, a.v, shared_address(&shared.v_full),
                     rank * COLUMNS, row);
    }
    __device__ __forceinline__ void run(Step step, int clusters, int num_units) const {
        int row = row_of(step), settled = min(step.num_settled(a) / GROUP, num_groups(step));
        expect_keys(step);
        expect_values(step);
        copy_keys(row, 0, settled);
        copy_values(row, 0, settled);
        wait_for_inputs();
        copy_keys(row, settled, num_groups(step));
        copy_values(row, settled, num_groups(step));
        for (u32 parity = 0;; parity ^= 1) {
            step.advance(a, clusters, num_units);
            if (step.unit >= num_units) return;
            row = row_of(step);
            await(shared_address(&shared.k_empty), parity);
            expect_keys(step);
            copy_keys(row, 0, num_groups(step));
            await(shared_address(&shared.v_empty), parity);
            expect_values(step);
            copy_values(row, 0, num_groups(step));
        }
    }
};
