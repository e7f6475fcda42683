// Encodes codes in lanes (lanes.py, lane_encode.py), to the words that lanes.cu decodes: a thread per lane, a warp per
// group, from the last row to the first.
//
// How many words a group has is known at its end. So each writes into room of its own, the last word first, in the
// order in which a decoder takes them; then all are moved to where they belong.

typedef unsigned int word_t;
typedef unsigned short half_t;

#define WARPS 4
#define PAIR_BITS 6

struct Job {
    const void *codes;   // (rows, columns), int8 or int16
    const int2 *symbols; // by model and symbol: what a step adds to the state, 0 for a symbol without a slot; and where
                         // its slots begin
    const half_t *slots; // in the order of their symbols
    const unsigned char *row_classes, *column_classes;
    word_t *room;
    half_t *states;
    int *about;          // by group: where its words begin in its room, how many there are, and how many patches
    const int *groups;   // by group: the words and the patches before its own
    word_t *words;
    word_t *patches;
    int columns, lanes, rows, segment, groups_across, group_count, group_room;
    int table_bits, raw_bits, symbol_count, low, steps, is_pair, is_wide;
};

// The symbol of a lane's row: its place in the tables, and its codes, whether or not they are in a patch.
struct Symbol {
    int place, first, second;
    bool is_rare;
};

__device__ __forceinline__ int load_code(const Job &job, long long place) {
    return job.is_wide ? ((const short *)job.codes)[place] : ((const signed char *)job.codes)[place];
}

__device__ __forceinline__ Symbol symbol_of(const Job &job, int row, int lane) {
    const long long place = (long long)row * job.columns + (long long)lane * (1 + job.is_pair);
    Symbol found = {0, load_code(job, place), 0, false};
    int symbol = found.first >> job.raw_bits;
    if (job.is_pair) {
        constexpr int half = 1 << (PAIR_BITS - 1);
        found.second = load_code(job, place + 1);
        found.is_rare = found.first < -half || found.first >= half || found.second < -half || found.second >= half;
        symbol = found.first * 2 * half + (found.second & (2 * half - 1));
    }
    const int table = (job.row_classes[row] + job.column_classes[lane]) * job.symbol_count;
    found.is_rare = found.is_rare || symbol < job.low || symbol >= job.low + job.symbol_count;
    found.place = table + symbol - job.low;
    found.is_rare = found.is_rare || job.symbols[found.place].x == 0;
    if (found.is_rare) found.place = table - job.low;
    return found;
}

// The words of a lane, of which the last three are at hand, and what a decoder takes at the time that follows.
struct Lane {
    unsigned long long bits;
    word_t last, before, oldest;
    int count, words;
    word_t later;      // the word that is taken at the following time, if any is
    int later_left;    // how many words are used from that time on
    bool is_later;     // whether there is such a word: a lane that has used all takes anything
};

__device__ __forceinline__ void write_word(Lane &lane) {
    lane.oldest = lane.before;
    lane.before = lane.last;
    lane.last = (word_t)lane.bits;
    lane.bits >>= 32;
    lane.words++;
}

// Lanes that use a word between two times take one at the second of them, each as many places later as lanes before it
// do. `end` is behind the last word that belongs to a lane.
__device__ __forceinline__ void take_words(const Lane &lane, int left, word_t *room, int &place, int &end) {
    const bool takes = left > lane.later_left;
    const word_t before = (1u << (threadIdx.x & 31)) - 1;
    const word_t taking = __ballot_sync(0xFFFFFFFFu, takes), real = __ballot_sync(0xFFFFFFFFu, takes && lane.is_later);
    place -= __popc(taking);
    if (takes) room[place + __popc(taking & before)] = lane.later;
    if (!end && real) end = place + __popc(taking & (0xFFFFFFFFu >> __clz(real)));
}

