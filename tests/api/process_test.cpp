// What a process decides once: each test runs in a process of its own, whose first call it makes.
#include <gtest/gtest.h>

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "softdelta/judge.hpp"

namespace {

// The getenv and omp_get_num_procs of this program are those of the library, too. They count, and a thread stops where
// it asks for what it shall.
std::atomic<int> asked{0};
std::atomic<bool> stopped{false};
thread_local const char* stops_at = "";

void ask(const char* what) {
    ++asked;
    if (std::strcmp(what, stops_at) != 0) return;
    stopped = true;
    for (;;) pause();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) char* getenv(const char* name) noexcept {
    ask(name);
    const std::size_t length = std::strlen(name);
    for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry)
        if (std::strncmp(*entry, name, length) == 0 && (*entry)[length] == '=') return *entry + length + 1;
    return nullptr;
}
extern "C" __attribute__((visibility("default"))) int omp_get_num_procs() noexcept {
    ask("omp_get_num_procs");
    return 2;
}

namespace softdelta {
namespace {

// A delta rule over some tokens: one is a short call, many are worth a team of threads.
std::string error_of_call(std::int64_t tokens, int threads = 2) {
    const std::int64_t heads = 4, size = 64;
    const auto count = static_cast<std::size_t>(tokens * heads * size);
    std::vector<float> rows(count, 0.125F), o(count);
    const Tensor in(rows.data(), DType::f32, {1, tokens, heads, size}),
        out(o.data(), DType::f32, {1, tokens, heads, size});
    DeltaOptions options;
    options.rule = Rule::delta_rule;
    try {
        delta_forward({.q = in, .k = in, .v = in}, {.o = out}, options, {.engine = "fast", .threads = threads});
    } catch (const std::exception& e) {
        return e.what();
    }
    return "";
}
std::string error_of_calls() {
    const std::string first = error_of_call(1);
    return first.empty() ? error_of_call(512) : first;
}

// Ends a process: with 0 where `found` is as expected.
template <class T>
[[noreturn]] void expect_and_exit(const T& found, const T& expected) {
    if (found == expected) _exit(0);
    std::ostringstream text;
    text << "found " << found << ", expected " << expected << '\n';
    std::fputs(text.str().c_str(), stderr);
    _exit(1);
}

class Process : public testing::Test {
  protected:
    void SetUp() override { testing::GTEST_FLAG(death_test_style) = "threadsafe"; }
};

template <class Run>
void in_new_process(const Run& run) {
    EXPECT_EXIT(run(), testing::ExitedWithCode(0), "");
}

TEST_F(Process, ReadsTheEnvironmentOnce) {
    in_new_process([&] {
        error_of_calls();
        setenv("SOFTDELTA_ISA", "neon2", 1);
        setenv("SOFTDELTA_SHORT_CALL_BYTES", "nonsense", 1);
        const int before = asked;
        if (before == 0) std::fputs("this program does not see who asks\n", stderr), _exit(1);
        const std::string error = error_of_calls();
        if (asked != before) std::fputs("the environment is read at each call\n", stderr), _exit(1);
        expect_and_exit(error, std::string());
    });
}

TEST_F(Process, NamesAWrongLimitOfShortCalls) {
    for (const char* wrong : {"abc", "-1", "1e400", "3x", " 3", "nan", "inf", "0x10", "\xff"})
        in_new_process([&] {
            setenv("SOFTDELTA_SHORT_CALL_BYTES", wrong, 1);
            const std::string text = *wrong == '\xff' ? "\\xff" : wrong;
            expect_and_exit(error_of_calls(),
                            "SOFTDELTA_SHORT_CALL_BYTES is '" + text + "', expected a number of bytes, 0 or more");
        });
    for (const char* right : {"", "0", "1e6", "12.5"})
        in_new_process([&] {
            setenv("SOFTDELTA_SHORT_CALL_BYTES", right, 1);
            expect_and_exit(error_of_calls(), std::string());
        });
}

TEST_F(Process, PrintsAWrongLevel) {
    in_new_process([&] {
        setenv("SOFTDELTA_ISA", "ne\xffon\n", 1);
        const std::string text = "SOFTDELTA_ISA is ne\\xffon\\x0a, no instruction set that is known here; available: ";
        expect_and_exit(error_of_calls().substr(0, text.size()), text);
    });
}

// OpenMP ends a process that it cannot give threads.
TEST_F(Process, HasNoMoreThreadsThanItCanHave) {
    setenv("OMP_NUM_THREADS", "100000", 1);
    in_new_process([] { expect_and_exit(error_of_call(512, 0), std::string()); });
    in_new_process([] { expect_and_exit(measure_bandwidth() > 0, true); });
    unsetenv("OMP_NUM_THREADS");
}

// A thread is in its first call, where it asks for something that is kept, and the process forks.
TEST_F(Process, ForksWhileAThreadIsInItsFirstCall) {
    for (const char* place : {"SOFTDELTA_ISA", "SOFTDELTA_SHORT_CALL_BYTES", "omp_get_num_procs"})
        in_new_process([&] {
            std::thread([&] {
                stops_at = place;
                error_of_calls();
            }).detach();
            while (!stopped) std::this_thread::yield();
            const pid_t child = fork();
            if (child == 0) {
                alarm(20);
                expect_and_exit(error_of_calls(), std::string());
            }
            int status = 0;
            waitpid(child, &status, 0);
            expect_and_exit(status, 0);
        });
}

std::string selected_level() {
    std::string name;
    for (const IsaLevel& level : isa_levels())
        if (level.selected) name = level.name;
    return name;
}

// Who asks for the environment's level again, and cannot have it, keeps the one that was selected.
TEST_F(Process, KeepsTheLevelWhereTheEnvironmentNamesAWrongOne) {
    in_new_process([&] {
        setenv("SOFTDELTA_ISA", "neon2", 1);
        const std::string error = error_of_calls(), available = error.substr(error.rfind(": ") + 2);
        const std::string first = available.substr(0, available.find(','));
        if (first == "none") _exit(0);
        select_isa_level(first);
        try {
            select_isa_level("");
        } catch (const Unsupported&) {
            expect_and_exit(selected_level(), first);
        }
        _exit(1);
    });
}

#if defined(__x86_64__) && defined(__linux__) && !defined(SOFTDELTA_EMULATED_TILES)
// Whether this process has asked for matrix tiles: then each alternate stack for signals must have room for them.
bool has_tiles() {
    std::uint64_t permitted = 0;
    return syscall(SYS_arch_prctl, 0x1022, &permitted) == 0 && (permitted >> 18 & 1) != 0;  // ARCH_GET_XCOMP_PERM
}

TEST_F(Process, AsksForTilesWhenTheirLevelRuns) {
    in_new_process([&] {
        selected_level();
        expect_and_exit(has_tiles(), false);
    });
    in_new_process([&] {
        setenv("SOFTDELTA_ISA", "avx2", 1);
        error_of_calls();
        isa_levels();
        expect_and_exit(has_tiles(), false);
    });
    in_new_process([&] {
        error_of_calls();
        expect_and_exit(has_tiles(), selected_level() == "amxbf16");
    });
}

// A thread whose alternate stack is too small for tiles: the system refuses them, and the level before runs.
TEST_F(Process, RunsTheLevelBeforeWhereTilesAreRefused) {
    in_new_process([&] {
        if (selected_level() != "amxbf16") _exit(0);
        std::vector<char> memory(8192);
        const stack_t small{.ss_sp = memory.data(), .ss_flags = 0, .ss_size = memory.size()};
        if (sigaltstack(&small, nullptr) != 0) expect_and_exit(std::string(std::strerror(errno)), std::string());
        if (!error_of_calls().empty() || has_tiles() || selected_level() == "amxbf16") _exit(1);
        try {
            select_isa_level("amxbf16");
        } catch (const Unsupported& e) {
            const std::string text = "name is amxbf16, whose tiles the system refuses to this process; available: ";
            expect_and_exit(std::string(e.what()).substr(0, text.size()), text);
        }
        _exit(1);
    });
}
#endif

}  // namespace
}  // namespace softdelta
