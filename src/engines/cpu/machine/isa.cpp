#include "engines/cpu/machine/isa.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/once.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "isa_levels.h"  // of cmake/isa_levels.cmake: SOFTDELTA_LEVELS, rows {name, table, supported}

namespace softdelta::cpu {

namespace {

struct Features {
    bool x86_64_v2 = false, avx2 = false, avx512 = false, avx512bf16 = false, amxbf16 = false;
    bool neon = false, neon_bf16 = false;
    bool slow_bf16 = false;  // dot products of bf16 are no faster than products of f32
    bool zen4 = false;
};

#if defined(__x86_64__)

struct Registers {
    std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zero for a leaf that the CPU does not have.
Registers cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

constexpr std::uint32_t bits(std::initializer_list<int> positions) {
    std::uint32_t mask = 0;
    for (const int position : positions) mask |= 1u << position;
    return mask;
}

constexpr bool has(std::uint32_t value, std::uint32_t mask) {
    return (value & mask) == mask;
}

constexpr int tile_data = 18;  // its bit among what an operating system saves

// AMX-BF16, AMX-TILE, and what all their makers have: the look-up of bytes (VBMI), and IFMA, without which xsimd knows
// none of it; configuration and data of tiles, which Linux knows.
bool has_tiles([[maybe_unused]] const Registers& extended, [[maybe_unused]] std::uint32_t saved) {
#if defined(__linux__)
    constexpr long which_there_are = 0x1021;  // ARCH_GET_XCOMP_SUPP of arch_prctl
    std::uint64_t there = 0;
    return has(extended.edx, bits({22, 24})) && has(extended.ecx, bits({1})) && has(extended.ebx, bits({21})) &&
           has(saved, bits({17, 18})) && syscall(SYS_arch_prctl, which_there_are, &there) == 0 &&
           (there >> tile_data & 1) != 0;
#else
    return false;
#endif
}

// Everything that the compiler may use at -march=x86-64-v2, -v3 and -v4, and the registers that the operating system
// must save for it (XCR0).
Features detect_features() {
    const Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1), amd = cpuid(0x80000001, 0);
    std::uint32_t saved = 0, upper = 0;
    if (has(basic.ecx, bits({27}))) asm("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));  // OSXSAVE

    Features f;
    // SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT; LAHF
    f.x86_64_v2 = has(basic.ecx, bits({0, 9, 13, 19, 20, 23})) && has(amd.ecx, bits({0}));
    // FMA, MOVBE, AVX, F16C; BMI1, AVX2, BMI2; LZCNT; vector registers of 128 and 256 bits
    f.avx2 = f.x86_64_v2 && has(basic.ecx, bits({12, 22, 28, 29})) && has(extended.ebx, bits({3, 5, 8})) &&
             has(amd.ecx, bits({5})) && has(saved, bits({1, 2}));
    // AVX512F, DQ, CD, BW, VL; mask registers, upper halves of 0 to 15, registers 16 to 31
    f.avx512 = f.avx2 && has(extended.ebx, bits({16, 17, 28, 30, 31})) && has(saved, bits({5, 6, 7}));
    f.avx512bf16 = f.avx512 && has(more.eax, bits({5}));
    f.amxbf16 = f.avx512bf16 && has_tiles(extended, saved);
    const Registers maker = cpuid(0, 0);
    const bool amd_made =
        maker.ebx == 0x68747541 && maker.edx == 0x69746e65 && maker.ecx == 0x444d4163;  // AuthenticAMD
    const std::uint32_t family = (basic.eax >> 8 & 0xf) + (basic.eax >> 20 & 0xff);
    f.zen4 = amd_made && family == 0x19 && f.avx512;
    f.slow_bf16 = maker.ebx == 0x756e6547 && maker.edx == 0x49656e69 && maker.ecx == 0x6c65746e;  // GenuineIntel
    return f;
}

#elif defined(__aarch64__)

// Every armv8-a has vectors of 128 bits.
Features detect_features() {
    Features f;
    f.neon = true;
#if defined(__linux__)
    f.neon_bf16 = (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#endif
    return f;
}

#else

Features detect_features() {
    return {};
}

#endif

constinit core::Once<Features> known_features;
constinit core::Once<std::array<Level, SOFTDELTA_LEVEL_COUNT>> known_levels;
constinit core::Once<std::string> environment;
constinit std::atomic<const char*> selected{nullptr};  // null: the environment says

const Features& features() {
    return known_features.get(detect_features);
}

// What the list of levels names.
[[maybe_unused]] bool has_x86_64_v2() {
    return features().x86_64_v2;
}
[[maybe_unused]] bool has_avx2() {
    return features().avx2;
}
[[maybe_unused]] bool has_avx512() {
    return features().avx512;
}
[[maybe_unused]] bool has_avx512bf16() {
    return features().avx512bf16;
}
[[maybe_unused]] bool has_amxbf16() {
    return features().amxbf16;
}

[[maybe_unused]] bool has_neon() {
    return features().neon;
}
[[maybe_unused]] bool has_neon_bf16() {
    return features().neon_bf16;
}

// SOFTDELTA_ISA, read once: a host may change its environment later, and no thread may read it then.
const std::string& environment_level() {
    return environment.get([] {
        const char* given = std::getenv("SOFTDELTA_ISA");
        return std::string(given == nullptr ? "" : given);
    });
}

std::string_view wanted_level() {
    const char* name = selected.load(std::memory_order_relaxed);
    return name != nullptr ? std::string_view(name) : environment_level();
}

// Linux saves tiles only for a process that has asked for it; threads that exist and those to come may use them. From
// then on each alternate stack for signals must have room for tiles: who runs no tiles must not ask.
constinit std::atomic<bool> tiles_granted{false}, tiles_refused{false};

bool may_run([[maybe_unused]] const Level& level) {
#if defined(__x86_64__) && defined(__linux__)
    if (!level.table->asks_for_tiles || tiles_granted.load(std::memory_order_relaxed)) return true;
    constexpr long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM of arch_prctl
    const bool granted = syscall(SYS_arch_prctl, request_permission, static_cast<long>(tile_data)) == 0;
    (granted ? tiles_granted : tiles_refused).store(true, std::memory_order_relaxed);
    return granted;
#else
    return true;
#endif
}

// The last level that is available, or of that name.
const Level* find_level(std::string_view name) {
    const auto levels = isa_levels();
    const auto found = std::find_if(levels.rbegin(), levels.rend(), [&](const Level& level) {
        return level.available() && (name.empty() || name == level.name);
    });
    return found == levels.rend() ? nullptr : &*found;
}

std::string available_names() {
    std::string names;
    for (const Level& level : isa_levels())
        if (level.available()) names += (names.empty() ? "" : ", ") + std::string(level.name);
    return names.empty() ? "none" : names;
}

[[noreturn]] void refuse_level(const char* argument, std::string_view name) {
    std::string why = "no instruction set that is known here";
    for (const Level& level : isa_levels()) {
        if (name != level.name) continue;
        why = level.table == nullptr ? "not compiled in"
              : level.supported      ? "whose tiles the system refuses to this process"
                                     : "not supported by this CPU";
    }
    throw core::Unsupported(std::string(argument) + " is " + core::printable(name) + ", " + why +
                            "; available: " + available_names());
}

}  // namespace

bool Level::available() const {
    return table != nullptr && supported && !(table->asks_for_tiles && tiles_refused.load(std::memory_order_relaxed));
}

std::span<const Level> isa_levels() {
    return known_levels.get([] { return std::array<Level, SOFTDELTA_LEVEL_COUNT>{{SOFTDELTA_LEVELS}}; });
}

const Level* selected_level() {
    const std::string_view name = wanted_level();
    const Level* found = find_level(name);
    if (found == nullptr && !name.empty()) refuse_level("SOFTDELTA_ISA", name);
    return found;
}

void select_level(const char* name) {
    if (name == nullptr || *name == 0) {
        const std::string& wanted = environment_level();
        const Level* found = find_level(wanted);
        if (!wanted.empty() && (found == nullptr || !may_run(*found))) refuse_level("SOFTDELTA_ISA", wanted);
        selected.store(nullptr, std::memory_order_relaxed);
        find_kernels();
        return;
    }
    const Level* found = find_level(name);
    if (found == nullptr || !may_run(*found)) refuse_level("name", name);
    selected.store(found->name, std::memory_order_relaxed);
}

const kernels::Table* find_kernels() {
    const Level* level = selected_level();
    while (level != nullptr && !may_run(*level)) level = selected_level();  // it is no longer available then
    return level == nullptr ? nullptr : level->table;
}

const kernels::Table& selected_kernels() {
    if (const kernels::Table* found = find_kernels()) return *found;
    throw core::Unsupported("this build has no fast kernels for this CPU");
}

bool use_bf16_products(const core::Execution& execution, const kernels::Table& kernels) {
    using enum core::Bf16Products;
    return kernels.multiply_add_bf16.run != nullptr && execution.bf16_products != f32 &&
           (execution.bf16_products == bf16 || kernels.matrix_tiles || !features().slow_bf16);
}

bool decode_fetches_to_second_cache() {
    return features().zen4;
}

}  // namespace softdelta::cpu
