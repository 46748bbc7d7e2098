// The block that runs: its fibers, and what they wait for, barriers, counters and copies. One thought: who waits yields
// to the block's other fibers. At the end what the engine and its tests ask of CUDA's runtime.
#include "engines/cuda/host/device.h"

#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <vector>

constinit thread_local uint3 threadIdx, blockIdx;
constinit thread_local dim3 blockDim, gridDim;

// Saves the callee's registers on the running stack and goes on with those of another.
extern "C" void softdelta_switch(void** from, void* to);
asm(R"(
.text
.globl softdelta_switch
softdelta_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

namespace softdelta::host {

constinit thread_local Running running;

namespace {

// Not a power of two: the caches would keep stacks of so many fibers in the same few places.
constexpr std::size_t stack_bytes = (256 << 10) + 17 * 64, most_shared = 228 << 10;
constexpr int registers_of_all = 64 << 10, most_registers = 255;

// Exactly so many bytes: AddressSanitizer sees what lies beyond.
void* allocate(std::size_t alignment, std::size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, alignment, std::max(bytes, std::size_t{1})) != 0) std::abort();
    std::memset(memory, 0xff, bytes);
    return memory;
}
struct Free {
    void operator()(void* memory) const { std::free(memory); }
};

struct Barrier {
    races::Meeting meeting;
    int waiting = 0, threads = 0;
    std::uint64_t round = 0;
};

// 16 bytes on their way; from nowhere: zeros.
struct Copy {
    std::byte* to;
    const void* from;
};

struct Fiber {
    void* top = nullptr;
    const Barrier* at = nullptr;
    std::uint64_t round = 0;
    bool done = true;
    int registers = 0;
    std::deque<std::vector<Copy>> copies;  // in groups; the last one is being made
};

struct Warp {
    Barrier barrier, together;
    void* handed_in[32] = {};
};

struct EngineCopy {
    std::byte* to;
    const void* from;
    int elements, thread;
};

struct Counter {
    Barrier phases;
    int arrivals = 0, missing = 0, bytes = 0;  // bytes that are expected and not under way
    std::vector<EngineCopy> copies;
    bool shown = false;  // to the copy engine
};

struct Block {
    std::vector<Fiber> fibers{1024};
    std::unique_ptr<std::byte[]> stacks{new std::byte[1024 * stack_bytes]};  // the fibers', one after the other
    Warp warps[32];
    Barrier barriers[16];
    Barrier released;  // a round for each thread that gives registers back
    int free_registers = 0;
    std::map<std::uint32_t, Counter> counters;
    std::unique_ptr<std::byte[], Free> shared;  // as many bytes as the launch asks for
    void* scheduler = nullptr;
    int threads = 0;
    const std::function<void()>* kernel = nullptr;
};

// Behind a pointer: little memory of a thread can be addressed quickly.
Block& block() {
    static thread_local const std::unique_ptr<Block> one = std::make_unique<Block>();
    return *one;
}

void yield() {
    Block& b = block();
    softdelta_switch(&b.fibers[static_cast<std::size_t>(running.thread)].top, b.scheduler);
}

std::byte* stack_of(Block& b, int thread) {
    return b.stacks.get() + static_cast<std::size_t>(thread) * stack_bytes;
}
Warp& running_warp() {
    return block().warps[running.thread / 32];
}
Fiber& running_fiber() {
    return block().fibers[static_cast<std::size_t>(running.thread)];
}

// Whether all have come.
bool arrive(Barrier& barrier, int threads) {
    if (++barrier.waiting < threads) return false;
    barrier.waiting = 0;
    ++barrier.round;
    return true;
}
void wait_for_next(const Barrier& barrier) {
    Fiber& f = running_fiber();
    f.at = &barrier;
    f.round = barrier.round;
    yield();
}

// As arrive(), for barriers that order what is read and written.
bool come(Barrier& barrier, int threads) {
    races::come(barrier.meeting);
    if (!arrive(barrier, threads)) return false;
    races::all_came(barrier.meeting);
    return true;
}
void meet(Barrier& barrier, int threads) {
    if (!come(barrier, threads)) wait_for_next(barrier);
    races::leave(barrier.meeting);
}

// Of its own, for the fiber's function never returns: AddressSanitizer would keep its variables.
[[gnu::noinline]] void end_fiber() {
    for (const std::vector<Copy>& group : running_fiber().copies)
        check(group.empty(), "a thread ends while its copies are under way");
    running_fiber().done = true;
}

extern "C" void softdelta_fiber() {
    (*block().kernel)();
    end_fiber();
    yield();
    std::abort();
}

void start(Fiber& f, std::byte* stack) {
    auto* top = reinterpret_cast<void**>(stack + stack_bytes - 64);
    top = reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(top) & ~std::uintptr_t{15});
    *--top = nullptr;  // the return address of the fiber's function: it never returns
    *--top = reinterpret_cast<void*>(softdelta_fiber);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    f.top = top;
    f.at = nullptr;
    f.done = false;
    f.copies.assign(1, {});
}

