// Decodes codes in lanes (lanes.py, lane_models.py): a thread per lane, a warp per group, a row of codes per step.
//
// What is done with the codes, and how they are coded, is fixed when this is compiled:
//   TASK      DECODE: all of them are written. MULTIPLY: a vector is multiplied by the matrix, and each segment's
//             sums are written. GATHER: only some columns are written.
//   PAIR, CLASSED, RAW, INDIRECT, PATCHED   0 or 1: see LaneLayout; CLASSED where there are several models.
//   STEPS     steps between the times at which lanes may take a word
//   SCALED    NONE (codes are written), ONE, ROW or COLUMN: what has a scale
//   OUT, ROUNDED, IN   types: of what is written, what weights are rounded to before, and of the vector
//   EVEN      1 where the matrix is full, 0 where its last row has fewer codes
//   WARPS     groups of a block
//
// A state is read, and gives the address of its entry, whose parts give the next state: that is all a step waits
// for. Entries are in shared memory, where 32 threads can look up any 32 of them, and so are words, which are copied
// there in the order of the group. A lane has three words in registers: a load for one lane, used at once, would
// keep all of them waiting.

#define DECODE 0
#define MULTIPLY 1
#define GATHER 2
#define NONE 0
#define ONE 1
#define ROW 2
#define COLUMN 3
#define FLOAT 0
#define BFLOAT16 1
#define FLOAT16 2
#define INT8 3
#define INT16 4

// Words of a warp in shared memory. Lanes take words TIMES times, 32 each time at most, before more are copied. What
// they take then was copied two rounds before, when as many words were ahead as three rounds can take.
#ifndef RING
#define RING 512
#define TIMES 4
#endif
#define COPIED (3 * 32 * TIMES)

typedef unsigned int word_t;
typedef unsigned short half_t;

struct Job {
    const unsigned char *packed;
    const void *inputs;  // the vector; or the columns that are gathered
    const float *scale;
    void *out;
    long long count, states_at, groups_at, table_at, patches_at, classes_at;
    int columns, lanes, rows, segment, groups, table_bits, raw_bits, models, low, wanted;
    int four;  // 4: an integer product, unlike a shift, is computed beside other integer operations
};

#ifndef ON_CPU
#define DECODE_LANES decode_lanes
#define ADD_SUMS add_sums
#define EXTERN_SHARED(type, name) extern __shared__ type name[]

// In assembly is what the compiler would do with more instructions, or where it would wait for a load.
typedef word_t address_t;
#define ADDRESS(pointer) ((address_t)__cvta_generic_to_shared(pointer))

__device__ __forceinline__ word_t load_shared(address_t address) {
    word_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ void load_shared(address_t address, float &one, float &other) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(one), "=f"(other) : "r"(address));
}

__device__ __forceinline__ void load_shared(address_t address, float &one, float &two, float &three, float &four) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(one), "=f"(two), "=f"(three), "=f"(four)
                 : "r"(address));
}

// Copies into shared memory while the thread goes on.
__device__ __forceinline__ void start_copy(address_t to, const word_t *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void end_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all batches of copies but the last two are there.
__device__ __forceinline__ void wait_for_batches() { asm volatile("cp.async.wait_group 2;" ::: "memory"); }

// Lanes that have used a word drop it, and take the next of the group: each as many later as lanes before it do.
__device__ __forceinline__ void take_words(word_t place, word_t marked, word_t before, word_t four,
                                           address_t ring, word_t &next, word_t &one, word_t &two, word_t &three) {
    word_t takes;
    asm volatile(
        "{\n"
        ".reg .pred used;\n"
        ".reg .u32 rank;\n"
        "xor.b32 rank, %5, %6;\n"
        "and.b32 rank, rank, 32;\n"
        "setp.ne.u32 used, rank, 0;\n"
        "vote.sync.ballot.b32 %0, used, 0xFFFFFFFF;\n"
        "and.b32 rank, %0, %7;\n"
        "popc.b32 rank, rank;\n"
        "mad.lo.u32 rank, rank, %10, %4;\n"
        "lop3.b32 rank, rank, %9, %8, 0xEA;\n"
        "@used mov.u32 %1, %2;\n"
        "@used mov.u32 %2, %3;\n"
        "@used ld.shared.u32 %3, [rank];\n"
        "}"
        : "=r"(takes), "+r"(one), "+r"(two), "+r"(three)
        : "r"(next), "r"(place), "r"(marked), "r"(before), "r"(ring), "n"(4 * RING - 1), "r"(four));
    next += four * __popc(takes);
}

// bits & mask | others
__device__ __forceinline__ word_t masked(word_t bits, word_t mask, word_t others) {
    word_t value;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(value) : "r"(bits), "r"(mask), "r"(others));
    return value;
}