extern "C" __global__ void encode_lanes(const Job job) {
    const int thread = threadIdx.x & 31, group = blockIdx.x * WARPS + threadIdx.x / 32;
    if (group >= job.group_count) return;
    const int part = group / job.groups_across, across = group % job.groups_across;
    const int own = across * 32 + thread, width = min(32, job.lanes - across * 32);
    const int start = part * job.segment, stop = min(start + job.segment, job.rows);
    const bool inside = thread < width;
    word_t *const room = job.room + (long long)group * job.group_room;
    int place = job.group_room, end = 0, patches = 0;
    word_t state = 0;
    Lane lane = {0, 0, 0, 0, 0, 0, 0, 0x7FFFFFFF, false};
    for (int row = stop - 1; row >= start; row--) {
        if (inside) {
            const Symbol symbol = symbol_of(job, row, own);
            if (symbol.is_rare) patches += (symbol.first != 0) + (symbol.second != 0);
            const word_t raw = symbol.is_rare ? 0 : symbol.first & ((1 << job.raw_bits) - 1);
            lane.bits |= (unsigned long long)raw << lane.count;
            lane.count += job.raw_bits;
            const int2 step = job.symbols[symbol.place];
            state += 1u << job.table_bits;
            const int number = (int)(state + step.x) >> 16;
            lane.bits |= (unsigned long long)(state & ((1u << number) - 1)) << lane.count;
            lane.count += number;
            state = job.slots[step.y + (int)(state >> number)];
            if (lane.count >= 32) {
                write_word(lane);
                lane.count -= 32;
            }
        }
        if ((row - start) % job.steps == 0) {
            const int left = lane.words + (lane.count > 0);
            take_words(lane, left, room, place, end);
            lane.later = lane.count > 0 ? lane.before : lane.oldest;
            lane.is_later = left >= 3;
            lane.later_left = left;
        }
    }
    if (inside) {
        lane.bits |= 1ull << lane.count;  // marks the first bit
        write_word(lane);
    }
    take_words(lane, lane.words, room, place, end);
    place -= 3 * width;
    for (int number = 2; number >= 0; number--) {
        const word_t real = __ballot_sync(0xFFFFFFFFu, inside && lane.words > number);
        const int behind = place + number * width;
        if (!end && real) end = behind + 32 - __clz(real);
        if (inside) room[behind + thread] = number == 0 ? lane.last : number == 1 ? lane.before : lane.oldest;
    }
    if (inside) job.states[(long long)part * job.lanes + own] = (half_t)state;
    for (int step = 16; step > 0; step /= 2) patches += __shfl_down_sync(0xFFFFFFFFu, patches, step);
    if (thread == 0) {
        job.about[3 * group] = place;
        job.about[3 * group + 1] = end - place;
        job.about[3 * group + 2] = patches;
    }
}

// Moves every group's words behind those of the groups before, and writes its patches, row by row.
extern "C" __global__ void place_lanes(const Job job) {
    const int thread = threadIdx.x & 31, group = blockIdx.x * WARPS + threadIdx.x / 32;
    if (group >= job.group_count) return;
    const int *about = job.about + 3 * group, *before = job.groups + 2 * group;
    const word_t *from = job.room + (long long)group * job.group_room + about[0];
    word_t *words = job.words + before[0];
    for (int word = thread; word < about[1]; word += 32) words[word] = from[word];
    if (about[2] == 0) return;
    const int part = group / job.groups_across, own = group % job.groups_across * 32 + thread;
    const int start = part * job.segment, stop = min(start + job.segment, job.rows);
    word_t *patches = job.patches + before[1];
    for (int row = start; row < stop; row++) {
        Symbol symbol = {0, 0, 0, false};
        if (own < job.lanes) symbol = symbol_of(job, row, own);
        const bool first = symbol.is_rare && symbol.first, second = symbol.is_rare && symbol.second;
        const word_t firsts = __ballot_sync(0xFFFFFFFFu, first), seconds = __ballot_sync(0xFFFFFFFFu, second);
        const word_t lanes_before = (1u << thread) - 1;
        word_t *next = patches + __popc(firsts & lanes_before) + __popc(seconds & lanes_before);
        const word_t at = (word_t)(row - start) << 20 | thread * (1 + job.is_pair) << 12;
        if (first) *next++ = at | (symbol.first & 0xFFF);
        if (second) *next = at | 1 << 12 | (symbol.second & 0xFFF);
        patches += __popc(firsts) + __popc(seconds);
    }
}