// Fibers of a warp take turns until each waits for another warp.
bool run_warp(Block& b, int warp) {
    bool any = false;
    for (bool more = true; more;) {
        more = false;
        for (int t = 32 * warp; t < std::min(32 * warp + 32, b.threads); ++t) {
            Fiber& f = b.fibers[static_cast<std::size_t>(t)];
            if (f.done || (f.at != nullptr && f.at->round == f.round)) continue;
            f.at = nullptr;
            running.thread = t;
            threadIdx = {static_cast<unsigned>(t), 0, 0};
            softdelta_switch(&b.scheduler, f.top);
            more = any = true;
        }
    }
    return any;
}

void run_block(Block& b) {
    std::memset(running.shared, 0xff, running.shared_bytes);
    for (Barrier& barrier : b.barriers) barrier = {};
    b.free_registers = 0;
    for (Fiber& f : b.fibers) f.registers = std::min(registers_of_all / b.threads / 8 * 8, most_registers);
    b.counters.clear();
    for (Warp& w : b.warps) w.barrier = w.together = {};
    races::begin_block(b.threads);
    for (int t = 0; t < b.threads; ++t) start(b.fibers[static_cast<std::size_t>(t)], stack_of(b, t));
    for (bool more = true; more;) {
        more = false;
        for (int warp = 0; warp < (b.threads + 31) / 32; ++warp) more = run_warp(b, warp) || more;
    }
    for (int t = 0; t < b.threads; ++t)
        if (!b.fibers[static_cast<std::size_t>(t)].done) {
            std::fprintf(stderr, "thread %d of a block waits for ever\n", t);
            std::abort();
        }
    for (const auto& [address, counter] : b.counters)
        check(counter.copies.empty(), "a block ends while the copy engine copies for it");
}

Barrier& barrier_of(int which, int threads) {
    check(which >= 0 && which < 16, "there is no such barrier");
    Barrier& barrier = block().barriers[which];
    check(barrier.waiting == 0 || barrier.threads == threads, "a barrier's threads wait for different numbers of them");
    barrier.threads = threads;
    return barrier;
}
void end_phase(Counter& c) {
    if (c.missing > 0 || c.bytes != 0) return;
    for (const EngineCopy& copy : c.copies) {
        std::memset(copy.to, 0, copy_bytes);
        std::memcpy(copy.to, copy.from, static_cast<std::size_t>(copy.elements) * 2);
        races::copy_ends(copy.to, copy_bytes, c.phases.meeting, copy.thread);
    }
    c.copies.clear();
    races::all_came(c.phases.meeting);
    c.missing = c.arrivals;
    ++c.phases.round;
}

}  // namespace

void wait_for_block(int which, int threads) {
    meet(barrier_of(which, threads), threads);
}
void start_counter(std::uint32_t counter, int arrivals) {
    shared_at(counter, 8);
    block().counters[counter] = {{}, arrivals, arrivals, 0, {}, false};
}
void show_counters() {
    for (auto& [address, counter] : block().counters) counter.shown = true;
}
void arrive(std::uint32_t counter) {
    Counter& c = block().counters.at(counter);
    races::come(c.phases.meeting);
    --c.missing;
    end_phase(c);
}
void expect(std::uint32_t counter, int bytes) {
    block().counters.at(counter).bytes += bytes;
}
void begin_copy(std::uint32_t counter, std::byte* to, const void* from, int elements) {
    check_hopper();
    races::copy_begins(to, copy_bytes);
    std::memset(to, 0x3f, copy_bytes);
    Counter& c = block().counters.at(counter);
    check(c.shown, "a counter that the copy engine was not shown");
    c.copies.push_back({to, from, elements, running_thread()});
    c.bytes -= static_cast<int>(copy_bytes);
    end_phase(c);
}
void store(std::byte* from, void* to, int elements) {
    races::store_reads(from, copy_bytes);
    std::memcpy(to, from, static_cast<std::size_t>(elements) * 2);
}
void wait_for_stored() {
    races::wait_for_stored();
}
void wait_for_counter(std::uint32_t counter, int parity) {
    const Barrier& phases = block().counters.at(counter).phases;
    if (static_cast<int>(phases.round % 2) == parity) wait_for_next(phases);
    races::leave(phases.meeting);
}
void arrive_at_block(int which, int threads) {
    come(barrier_of(which, threads), threads);
}
void release_registers(int registers) {
    Fiber& f = running_fiber();
    check(registers <= f.registers, "a thread gives back registers that it does not have");
    block().free_registers += f.registers - registers;
    f.registers = registers;
    ++block().released.round;
}
void take_registers(int registers) {
    Fiber& f = running_fiber();
    check(registers >= f.registers, "a thread takes fewer registers than it has");
    while (block().free_registers < registers - f.registers) wait_for_next(block().released);
    block().free_registers -= registers - f.registers;
    f.registers = registers;
}
void wait_for_warp() {
    meet(running_warp().barrier, 32);
}
void* const* hand_in(void* mine) {
    Warp& warp = running_warp();
    warp.handed_in[lane()] = mine;
    if (arrive(warp.together, 32)) return warp.handed_in;
    wait_for_next(warp.together);
    return nullptr;
}

