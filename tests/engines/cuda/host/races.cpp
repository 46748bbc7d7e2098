#include "engines/cuda/host/races.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <unordered_map>

#include "engines/cuda/host/device.h"

namespace softdelta::host::races {

namespace {

constexpr std::uint32_t under_way = 0xffffffffu;  // a step that nobody knows

struct Read {
    std::uint32_t step;
    int thread;
    bool by_product;
    void* from;
};

// Two bytes of memory, in the block that touched them last.
struct Cell {
    std::uint64_t block = 0, launch = 0;
    int writer = -1;
    std::uint32_t step = 0;
    void* written_from = nullptr;
    std::vector<Read> reads;
};

struct Thread {
    Known known;
    std::vector<Cell*> reads_of_products;  // since the last commit
    std::deque<std::vector<Cell*>> running;
    std::vector<Cell*> stored;  // that the copy engine reads
};

std::vector<Thread> threads;
const std::byte* shared = nullptr;
std::size_t shared_bytes = 0;
std::vector<Cell> shared_cells;
std::unordered_map<std::uintptr_t, std::vector<Cell>> pages;  // of other memory
std::uint64_t block = 0, launch = 0;
bool is_running = false;

// A write that races with another one is none where it leaves what was there: looked at when the thread goes on.
struct Doubt {
    const std::byte* at = nullptr;
    std::uint16_t before = 0;
    const char* what = nullptr;
    void *from = nullptr, *other = nullptr;
};
std::vector<Doubt> doubts;

[[noreturn]] void fail(const char* what, void* from, void* other, const void* at) {
    const auto offset = [](void* code) {
        Dl_info info{};
        if (code == nullptr || dladdr(code, &info) == 0) return std::uintptr_t{0};
        return reinterpret_cast<std::uintptr_t>(code) - reinterpret_cast<std::uintptr_t>(info.dli_fbase) - 1;
    };
    Dl_info info{};
    dladdr(from, &info);
    const auto* place = static_cast<const std::byte*>(at);
    if (place >= shared && place < shared + shared_bytes)
        std::fprintf(stderr, "byte %zu of shared memory: ", static_cast<std::size_t>(place - shared));
    std::fprintf(stderr, "%s\naddr2line -i -e %s 0x%zx 0x%zx\n", what, info.dli_fname, offset(from), offset(other));
    check(false, "a race");
    std::abort();
}

void settle() {
    for (const Doubt& was : doubts) {
        std::uint16_t now = 0;
        std::memcpy(&now, was.at, sizeof now);
        if (now != was.before) fail(was.what, was.from, was.other, was.at);
    }
    doubts.clear();
}

bool is_shared(std::uintptr_t at) {
    const auto first = reinterpret_cast<std::uintptr_t>(shared);
    return at >= first && at < first + shared_bytes;
}
Cell& cell_at(std::uintptr_t at) {
    if (is_shared(at)) return shared_cells[(at - reinterpret_cast<std::uintptr_t>(shared)) / 2];
    constexpr std::uintptr_t page = 4096;
    std::vector<Cell>& cells = pages[at / page];
    if (cells.empty()) cells.resize(page / 2);
    return cells[at % page / 2];
}

bool knows(int thread, int other, std::uint32_t step) {
    return thread == other ||
           step <= threads[static_cast<std::size_t>(thread)].known.steps[static_cast<std::size_t>(other)];
}
void suspect(const char* what, std::uintptr_t at, void* from, void* other) {
    Doubt doubt{reinterpret_cast<const std::byte*>(at), 0, what, from, other};
    std::memcpy(&doubt.before, doubt.at, sizeof doubt.before);
    doubts.push_back(doubt);
}

// What other blocks of the launch did is never known; what other launches did always is.
void enter(Cell& cell, std::uintptr_t at, bool writes, void* from) {
    if (cell.block == block) return;
    if (!is_shared(at) && cell.launch == launch && cell.writer >= 0) {
        if (!writes)
            fail("read here, written there by another block", from, cell.written_from, reinterpret_cast<void*>(at));
        suspect("written by two blocks", at, from, cell.written_from);
    }
    cell.block = block;
    cell.launch = launch;
    cell.writer = -1;
    cell.reads.clear();
}

void read(std::uintptr_t at, void* from, bool by_product) {
    Cell& cell = cell_at(at);
    enter(cell, at, false, from);
    const int thread = running_thread();
    const auto fails = [&](const char* what) { fail(what, from, cell.written_from, reinterpret_cast<void*>(at)); };
    if (cell.writer >= 0) {
        if (cell.step == under_way) fails("read here while a copy from there is under way");
        if (!knows(thread, cell.writer, cell.step)) fails("read here, written there, nothing between");
        const auto& published = threads[static_cast<std::size_t>(thread)].known.published;
        if (by_product && cell.step > published[static_cast<std::size_t>(cell.writer)])
            fails("read here by a product, written there, not published between");
    }
    const std::uint32_t step =
        by_product ? under_way
                   : threads[static_cast<std::size_t>(thread)].known.steps[static_cast<std::size_t>(thread)];
    std::size_t kept = 0;
    for (const Read& r : cell.reads)
        if (r.by_product ? r.thread != thread || !by_product : !knows(thread, r.thread, r.step)) cell.reads[kept++] = r;
    cell.reads.resize(kept);
    cell.reads.push_back({step, thread, by_product, from});
}

void write(std::uintptr_t at, void* from, bool in_background) {
    Cell& cell = cell_at(at);
    enter(cell, at, true, from);
    const int thread = running_thread();
    if (cell.writer >= 0 && cell.step == under_way)
        fail("written here while a copy from there is under way", from, cell.written_from, reinterpret_cast<void*>(at));
    if (cell.writer >= 0 && !knows(thread, cell.writer, cell.step))
        suspect("written here and there, nothing between", at, from, cell.written_from);
    for (const Read& r : cell.reads)
        if (r.step == under_way || !knows(thread, r.thread, r.step))
            suspect("written here, read there before, nothing between", at, from, r.from);
    cell.reads.clear();
    cell.writer = thread;
    cell.step = in_background ? under_way
                              : threads[static_cast<std::size_t>(thread)].known.steps[static_cast<std::size_t>(thread)];
    cell.written_from = from;
}

template <class Use>
void for_each_cell(const void* at, std::size_t bytes, const Use& use) {
    const auto first = reinterpret_cast<std::uintptr_t>(at);
    for (std::uintptr_t a = first / 2 * 2; a < first + bytes; a += 2) use(a);
}

void access(const void* at, std::size_t bytes, bool writes, void* from) {
    settle();
    if (!is_running || is_private(at)) return;
    for_each_cell(at, bytes, [&](std::uintptr_t a) { writes ? write(a, from, false) : read(a, from, false); });
}

void join(std::vector<std::uint32_t>& to, const std::vector<std::uint32_t>& from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}
void join(Known& to, const Known& from) {
    join(to.steps, from.steps);
    join(to.published, from.published);
}
Thread& own() {
    return threads[static_cast<std::size_t>(running_thread())];
}
std::uint32_t& own_step() {
    return own().known.steps[static_cast<std::size_t>(running_thread())];
}

// This thread's reads of them in the background end at that step.
void mark(const std::vector<Cell*>& cells, std::uint32_t step) {
    for (Cell* cell : cells)
        for (Read& r : cell->reads)
            if (r.by_product && r.thread == running_thread()) r.step = step;
}

}  // namespace

void begin_launch(const void* memory, std::size_t bytes) {
    shared = static_cast<const std::byte*>(memory);
    shared_bytes = bytes;
    shared_cells.resize(std::max(shared_cells.size(), bytes / 2 + 1));
    ++launch;
}
void begin_block(int count) {
    settle();
    ++block;
    is_running = true;
    const auto size = static_cast<std::size_t>(count);
    threads.assign(size, {});
    for (std::size_t t = 0; t < size; ++t) {
        threads[t].known.steps.assign(size, 0);
        threads[t].known.published.assign(size, 0);
        threads[t].known.steps[t] = 1;
    }
}
void end_launch() {
    settle();
    is_running = false;
}

void come(Meeting& meeting) {
    settle();
    join(meeting.gathered, own().known);
    ++own_step();
}
void all_came(Meeting& meeting) {
    join(meeting.passed, meeting.gathered);
    meeting.gathered = {};
}
void leave(const Meeting& meeting) {
    join(own().known, meeting.passed);
}

void copy_begins(const void* to, std::size_t bytes) {
    settle();
    void* const from = __builtin_return_address(0);
    for_each_cell(to, bytes, [&](std::uintptr_t a) { write(a, from, true); });
}
void copy_ends(const void* to, std::size_t bytes) {
    for_each_cell(to, bytes, [&](std::uintptr_t a) { cell_at(a).step = own_step(); });
}
void copy_ends(const void* to, std::size_t bytes, Meeting& meeting, int thread) {
    const auto of = static_cast<std::size_t>(thread);
    const std::uint32_t step = meeting.gathered.steps[of];  // of its arrival: known to who leaves the meeting
    meeting.gathered.published[of] = step;                  // the engine writes where products read
    for_each_cell(to, bytes, [&](std::uintptr_t a) { cell_at(a).step = step; });
}
void store_reads(const void* from, std::size_t bytes) {
    settle();
    void* const code = __builtin_return_address(0);
    for_each_cell(from, bytes, [&](std::uintptr_t a) {
        read(a, code, true);
        own().stored.push_back(&cell_at(a));
    });
}
void wait_for_stored() {
    mark(own().stored, own_step());
    own().stored.clear();
}

void product_reads(const void* from, std::size_t bytes) {
    settle();
    void* const code = __builtin_return_address(0);
    for_each_cell(from, bytes, [&](std::uintptr_t a) {
        read(a, code, true);
        own().reads_of_products.push_back(&cell_at(a));
    });
}
void commit_products() {
    own().running.push_back(std::move(own().reads_of_products));
    own().reads_of_products.clear();
}
void wait_for_products(int running) {
    Thread& thread = own();
    while (thread.running.size() > static_cast<std::size_t>(running)) {
        mark(thread.running.front(), own_step());
        thread.running.pop_front();
    }
    for (const auto& cells : thread.running) mark(cells, under_way);
}
void publish_to_products() {
    own().known.published = own().known.steps;
}

}  // namespace softdelta::host::races

// What -fsanitize=thread calls.
#define SOFTDELTA_ACCESS(name, bytes)                                                  \
    void __tsan_##name##read##bytes(void* at) {                                        \
        softdelta::host::races::access(at, bytes, false, __builtin_return_address(0)); \
    }                                                                                  \
    void __tsan_##name##write##bytes(void* at) {                                       \
        softdelta::host::races::access(at, bytes, true, __builtin_return_address(0));  \
    }
#define SOFTDELTA_ACCESSES(bytes) \
    SOFTDELTA_ACCESS(, bytes)     \
    SOFTDELTA_ACCESS(unaligned_, bytes)
// NOLINTBEGIN(bugprone-reserved-identifier): the compiler's names
extern "C" {
SOFTDELTA_ACCESSES(1)
SOFTDELTA_ACCESSES(2)
SOFTDELTA_ACCESSES(4)
SOFTDELTA_ACCESSES(8)
SOFTDELTA_ACCESSES(16)
void __tsan_read_range(void* at, std::size_t bytes) {
    softdelta::host::races::access(at, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* at, std::size_t bytes) {
    softdelta::host::races::access(at, bytes, true, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
}
// NOLINTEND(bugprone-reserved-identifier)
