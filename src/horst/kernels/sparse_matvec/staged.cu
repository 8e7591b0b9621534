// Inputs times a sparse matrix, with the inputs in shared memory: a gather there takes a few cycles, whatever the columns.
//
// A warp takes one row after the other. While it multiplies what it holds, its next BATCH loads of 16 bytes per thread are
// on their way, also those of its next row. Sums are in float32, in an order that does not change. Set by the host:
//   TOKENS  1, 2, 4 or 8 tokens, side by side in shared memory
//   WARPS   warps per block
//   BATCH   loads of four words in flight per thread
//   BF16    whether values are bfloat16, else float16
typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ float upper(u32 word) {
#if BF16
    return __uint_as_float(word & 0xffff0000u);
#else
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"((u16)(word >> 16)));
    return number;
#endif
}

__device__ __forceinline__ float lower(u32 word) { return upper(word << 16); }

__device__ __forceinline__ u16 rounded(float number) {
    u16 bits;
#if BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(number));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(number));
#endif
    return bits;
}

__device__ __forceinline__ uint4 read_once(const uint4* place) {
    uint4 four;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w) : "l"(place));
    return four;
}

// Four words per thread and load, from `at` on. Past the end of the row: value 0 at the column whose input is 0.
__device__ __forceinline__ void load(uint4 (&held)[BATCH], const uint4* words, int at, int end, int lane, u32 none) {
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
        int place = at + 32 * u + lane;
        held[u] = place < end ? read_once(words + place) : make_uint4(none, none, none, none);
    }
}

__device__ __forceinline__ void add(float (&sums)[TOKENS], u32 word, const u16* inputs) {
    u32 column = word & 0xffffu;
    float weight = upper(word);
#if TOKENS == 1
    sums[0] = fmaf(weight, upper((u32)inputs[column] << 16), sums[0]);
#else
#if TOKENS == 2
    u32 pairs[1] = {((const u32*)inputs)[column]};
#elif TOKENS == 4
    uint2 found = ((const uint2*)inputs)[column];
    u32 pairs[2] = {found.x, found.y};
#else
    uint4 found = ((const uint4*)inputs)[column];
    u32 pairs[4] = {found.x, found.y, found.z, found.w};
#endif
#pragma unroll
    for (int t = 0; t < TOKENS / 2; ++t) {
        sums[2 * t] = fmaf(weight, lower(pairs[t]), sums[2 * t]);
        sums[2 * t + 1] = fmaf(weight, upper(pairs[t]), sums[2 * t + 1]);
    }
#endif
}

// x of shape (tokens, width) into inputs of shape (width + 1, TOKENS); the last column, and tokens past the last, are 0.
__device__ __forceinline__ void stage(u16* inputs, const u16* __restrict__ x, int width, int tokens) {
    int thread = threadIdx.x;
    bool in_pairs = width % 8 == 0 && (size_t)x % 16 == 0;
#if TOKENS == 1
    if (in_pairs) {
        for (int i = thread; i < width / 8; i += 32 * WARPS) ((uint4*)inputs)[i] = ((const uint4*)x)[i];
    } else {
        for (int i = thread; i < width; i += 32 * WARPS) inputs[i] = x[i];
    }
#else
    if (in_pairs) {
        for (int i = thread; i < width / 2; i += 32 * WARPS) {
            u32 two[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) two[t] = t < tokens ? ((const u32*)(x + (size_t)t * width))[i] : 0u;
            u32* target = (u32*)inputs + (size_t)i * TOKENS;
#pragma unroll
            for (int t = 0; t < TOKENS / 2; ++t) {
                target[t] = (two[2 * t] & 0xffffu) | (two[2 * t + 1] << 16);
                target[TOKENS / 2 + t] = (two[2 * t] >> 16) | (two[2 * t + 1] & 0xffff0000u);
            }
        }
    } else {
        for (int i = thread; i < width * TOKENS; i += 32 * WARPS) {
            int t = i / width, column = i - t * width;
            inputs[column * TOKENS + t] = t < tokens ? x[(size_t)t * width + column] : (u16)0;
        }
    }
#endif
    if (thread < TOKENS) inputs[width * TOKENS + thread] = 0;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) sparse_matvec(
    const u16* __restrict__ x, const uint4* __restrict__ words, const int* __restrict__ starts,
    const int* __restrict__ order, const u16* __restrict__ bias, u16* __restrict__ y,
    int rows, int width, int tokens, int has_bias) {
    extern __shared__ __align__(16) u16 inputs[];
    int lane = threadIdx.x % 32, step = gridDim.x * WARPS;
    int row = blockIdx.x * WARPS + threadIdx.x / 32;
    int begin = 0, end = 0;
    if (row < rows) begin = starts[row], end = starts[row + 1];
    u32 none = (u32)width;
    uint4 held[BATCH];
    load(held, words, begin, end, lane, none);
    stage(inputs, x, width, tokens);
    __syncthreads();
    for (; row < rows; row += step) {
        int next = row + step, next_begin = 0, next_end = 0;
        if (next < rows) next_begin = starts[next], next_end = starts[next + 1];
        int target = order[row];
        float sums[TOKENS] = {};
        int at = begin;
        do {
            uint4 now[BATCH];
#pragma unroll
            for (int u = 0; u < BATCH; ++u) now[u] = held[u];
            bool more = at + 32 * BATCH < end;
            load(held, words, more ? at + 32 * BATCH : next_begin, more ? end : next_end, lane, none);
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
                if (at + 32 * u < end) {
                    add(sums, now[u].x, inputs);
                    add(sums, now[u].y, inputs);
                    add(sums, now[u].z, inputs);
                    add(sums, now[u].w, inputs);
                }
            }
            at += 32 * BATCH;
        } while (at < end);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
            for (int other = 16; other > 0; other /= 2) sums[t] += __shfl_xor_sync(0xffffffffu, sums[t], other);
            if (lane == t && t < tokens) {
                float sum = has_bias ? sums[t] + upper((u32)bias[target] << 16) : sums[t];
                y[(size_t)t * rows + target] = rounded(sum);
            }
        }
        begin = next_begin;
        end = next_end;
    }
}
