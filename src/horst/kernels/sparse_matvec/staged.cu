// Inputs times a sparse matrix, with the inputs in shared memory: a gather there takes a few cycles, whatever the columns.
//
// A warp takes one row after the other. While it multiplies what it holds, its next BATCH loads of 16 bytes per thread are
// on their way, also those of its next row; where a row begins is known two rows ahead. Sums are in float32, in an order
// that does not change. Set by the host:
//   TOKENS   1, 2, 4 or 8 tokens, side by side in shared memory
//   WARPS    warps per block
//   BATCH    loads of four words in flight per thread
//   PER_SM   blocks that fit into a multiprocessor at the same time: a bound for registers
//   BF16     whether values are bfloat16, else float16
//   OVERLAP  whether the kernel may begin while the one before it ends. The matrix is then read before that has ended:
//            nothing on the stream may still be writing it. x, bias and y are touched after the wait alone, and x never
//            through a cache that may hold what was there before. The loads of the matrix are not ld.global.nc: the
//            assembler moves those below the wait.
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
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w) : "l"(place));
    return four;
}

__device__ __forceinline__ int read_number(const int* place) {
    int number;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(number) : "l"(place));
    return number;
}

__device__ __forceinline__ u32 read_input(const u16* place) {
    u16 bits;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(bits) : "l"(place) : "memory");
    return bits;
}

__device__ __forceinline__ u32 read_pair(const u16* place) {
    u32 pair;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(pair) : "l"(place) : "memory");
    return pair;
}

// What is past the end of the row, where `left` runs out, has value 0 at the column whose input is 0.
__device__ __forceinline__ uint4 read_words(const uint4* place, int left, u32 none) {
    return left > 0 ? read_once(place) : make_uint4(none, none, none, none);
}

// Where a stored row begins and ends, in loads of four words, and which row of the matrix it is.
struct Row {
    int begin, end, target;
};

__device__ __forceinline__ Row read_row(const int* starts, const int* order, int row, int rows) {
    Row found = {0, 0, 0};
    if (row < rows) {
        found.begin = read_number(starts + row);
        found.end = read_number(starts + row + 1);
        found.target = read_number(order + row);
    }
    return found;
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
__device__ __forceinline__ void stage(u16* inputs, const u16* x, int width, int tokens) {
    int thread = threadIdx.x;
    bool in_pairs = width % 8 == 0 && (size_t)x % 16 == 0;
#if TOKENS == 1
#if __CUDA_ARCH__ >= 800
    if (in_pairs) {
        // All copies of a thread are on their way before it waits for the first.
        u32 target = (u32)__cvta_generic_to_shared(inputs);
        for (int i = thread; i < width / 8; i += 32 * WARPS) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(target + 16 * i), "l"(x + 8 * i) : "memory");
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    } else
#endif
    {
#pragma unroll 1  // rare: registers matter more
        for (int i = thread; i < width; i += 32 * WARPS) inputs[i] = (u16)read_input(x + i);
    }
#else
    if (in_pairs) {
        for (int i = thread; i < width / 2; i += 32 * WARPS) {
            u32 two[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) two[t] = t < tokens ? read_pair(x + (size_t)t * width + 2 * i) : 0u;
            u32* target = (u32*)inputs + (size_t)i * TOKENS;
#pragma unroll
            for (int t = 0; t < TOKENS / 2; ++t) {
                target[t] = (two[2 * t] & 0xffffu) | (two[2 * t + 1] << 16);
                target[TOKENS / 2 + t] = (two[2 * t] >> 16) | (two[2 * t + 1] & 0xffff0000u);
            }
        }
    } else {
#pragma unroll 1
        for (int i = thread; i < width * TOKENS; i += 32 * WARPS) {
            int t = i / width, column = i - t * width;
            inputs[column * TOKENS + t] = t < tokens ? (u16)read_input(x + (size_t)t * width + column) : (u16)0;
        }
    }
#endif
    if (thread < TOKENS) inputs[width * TOKENS + thread] = 0;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, PER_SM) sparse_matvec(
    const u16* x, const uint4* __restrict__ words, const int* __restrict__ starts,
    const int* __restrict__ order, const u16* bias, u16* y,
    int rows, int width, int tokens, int has_bias) {
    extern __shared__ __align__(16) u16 inputs[];
#if OVERLAP
    // The next kernel may begin as soon as all blocks of this one have: it waits for the end of this one itself.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    int lane = threadIdx.x % 32, step = gridDim.x * WARPS;
    int row = blockIdx.x * WARPS + threadIdx.x / 32;
    Row now = read_row(starts, order, row, rows), next = read_row(starts, order, row + step, rows);
    u32 none = (u32)width;
    uint4 held[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; ++u) {
        held[u] = read_words(words + now.begin + lane + 32 * u, now.end - now.begin - lane - 32 * u, none);
    }
#if OVERLAP
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    stage(inputs, x, width, tokens);
    __syncthreads();
    for (; row < rows; row += step) {
        Row later = read_row(starts, order, row + 2 * step, rows);
        u32 offset = has_bias ? read_input(bias + now.target) : 0u;
        float sums[TOKENS] = {};
        bool more;
        do {
            more = now.begin + 32 * BATCH < now.end;
            int from = (more ? now.begin + 32 * BATCH : next.begin) + lane, left = (more ? now.end : next.end) - from;
            const uint4* ahead = words + from;
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
                uint4 four = held[u];
                held[u] = read_words(ahead + 32 * u, left - 32 * u, none);
                if (now.begin + 32 * u < now.end) {
                    add(sums, four.x, inputs);
                    add(sums, four.y, inputs);
                    add(sums, four.z, inputs);
                    add(sums, four.w, inputs);
                }
            }
            now.begin += 32 * BATCH;
        } while (more);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
            for (int other = 16; other > 0; other /= 2) sums[t] += __shfl_xor_sync(0xffffffffu, sums[t], other);
            if (lane == t && t < tokens) {
                y[(size_t)t * rows + now.target] = rounded(has_bias ? sums[t] + upper(offset << 16) : sums[t]);
            }
        }
        now = next;
        next = later;
    }
}
