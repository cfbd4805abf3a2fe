// What the kernels of this folder share: 16-bit words, asynchronous copies, tensor-core steps, overlapping
// launches. Compiled by NVRTC without any header, hence the inline PTX.

typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, through L2 only.
__device__ __forceinline__ void copy_16(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

// A barrier in shared memory of `arrivals`. Each phase ends when all have come; waiting is for the end of a
// phase of that parity.
__device__ __forceinline__ void open_barrier(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives when all copies that this thread has asked for, by `copy_16`, are there.
__device__ __forceinline__ void arrive_with_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// What was opened is so for the copy engine too; the other threads need a barrier of their own.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "AGAIN_%=:\n\tmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "\t@!done bra AGAIN_%=;\n\t}" ::
            "r"(barrier),
        "r"(parity)
        : "memory");
}

// Arrives at a barrier whose phase also waits for `bytes` from the copy engine, or from other blocks.
__device__ __forceinline__ void expect_bytes(u32 box, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(box), "r"(bytes) : "memory");
}

// The copy engine: a box of a tensor from (inner, ...) on. The map says how large it is and how it lies in
// shared memory.
template <typename Map>
__device__ __forceinline__ void copy_box(u32 target, const Map& map, u32 barrier, int inner, int b) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::
            "r"(target),
        "l"(&map), "r"(barrier), "r"(inner), "r"(b)
        : "memory");
}
template <typename Map>
__device__ __forceinline__ void copy_box(u32 target, const Map& map, u32 barrier, int inner, int b, int c) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(target),
        "l"(&map), "r"(barrier), "r"(inner), "r"(b), "r"(c)
        : "memory");
}
template <typename Map>
__device__ __forceinline__ void copy_box(u32 target, const Map& map, u32 barrier, int inner, int b, int c,
                                         int d) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::
            "r"(target),
        "l"(&map), "r"(barrier), "r"(inner), "r"(b), "r"(c), "r"(d)
        : "memory");
}

// Let the next kernel start; wait until every earlier one has finished and its writes are visible.
__device__ __forceinline__ void allow_next() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit words; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(u32 (&words)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&words)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

// c [16, 8] += a [16, 16] b [16, 8], bfloat16 in, float32 out.
__device__ __forceinline__ void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two floats to bfloat16, round to nearest even; `low` lies at the lower address.
__device__ __forceinline__ u32 to_bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ u16 to_bf16(float value) { return static_cast<u16>(to_bf16_pair(value, 0.0f)); }
__device__ __forceinline__ float from_bf16(u16 word) { return __uint_as_float(static_cast<u32>(word) << 16); }
__device__ __forceinline__ float rounded_to_bf16(float value) { return from_bf16(to_bf16(value)); }

// Exponential of base 2, as Triton's.
__device__ __forceinline__ float exp2_of(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// Blocks of a cluster: their number, and a place in another one's shared memory.
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {
    u32 mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// A mailbox is a barrier of one arrival and so many bytes, that any block of the cluster sends. Unlike a
// barrier of the cluster it does not wait for this thread's own copies from global memory.
__device__ __forceinline__ void await_bytes(u32 box, u32 parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "AGAIN_%=:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "\t@!done bra AGAIN_%=;\n\t}" ::
            "r"(box),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void send(u32 target, u32 word, u32 box) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(target),
        "r"(word), "r"(box)
        : "memory");
}
__device__ __forceinline__ void send(u32 target, const u32 (&words)[4], u32 box) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::
            "r"(target),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(box)
        : "memory");
}
