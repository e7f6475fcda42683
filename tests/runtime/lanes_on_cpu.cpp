// Runs lanes.cu or lane_encode.cu on a CPU: every thread of a block is a fiber, which goes on to the next when it waits
// for others. VARIANTS is a header that includes one of them, once for every variant, with names of its own.

#include <cstring>
#include <ucontext.h>
#include <vector>

#define ON_CPU
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define EXTERN_SHARED(type, name) type *name = (type *)shared_memory

typedef unsigned int word_t;
typedef unsigned short half_t;
typedef unsigned int address_t;

struct float2 { float x, y; };
struct int2 { int x, y; };
struct uint4 { word_t x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
struct Place { unsigned x, y, z; };

static Place threadIdx, blockIdx, blockDim;
static unsigned char *shared_memory;
static bool has_trapped;

struct Barrier { int arrived = 0, round = 0; };
struct Warp { Barrier barrier; word_t votes = 0, found = 0, values[32]; };
static std::vector<ucontext_t> fibers;
static std::vector<Warp> warps;
static std::vector<bool> is_done;
static ucontext_t scheduler;
static Barrier all;
static int current;

static void wait(Barrier &barrier, int threads) {
    const int round = barrier.round;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        barrier.round++;
        return;
    }
    while (barrier.round == round) swapcontext(&fibers[current], &scheduler);
}

inline void __syncthreads() { wait(all, (int)fibers.size()); }
inline Warp &warp() { return warps[threadIdx.x / 32]; }
inline void __syncwarp() { wait(warp().barrier, 32); }
inline word_t __ballot_sync(word_t, bool vote) {
    Warp &own = warp();
    own.votes |= (word_t)vote << (threadIdx.x & 31);
    __syncwarp();
    const word_t found = own.votes;
    __syncwarp();
    own.votes = 0;
    __syncwarp();
    return found;
}
inline word_t __match_any_sync(word_t, word_t value) {
    Warp &own = warp();
    own.values[threadIdx.x & 31] = value;
    __syncwarp();
    word_t alike = 0;
    for (int lane = 0; lane < 32; lane++) alike |= (word_t)(own.values[lane] == value) << lane;
    __syncwarp();
    return alike;
}
inline int __shfl_down_sync(word_t, int value, int below) {
    Warp &own = warp();
    const int lane = threadIdx.x & 31;
    own.values[lane] = (word_t)value;
    __syncwarp();
    const int found = (int)own.values[lane + below < 32 ? lane + below : lane];
    __syncwarp();
    return found;
}
inline void atomicAdd(word_t *place, word_t more) { *place += more; }
inline int __popc(word_t bits) { return __builtin_popcount(bits); }
inline int __ffs(word_t bits) { return __builtin_ffs((int)bits); }
inline int __clz(word_t bits) { return bits ? __builtin_clz(bits) : 32; }
inline void __trap() { has_trapped = true; }
inline int min(int one, int other) { return one < other ? one : other; }
inline float fmaf(float one, float other, float more) { return __builtin_fmaf(one, other, more); }
inline float __uint_as_float(word_t bits) { float value; memcpy(&value, &bits, 4); return value; }
inline word_t __float_as_uint(float value) { word_t bits; memcpy(&bits, &value, 4); return bits; }
inline word_t __funnelshift_l(word_t low, word_t high, word_t shift) {
    return (word_t)((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}

inline address_t ADDRESS(const void *pointer) { return (address_t)((unsigned char *)pointer - shared_memory); }
inline word_t load_shared(address_t address) { word_t value; memcpy(&value, shared_memory + address, 4); return value; }
inline void load_shared(address_t address, float &one, float &other) {
    one = __uint_as_float(load_shared(address));
    other = __uint_as_float(load_shared(address + 4));
}
inline void load_shared(address_t address, float &one, float &two, float &three, float &four) {
    load_shared(address, one, two);
    load_shared(address + 8, three, four);
}
inline void start_copy(address_t to, const word_t *from) { memcpy(shared_memory + to, from, 4); }
inline void end_batch() {}
inline void wait_for_batches() {}
inline void take_words(word_t place, word_t marked, word_t before, word_t, address_t ring,
                       word_t &next, word_t &one, word_t &two, word_t &three) {
    const bool used = (place ^ marked) & 32;
    const word_t takes = __ballot_sync(0xFFFFFFFFu, used);
    if (used) {
        one = two;
        two = three;
        three = load_shared(ring | (next + 4 * __popc(takes & before) & 2047));
    }
    next += 4 * __popc(takes);
}
inline word_t masked(word_t bits, word_t mask, word_t others) { return (bits & mask) | others; }

// Conversions round to the nearest, ties to even.
inline half_t to_bfloat16(float value) {
    const word_t bits = __float_as_uint(value);
    return (half_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float from_half(half_t bits) {
    const word_t sign = (word_t)(bits & 0x8000) << 16, rest = bits & 0x7FFF;
    if (rest < 0x400) return (sign ? -1.0f : 1.0f) * (float)rest / 16777216.0f;
    return __uint_as_float(sign | ((rest << 13) + (rest < 0x7C00 ? 0x38000000u : 0x70000000u)));
}
inline half_t to_half(float value) {
    const word_t bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF;
    if (rest >= 0x47800000) return (half_t)(sign | 0x7C00);
    if (rest < 0x38800000) return (half_t)(sign | (word_t)__builtin_rintf(__builtin_fabsf(value) * 16777216.0f));
    const word_t shifted = rest - 0x38000000;
    return (half_t)(sign | ((shifted + 0xFFF + (shifted >> 13 & 1)) >> 13));
}

#include VARIANTS

static void (*running)(const void *);
static const void *argument;

static void start(int index) {
    running(argument);
    is_done[index] = true;
    swapcontext(&fibers[index], &scheduler);
}

// All blocks of a launch, one after the other. Returns whether one of them stopped with an error.
static bool launch(void (*kernel)(const void *), const void *job, int blocks, int threads, int shared_bytes) {
    constexpr int STACK = 1 << 15;
    std::vector<unsigned char> stacks((size_t)threads * STACK), shared(shared_bytes + 16);
    shared_memory = shared.data();
    running = kernel;
    argument = job;
    has_trapped = false;
    for (int block = 0; block < blocks && !has_trapped; block++) {
        blockIdx.x = block;
        blockDim.x = threads;
        fibers.assign(threads, {});
        warps.assign((threads + 31) / 32, {});
        is_done.assign(threads, false);
        all = {};
        for (int index = 0; index < threads; index++) {
            getcontext(&fibers[index]);
            fibers[index].uc_stack = {&stacks[(size_t)index * STACK], 0, STACK};
            fibers[index].uc_link = &scheduler;
            makecontext(&fibers[index], (void (*)())start, 1, index);
        }
        for (bool is_running = true; is_running && !has_trapped;) {
            is_running = false;
            for (int index = 0; index < threads; index++) {
                if (is_done[index]) continue;
                is_running = true;
                current = threadIdx.x = index;
                swapcontext(&scheduler, &fibers[index]);
            }
        }
    }
    return has_trapped;
}