__device__ __forceinline__ float from_half(half_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ half_t to_half(float value) {
    half_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ half_t to_bfloat16(float value) {
    half_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

__device__ __forceinline__ float from_bfloat16(half_t bits) { return __uint_as_float((word_t)bits << 16); }

#if IN == FLOAT
#define LOAD_INPUT(place) (((const float *)job.inputs)[place])
#elif IN == BFLOAT16
#define LOAD_INPUT(place) from_bfloat16(((const half_t *)job.inputs)[place])
#else
#define LOAD_INPUT(place) from_half(((const half_t *)job.inputs)[place])
#endif

#if ROUNDED == BFLOAT16
#define ROUND(value) from_bfloat16(to_bfloat16(value))
#elif ROUNDED == FLOAT16
#define ROUND(value) from_half(to_half(value))
#else
#define ROUND(value) (value)
#endif

#if OUT == FLOAT
typedef float out_t;
typedef float2 out_pair_t;
#define STORED(value) (value)
#define STORED_PAIR(one, other) make_float2(one, other)
#elif OUT == INT8
typedef signed char out_t;
typedef half_t out_pair_t;
#define STORED(value) ((signed char)(value))
#define STORED_PAIR(one, other) ((half_t)(((one) & 0xFF) | ((other) & 0xFF) << 8))
#elif OUT == INT16
typedef short out_t;
typedef word_t out_pair_t;
#define STORED(value) ((short)(value))
#define STORED_PAIR(one, other) ((word_t)(((one) & 0xFFFF) | ((other) & 0xFFFF) << 16))
#else
typedef half_t out_t;
typedef word_t out_pair_t;
#if OUT == BFLOAT16
#define STORED(value) to_bfloat16(value)
#else
#define STORED(value) to_half(value)
#endif
#define STORED_PAIR(one, other) ((word_t)STORED(one) | (word_t)STORED(other) << 16)
#endif

// An entry's field, as it stands, in the fraction of a number from 16 to 32: a float at the cost of two operations.
// So codes come in units of a power of two, which the scale makes up for, exactly.
#define SIXTEEN 0x41800000u
#define FIRST_UNIT (PAIR ? 128.0f : 8192.0f)
#define SECOND_UNIT 8192.0f
#if PAIR
#define FIRST(entry) (__uint_as_float(masked(entry, 0x3F000u, SIXTEEN)) - 16.25f)
#define SECOND(entry) (__uint_as_float(masked(entry, 0xFC0u, SIXTEEN)) - 16.00390625f)
#define FIRST_CODE(entry) ((int)((entry) >> 12 & 63) - 32)
#define SECOND_CODE(entry) ((int)((entry) >> 6 & 63) - 32)
#else
#define FIRST(entry) (__uint_as_float(masked(entry, 0x3FFC0u, SIXTEEN)) - 16.25f)
#define FIRST_CODE(entry) ((int)((entry) >> 6 & 4095) - 2048)
#endif

// Some of a vector, in as few loads as there can be: it begins at a multiple of STEPS.
__device__ __forceinline__ void load_values(float *values, address_t vector, int steps) {
#if STEPS == 2
    if (steps == 2) return load_shared(vector, values[0], values[1]);
#elif STEPS == 4
    if (steps == 4) return load_shared(vector, values[0], values[1], values[2], values[3]);
#endif
#pragma unroll
    for (int step = 0; step < STEPS; step++)
        if (step < steps) values[step] = __uint_as_float(load_shared(vector + 4 * step));
}

// Numbers of four bits, two in each byte.
#define NIBBLE(bytes, place) ((bytes)[(place) >> 1] >> (((place) & 1) * 4) & 15)

__device__ __forceinline__ void make_entries(const Job &job, word_t *table, word_t *counts, int thread) {
#if INDIRECT
    // A warp per model: how many slots each symbol has, then where each slot is among those of its symbol.
    const unsigned char *numbers = job.packed + job.table_at;
    const int lane = thread & 31, slots = 1 << job.table_bits;
    word_t *own = counts + (thread >> 5) * 256;
    for (int model = thread >> 5; model < job.models; model += WARPS) {
        for (int number = lane; number < 256; number += 32) own[number] = 0;
        __syncwarp();
        for (int slot = lane; slot < slots; slot += 32) atomicAdd(own + numbers[(model << job.table_bits) + slot], 1u);
        __syncwarp();
        for (int slot = lane; slot < slots; slot += 32) {
            const word_t number = numbers[(model << job.table_bits) + slot];
            const word_t alike = __match_any_sync(0xFFFFFFFFu, number);
            const word_t base = own[number] + __popc(alike & ((1u << lane) - 1));
            __syncwarp();
            if (__ffs(alike) - 1 == lane) own[number] += __popc(alike);
            __syncwarp();
            const int field = ((int)number + job.low) * (1 << job.raw_bits) + 2048;
            const word_t read = job.table_bits - (31 - __clz(base));
            table[(model << job.table_bits) + slot] = base << 18 | (word_t)(field ^ (PAIR ? 32 : 0)) << 6 | read;
        }
        __syncwarp();
    }
#else
    const uint4 *entries = (const uint4 *)(job.packed + job.table_at);
    const int fours = job.models << (job.table_bits - 2);
    for (int four = thread; four < fours; four += 32 * WARPS) ((uint4 *)table)[four] = entries[four];
#endif
}

// Shared memory holds the rings, at a multiple of their size; the entries; then the vector's part for the segment, or
// what entries are made with.
extern "C" __global__ void __launch_bounds__(32 * WARPS) DECODE_LANES(const Job job) {
    EXTERN_SHARED(word_t, shared);
    const address_t rings = (ADDRESS(shared) + 4 * RING - 1) & -(4 * RING);
    word_t *const table = shared + (rings - ADDRESS(shared)) / 4 + WARPS * RING;
    const int thread = threadIdx.x, lane = thread & 31;
    const int slots = job.models << job.table_bits;
#if TASK == GATHER
    const int unit = blockIdx.x * WARPS + (thread >> 5), wanted = unit % job.wanted, part = unit / job.wanted;
    const bool works = part * job.segment < job.rows;
    const int target = works ? (int)((const long long *)job.inputs)[wanted] : 0;
    if (target < 0 || target >= job.columns) __trap();
    const int group = target / (32 * (1 + PAIR));
#else
    const int across = (job.groups + WARPS - 1) / WARPS;
    const int part = blockIdx.x / across, group = blockIdx.x % across * WARPS + (thread >> 5);
    const bool works = group < job.groups;
#endif
    const int row = part * job.segment, stop = min(row + job.segment, job.rows);
    word_t *const rest = table + slots + 4;
    table[slots] = 0;  // the entry of threads without a lane, which read nothing and stay in state 0
    make_entries(job, table, rest, thread);
#if TASK == MULTIPLY
    __syncthreads();  // what entries were made with is done with
    float *vector = (float *)rest;
    for (int place = thread; place < stop - row; place += 32 * WARPS) vector[place] = LOAD_INPUT(row + place);
#endif
    __syncthreads();
    if (!works) return;

    const int own = group * 32 + lane, width = min(32, job.lanes - group * 32);
    const bool inside = lane < width;
    const word_t before = (1u << lane) - 1;
    const int *about = (const int *)(job.packed + job.groups_at) + 2 * ((long long)part * job.groups + group);
    const word_t *words = (const word_t *)job.packed + (word_t)about[0];
    const int count = about[2] - about[0];  // words of the group; a lane that has used all of its own takes anything
    word_t one = inside && lane < count ? words[lane] : 0x80000000u;
    word_t two = inside && width + lane < count ? words[width + lane] : 0;
    word_t three = inside && 2 * width + lane < count ? words[2 * width + lane] : 0;
    words += 3 * width;
    const address_t ring = rings + (thread >> 5) * (4 * RING);
    int copied = lane;
    word_t next = 0;  // bytes of the words that have been taken
    auto copy_words = [&]() {
#pragma unroll 1
        for (; copied - lane < (int)(next / 4) + COPIED; copied += 32)
            if (copied < count - 3 * width) start_copy(ring | (4 * copied & (4 * RING - 1)), words + copied);
        end_batch();
    };
    copy_words();
    end_batch();
    word_t state = 0;
    if (inside) state = ((const half_t *)(job.packed + job.states_at))[(long long)part * job.lanes + own];
    if (inside) state += 1u << job.table_bits;
    address_t entries = inside ? ADDRESS(table) - (4u << job.table_bits) : ADDRESS(table + slots);
    const int column = own * (1 + PAIR);
#if CLASSED
    const unsigned char *classes = job.packed + job.classes_at;
    if (inside) entries += NIBBLE(classes, job.rows + own) << (job.table_bits + 2);
#endif
    // The bit to be read next; its lowest six bits count, so that whole entries can be added to it.
    word_t place = __clz(one) + 1, marked = 0;
#if RAW
    const word_t shift = 32 - job.raw_bits, raw_bits = inside ? job.raw_bits : 0;
#endif
#if TASK == MULTIPLY
    float first_sum = 0, second_sum = 0;
    address_t input = ADDRESS(vector);
#else
    float first_scale = 1, second_scale = 1;
#if SCALED == ONE
    first_scale = job.scale[0] * FIRST_UNIT;
    second_scale = job.scale[0] * SECOND_UNIT;
#elif SCALED == COLUMN
    if (inside) first_scale = job.scale[column] * FIRST_UNIT;
    if (inside && PAIR) second_scale = job.scale[column + 1] * SECOND_UNIT;
#endif
#if TASK == GATHER
    const bool is_wanted = inside && target / (1 + PAIR) == own;
    out_t *out = (out_t *)job.out + (long long)wanted * job.rows + row;
#else
    out_t *out = (out_t *)job.out + (long long)row * job.columns + column;
#endif
#endif

    auto decode = [&](int start, int steps) {  // steps is STEPS, but at the end
        take_words(place, marked, before, job.four, ring, next, one, two, three);
        marked = place;
        word_t window = __funnelshift_l(two, one, place);
#if TASK == MULTIPLY
        float values[STEPS];
        load_values(values, input, steps);
        input += 4 * STEPS;
#endif
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            if (step >= steps) break;
            [[maybe_unused]] const int at = start + step;
#if CLASSED
            const word_t model = inside ? NIBBLE(classes, at) << job.table_bits : 0;
            word_t entry = load_shared(entries + job.four * (state + model));
#else
            word_t entry = load_shared(entries + job.four * state);
#endif
            // A shift counts the lowest five bits alone.
            state = __funnelshift_l(window, entry >> 18, entry);
            window = __funnelshift_l(0, window, entry);
            place += entry;
#if RAW
            entry += window >> shift << 6;
            window <<= job.raw_bits;
            place += raw_bits;
#endif
#if TASK == MULTIPLY
            first_sum = fmaf(FIRST(entry), values[step], first_sum);
#if PAIR
            second_sum = fmaf(SECOND(entry), values[step], second_sum);
#endif
#else
#if SCALED == NONE
            const int first = FIRST_CODE(entry);
#if PAIR
            const int second = SECOND_CODE(entry);
#endif
#else
#if SCALED == ROW
            first_scale = job.scale[at] * FIRST_UNIT;
            second_scale = first_scale * (SECOND_UNIT / FIRST_UNIT);
#endif
            const float first = ROUND(FIRST(entry) * first_scale);
#if PAIR
            const float second = ROUND(SECOND(entry) * second_scale);
#endif
#endif
#if TASK == GATHER && PAIR
            if (is_wanted) out[at - row] = target & 1 ? STORED(second) : STORED(first);
#elif TASK == GATHER
            if (is_wanted) out[at - row] = STORED(first);
#else
            const long long number = (long long)at * job.columns + column;
#if PAIR
            if (inside && (EVEN || number + 1 < job.count)) *(out_pair_t *)out = STORED_PAIR(first, second);
            else if (inside && number < job.count) *out = STORED(first);
#else
            if (inside && (EVEN || number < job.count)) *out = STORED(first);
#endif
            out += job.columns;
#endif
#endif
        }
    };
    auto copy_more = [&]() {
        __syncwarp();  // what is overwritten has been taken
        copy_words();
        wait_for_batches();
        __syncwarp();
    };
    int start = row;
    for (; start + TIMES * STEPS <= stop; start += TIMES * STEPS) {
        copy_more();
#pragma unroll
        for (int time = 0; time < TIMES; time++) decode(start + time * STEPS, STEPS);
    }
    copy_more();
    for (; start + STEPS <= stop; start += STEPS) decode(start, STEPS);
    if (start < stop) decode(start, stop - start);

#if PATCHED
    const int *patches = (const int *)(job.packed + job.patches_at);
    for (int patch = about[1]; patch < about[3]; patch++) {  // a group's number of patches is followed by the next one's
        const word_t bits = patches[patch];
        const int at = row + (int)(bits >> 20), within = bits >> 12 & 0xFF, code = (int)(bits << 20) >> 20;
        if (within / (1 + PAIR) != lane) continue;
#if TASK == MULTIPLY
        const float product = code * vector[at - row];
        if (PAIR && (within & 1)) second_sum += product / SECOND_UNIT;
        else first_sum += product / FIRST_UNIT;
#else
#if SCALED == NONE
        const int weight = code;
#else
#if SCALED == ROW
        const float scale = job.scale[at];
#else
        const float scale = PAIR && (within & 1) ? second_scale / SECOND_UNIT : first_scale / FIRST_UNIT;
#endif
        const float weight = ROUND(code * scale);
#endif
#if TASK == GATHER
        if (is_wanted && group * 32 * (1 + PAIR) + within == target) out[at - row] = STORED(weight);
#else
        ((out_t *)job.out)[(long long)at * job.columns + group * 32 * (1 + PAIR) + within] = STORED(weight);
#endif
#endif
    }
#endif

#if TASK == MULTIPLY
    float *sums = (float *)job.out + (long long)part * job.columns + column;
    if (inside) sums[0] = first_sum * FIRST_UNIT;
    if (inside && PAIR) sums[1] = second_sum * SECOND_UNIT;
#endif
}

struct Sums {
    const float *sums;  // (segments, columns)
    const float *scale;
    void *out;
    int columns, segments, scales;
};

// The sums of all segments, times one scale or one per column.
extern "C" __global__ void ADD_SUMS(const Sums job) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= job.columns) return;
    float total = 0;
    for (int segment = 0; segment < job.segments; segment++) total += job.sums[(long long)segment * job.columns + column];
    ((out_t *)job.out)[column] = STORED(total * job.scale[job.scales > 1 ? column : 0]);
}
