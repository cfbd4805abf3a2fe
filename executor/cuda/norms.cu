// The sandwich's seam for few rows: h' = h + norm(x, w_post), y = norm(h', w_next), a block of 128 threads
// for a row of SIZE elements. Every sum has the order that Triton gives its kernel of four warps: a thread's
// 16 elements one after another, lanes 16, 8, 4, 2 and 1 apart, then warps 2 and 1 apart.

#define SIZE 2048
#define THREADS 128
#define OWN (SIZE / THREADS)

struct __align__(16) Words4 {
    u32 words[4];
};

// What a thread has of a row: 8 elements, and 8 half a row further on.
struct Part {
    Words4 chunks[2];
    __device__ __forceinline__ void read(const u16* row) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            chunks[half] = *reinterpret_cast<const Words4*>(row + half * (SIZE / 2) + threadIdx.x * 8);
    }
    __device__ __forceinline__ void write(u16* row) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<Words4*>(row + half * (SIZE / 2) + threadIdx.x * 8) = chunks[half];
    }
    __device__ __forceinline__ float get(int i) const {
        u32 word = chunks[i / 8].words[i % 8 / 2];
        return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    }
    __device__ __forceinline__ void set(const float (&values)[OWN]) {
#pragma unroll
        for (int i = 0; i < OWN; i += 2)
            chunks[i / 8].words[i % 8 / 2] = to_bf16_pair(values[i], values[i + 1]);
    }
};

// 1 / sqrt(mean(x^2) + eps) of the block's row.
__device__ __forceinline__ float scale_of(const float (&x)[OWN], float* shared, float eps) {
    float sum = __fmaf_rn(x[0], x[0], __fmul_rn(x[1], x[1]));
#pragma unroll
    for (int i = 2; i < OWN; ++i) sum = __fmaf_rn(x[i], x[i], sum);
#pragma unroll
    for (int apart = 16; apart; apart /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, apart));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = __fadd_rn(__fadd_rn(shared[0], shared[2]), __fadd_rn(shared[1], shared[3]));
    float mean, scale;
    asm("div.full.f32 %0, %1, %2;" : "=f"(mean) : "f"(sum), "f"(static_cast<float>(SIZE)));
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(scale) : "f"(__fadd_rn(mean, eps)));
    return scale;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    residual_norms(const u16* x, const u16* h, const u16* w_post, const u16* w_next, u16* h_out, u16* y,
                   float eps) {
    __shared__ float sums[2][THREADS / 32];
    int row = blockIdx.x * SIZE;
    Part post, next, own, residual;
    allow_next();
    post.read(w_post);
    next.read(w_next);
    wait_for_inputs();
    own.read(x + row);
    residual.read(h + row);
    float values[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) values[i] = own.get(i);
    float scale = scale_of(values, sums[0], eps);
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        values[i] = rounded_to_bf16(__fmaf_rn(__fmul_rn(scale, values[i]), post.get(i), residual.get(i)));
    residual.set(values);
    residual.write(h_out + row);
    scale = scale_of(values, sums[1], eps);
#pragma unroll
    for (int i = 0; i < OWN; ++i) values[i] = __fmul_rn(__fmul_rn(scale, values[i]), next.get(i));
    own.set(values);
    own.write(y + row);
}