void begin_copy(std::byte* to, const void* from) {
    races::copy_begins(to, copy_bytes);
    std::memset(to, 0x3f, copy_bytes);  // who reads too early finds numbers
    running_fiber().copies.back().push_back({to, from});
}
void commit_copies() {
    running_fiber().copies.emplace_back();
}
void wait_for_copies(int groups) {
    auto& copies = running_fiber().copies;
    for (; copies.size() > static_cast<std::size_t>(groups) + 1; copies.pop_front())
        for (const Copy& copy : copies.front()) {
            if (copy.from == nullptr)
                std::memset(copy.to, 0, copy_bytes);
            else
                std::memcpy(copy.to, copy.from, copy_bytes);
            races::copy_ends(copy.to, copy_bytes);
        }
}

bool is_private(const void* at) {
    const auto* p = static_cast<const std::byte*>(at);
    const int first = running.thread / 32 * 32;
    const auto* const warps = reinterpret_cast<const std::byte*>(block().warps);
    return (p >= stack_of(block(), first) && p < stack_of(block(), first + 32)) ||
           (p >= warps && p < warps + sizeof block().warps);
}
void stop(const char* wrong) {
    std::fprintf(stderr, "block (%u, %u, %u), thread %d: %s\n", blockIdx.x, blockIdx.y, blockIdx.z, running.thread,
                 wrong);
    std::abort();
}

void run(dim3 blocks, int threads, std::size_t shared_bytes, bool is_hopper, const std::function<void()>& kernel) {
    if (shared_bytes > most_shared || threads % 32 != 0 || threads > 1024) std::abort();
    if (blocks.y > 65535 || blocks.z > 65535) std::abort();
    Block& b = block();
    b.threads = threads;
    b.shared.reset(static_cast<std::byte*>(allocate(1024, shared_bytes)));
    running = {0, b.shared.get(), shared_bytes, is_hopper};
    b.kernel = &kernel;
    races::begin_launch(b.shared.get(), shared_bytes);
    blockDim = dim3(static_cast<unsigned>(threads));
    gridDim = blocks;
    for (unsigned z = 0; z < blocks.z; ++z)
        for (unsigned y = 0; y < blocks.y; ++y)
            for (unsigned x = 0; x < blocks.x; ++x) {
                blockIdx = {x, y, z};
                run_block(b);
            }
    races::end_launch();
}

}  // namespace softdelta::host

// What the engine and its tests ask of the runtime: one device, whose memory is the host's.
extern "C" {
cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
    *found = nullptr;
    return cudaErrorNotSupported;
}
cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
    return "an error";
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    const char* const capability = std::getenv("SOFTDELTA_CUDA_CAPABILITY");
    *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 << 10
             : attribute == cudaDevAttrComputeCapabilityMajor     ? (capability ? std::atoi(capability) / 10 : 9)
             : attribute == cudaDevAttrComputeCapabilityMinor     ? (capability ? std::atoi(capability) % 10 : 0)
             : attribute == cudaDevAttrMultiProcessorCount        ? 5
                                                                  : 0;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
    *memory = softdelta::host::allocate(256, bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
    std::free(memory);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t) {
    return cudaMalloc(memory, bytes);
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t) {
    return cudaFree(memory);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    static int events = 0;
    *event = reinterpret_cast<cudaEvent_t>(&events);
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int byte, std::size_t bytes) {
    std::memset(memory, byte, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int byte, std::size_t bytes, cudaStream_t) {
    return cudaMemset(memory, byte, bytes);
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_step, const void* from, std::size_t from_step, std::size_t width,
                              std::size_t rows, cudaMemcpyKind kind, cudaStream_t) {
    for (std::size_t i = 0; i < rows; ++i)
        cudaMemcpy(static_cast<std::byte*>(to) + i * to_step, static_cast<const std::byte*>(from) + i * from_step,
                   width, kind);
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    return cudaSuccess;
}
}
