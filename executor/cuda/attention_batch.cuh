// What both attention kernels work on: the K/V and the work items of a batch, packed by
// `executor.kernels.worklist`.

#define TILE 64  // keys
#define SPLIT_TILES 8
#define HEAD_DIM 128
#define GROUP 16  // tokens of a K/V block
#define NONE __int_as_float(0xff800000)

struct __align__(16) Chunk {
    u32 x, y, z, w;
};

struct __align__(64) TensorMap {
    unsigned long long words[16];
};

struct Batch {
    TensorMap k;        // boxes of half the columns of a group of one head: a line of 128 bytes a key
    TensorMap v;        // boxes as the kernel takes them
    const int* groups;  // rows of stride `stride_groups`
    const int* items;   // [num_items, 8]
    const int* num_items;
    u16* out;              // [rows, heads * HEAD_DIM]
    float* partial_sums;   // [partials, heads, HEAD_DIM]
    float* partial_stats;  // [partials, heads, 2]
    int depth_offset;
    int stride_groups;
    int planes;
    int num_heads;
    int num_kv_heads;
    float scale;

    // The row of the pools at which a group of a ring lies, for one head.
    __device__ __forceinline__ int row_of(int ring, int plane, int head, int group) const {
        int block = groups[static_cast<long long>(ring) * stride_groups + group] * planes + plane;
        return (block * num_kv_heads + head / (num_heads / num_kv_heads)) * GROUP;
    }
};

static_assert(sizeof(Batch) == 384, "as `Batch` in `batch.py`");

// One head of one item.
struct Item {
    int first_row, num_rows, position, ring, plane, first_tile, end_tile, first_partial, head;

    __device__ __forceinline__ void read(const Batch& a, int unit) {
        const int* item = a.items + unit / a.num_heads * 8;
        head = unit % a.num_heads;
        first_row = item[0], num_rows = item[1], position = item[2], ring = item[3],
        plane = item[4] + a.depth_offset;
        first_tile = item[5], end_tile = item[6], first_partial = item[7];
    }
    __device__ __forceinline__ int key_limit() const { return position + num_rows; }
    __device__ __forceinline__ bool is_whole() const {
        return first_tile == 0 && end_tile * TILE >= key_limit();
    }
};

