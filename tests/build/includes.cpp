// Data flows one way: who may include whom (docs/architecture.md), read from the #include lines of the whole tree.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

// A room is a folder with a rule of its own, up to the rooms within it. It may also be the first part of a foreign
// header's name, or "std" for the C and C++ standard libraries. A file may include its own room and the rooms and files
// named here. A rule for one file stands instead of its room's.
struct Rule {
    std::string room;
    std::set<std::string> may_include;
};

const char* const MACHINE = "src/engines/cpu/machine";
const char* const TABLE = "src/engines/cpu/kernels/table.h";
const char* const ISA_UNIT = "src/engines/cpu/kernels/isa_unit.h";
const char* const RANGE = "src/engines/cpu/kernels/range.h";
const char* const SCRATCH = "src/engines/cpu/kernels/scratch.h";
const char* const QUANTISED = "src/engines/cpu/kernels/quantised.h";
const char* const SIMD = "src/engines/cpu/kernels/simd";
const char* const GEMM = "src/engines/cpu/kernels/gemm";
const char* const ATTENTION = "src/engines/cpu/kernels/attention";
const char* const DELTA_RULE = "src/engines/cpu/kernels/delta_rule";
const char* const LAYER = "src/engines/cpu/kernels/layer";
const char* const CUDA_DEVICE = "src/engines/cuda/device";
const char* const CUDA_TILE = "src/engines/cuda/tile";
const char* const CUDA_ATTENTION = "src/engines/cuda/attention";
const char* const CUDA_DELTA_RULE = "src/engines/cuda/delta_rule";
const char* const CUDA_LAYER = "src/engines/cuda/layer";

const std::vector<Rule> rules = {
    {"include/softdelta", {"std", "dlpack", "include/softdelta/detail"}},
    {"include/softdelta/detail", {"std"}},
    {"src/core", {"std"}},
    {"src/core/parallel.h", {"std", "omp.h", "src/core"}},
    {"src/core/fork.h", {"std", "posix"}},
    {"src/engines", {"std", "src/core"}},
    {"src/engines/reference", {"std", "omp.h", "src/core", "src/engines"}},
    {"src/engines/stages", {"std", "omp.h", "src/core", "src/engines", "Eigen"}},
    {"src/engines/cpu", {"std", "omp.h", "src/core", "src/engines", MACHINE, TABLE, RANGE, SCRATCH, QUANTISED}},
    {"src/engines/cpu/machine", {"std", "omp.h", "src/core", TABLE}},
    {"src/engines/cpu/machine/isa.cpp", {"std", "posix", "src/core", TABLE, "cpuid.h", "isa_levels.h"}},
    {"src/engines/cpu/machine/workspace.cpp", {"std", "posix", "src/core"}},
    // Kernels in layers, each of which sees those above it in this list.
    {SIMD, {"std", "src/core", "xsimd", "immintrin.h", "arm_neon.h", ""}},  // "": a macro, which names the level's file
    {GEMM, {"std", "src/core", SIMD, RANGE, QUANTISED}},
    {ATTENTION, {"std", "src/core", GEMM, SIMD, RANGE, SCRATCH, QUANTISED, ISA_UNIT}},
    {DELTA_RULE, {"std", "src/core", GEMM, SIMD, SCRATCH, ISA_UNIT}},
    {LAYER, {"std", "src/core", GEMM, SIMD, RANGE, SCRATCH, ISA_UNIT}},
    {"src/engines/cpu/kernels", {"std", "src/core", ATTENTION, DELTA_RULE, LAYER, GEMM, SIMD}},
    // The GPU's families see its tiles and the device, never each other.
    {CUDA_DEVICE, {"std", "src/core", "cuda.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_runtime_api.h"}},
    {CUDA_TILE, {"std", "src/core", CUDA_DEVICE, "cuda.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_runtime_api.h"}},
    {CUDA_ATTENTION, {"std", "src/core", "src/engines", CUDA_DEVICE, CUDA_TILE}},
    {CUDA_DELTA_RULE, {"std", "src/core", "src/engines", CUDA_DEVICE, CUDA_TILE, "cuda_runtime_api.h"}},
    {CUDA_LAYER, {"std", "src/core", "src/engines", CUDA_DEVICE, CUDA_TILE}},
    {"src/engines/cuda",
     {"std", "src/core", "src/engines", CUDA_DEVICE, CUDA_ATTENTION, CUDA_DELTA_RULE, CUDA_LAYER,
      "cuda_runtime_api.h"}},
    {"src/cache", {"std", "src/core"}},
    {"src/distributed", {"std", "src/core"}},
    {"src/api/engines/plugin.cpp", {"std", "posix", "include/softdelta", "src/core", "src/engines", "src/api"}},
    {"src/api",
     {"std", "include/softdelta", "src/cache", "src/core", "src/distributed", "src/engines",
      "src/engines/reference/reference.h", "src/engines/stages/stages.h", "src/engines/cpu/engine.h", MACHINE}},
    {"src/io", {"std", "posix", "include/softdelta", "src/core", "nlohmann"}},
    {"src/judge", {"std", "include/softdelta", "src/core", "src/io"}},
    {"src/diagnose", {"std", "include/softdelta", "src/core", "src/io", "src/judge", "Eigen"}},
    {"src/python",
     {"std", "include/softdelta", "src/core", "src/io", "src/judge", "src/diagnose", "src/cli", "nanobind", "xla"}},
    {"src/cli",
     {"std", "posix", "omp.h", "include/softdelta", "src/io", "src/judge", "src/diagnose", "CLI", "nlohmann"}},
    {"src/cli/main.cpp", {"std", "malloc.h", "src/cli"}},
};

const Rule* rule_of(const std::string& path) {
    const Rule* best = nullptr;
    for (const Rule& rule : rules) {
        const bool inside = path == rule.room || path.rfind(rule.room + "/", 0) == 0;
        if (inside && (!best || rule.room.size() > best->room.size())) best = &rule;
    }
    return best;
}

// The folder with a rule that a file lies in.
std::string room_of(const std::string& path) {
    const Rule* rule = rule_of(fs::path(path).parent_path().generic_string());
    return rule ? rule->room : "";
}

bool may_include(const Rule& rule, const std::string& path, const std::string& target) {
    const bool foreign = target.find('/') == std::string::npos;
    const std::string room = foreign ? target : room_of(target);
    return room == room_of(path) || rule.may_include.count(room) || rule.may_include.count(target);
}

// The room of a header that is not ours.
std::string foreign_room(const std::string& header) {
    static const std::regex standard(
        "[a-z_0-9]+|(assert|errno|fenv|float|inttypes|limits|locale|math|setjmp|signal|"
        "stdarg|stdbool|stddef|stdint|stdio|stdlib|string|time)\\.h");
    static const std::regex posix("(dlfcn|fcntl|pthread|unistd)\\.h|sys/.*");
    if (std::regex_match(header, standard)) return "std";
    if (std::regex_match(header, posix)) return "posix";
    return header.substr(0, header.find('/'));
}

// What an #include of `file` means: a path below root, or the room of a foreign header.
std::string resolve(const fs::path& root, const fs::path& file, const std::string& header) {
    for (const fs::path& folder : {file.parent_path(), root / "src", root / "include"}) {
        const fs::path candidate = (folder / header).lexically_normal();
        if (fs::is_regular_file(candidate)) return candidate.lexically_relative(root).generic_string();
    }
    return foreign_room(header);
}

std::vector<std::string> headers_of(const fs::path& file) {
    static const std::regex include("\\s*#\\s*include\\s*([<\"]([^>\"]*)[>\"])?.*");
    std::vector<std::string> headers;
    std::ifstream in(file);
    std::smatch match;
    for (std::string line; std::getline(in, line);)
        if (line.find("include") != std::string::npos && std::regex_match(line, match, include))
            headers.push_back(match[2]);  // "" when a macro names it
    return headers;
}

// Whether a kernel's file outside of simd/ names an instruction, or the library that does: everything that depends on
// an instruction set is in that folder.
bool names_instructions(const std::string& path, const std::string& line) {
    static const std::regex instruction(
        "xsimd|\\b_mm\\d*_|\\b__m\\d|__(AVX|AMX|SSE|FMA|F16C)|\\basm\\b|__builtin_prefetch");
    const std::string kernels = "src/engines/cpu/kernels/";
    return path.rfind(kernels, 0) == 0 && path.rfind(std::string(SIMD) + "/", 0) != 0 &&
           std::regex_search(line, instruction);
}

// One line for each forbidden #include or instruction.
std::vector<std::string> violations(const fs::path& root) {
    std::vector<std::string> found;
    for (const char* top : {"include", "src"}) {
        for (const auto& entry : fs::recursive_directory_iterator(root / top)) {
            const std::string extension = entry.path().extension().string();
            if (extension != ".h" && extension != ".hpp" && extension != ".cpp" && extension != ".cu") continue;
            const std::string path = entry.path().lexically_relative(root).generic_string();
            const Rule* rule = rule_of(path);
            if (!rule) {
                found.push_back(path + ": its folder has no rule");
                continue;
            }
            for (const std::string& header : headers_of(entry.path())) {
                const std::string target = resolve(root, entry.path(), header);
                if (!may_include(*rule, path, target))
                    found.push_back(path + " includes " + (header.empty() ? "what a macro names" : header));
            }
            std::ifstream in(entry.path());
            for (std::string line; std::getline(in, line);)
                if (names_instructions(path, line)) found.push_back(path + " names an instruction: " + line);
        }
    }
    return found;
}

TEST(Includes, KeepTheDirectionOfDataFlow) {
    for (const std::string& violation : violations(SOFTDELTA_SOURCE)) ADD_FAILURE() << violation;
}

// The gate itself, on copies of the tree with one forbidden line.
class IncludeGate : public testing::Test {
  protected:
    void SetUp() override {
        fs::remove_all(root);
        fs::create_directories(root);
        for (const char* top : {"include", "src"})
            fs::copy(fs::path(SOFTDELTA_SOURCE) / top, root / top, fs::copy_options::recursive);
        found_ = violations(root);
    }
    void TearDown() override { fs::remove_all(root); }

    // Adds a file with this line, or takes the place of one added before, and returns what the gate newly finds.
    std::vector<std::string> add(const std::string& path, const std::string& line) {
        fs::create_directories((root / path).parent_path());
        std::ofstream(root / path) << line << '\n';
        const std::vector<std::string> now = violations(root);
        std::vector<std::string> added;
        for (const std::string& v : now)
            if (std::find(found_.begin(), found_.end(), v) == found_.end()) added.push_back(v);
        found_ = now;
        return added;
    }

    const fs::path root = fs::temp_directory_path() / ("softdelta_includes_" + std::to_string(getpid()));

  private:
    std::vector<std::string> found_;
};

struct Intruder {
    const char* path;
    const char* line;
};

TEST_F(IncludeGate, SeesEachForbiddenInclude) {
    const Intruder intruders[] = {
        {"include/softdelta/x.h", "#include \"core/tensor.h\""},
        {"include/softdelta/x.h", "#include <omp.h>"},
        {"src/core/x.h", "#include \"softdelta/softdelta.h\""},
        {"src/core/x.h", "#include \"../engines/reference/reference.h\""},
        {"src/engines/reference/x.cpp", "#include <Eigen/Core>"},
        {"src/engines/reference/x.cpp", "#  include \"engines/stages/stages.h\""},
        {"src/engines/stages/x.cpp", "#include \"engines/reference/reference.h\""},
        {"src/engines/stages/x.cpp", "#include \"api/check.h\""},
        {"src/engines/cpu/kernels/attention/x.cpp", "#include <Eigen/Core>"},
        {"src/engines/cpu/kernels/gemm/x.h", "#include <immintrin.h>"},
        {"src/engines/cpu/kernels/gemm/x.h", "const F y = _mm256_add_ps(x, x);"},
        {"src/engines/cpu/kernels/attention/x.h", "const F y = xsimd::max(x, x);"},
        {"src/engines/cpu/kernels/delta_rule/x.h", "#if defined(__AVX2__)"},
        {"src/engines/cpu/kernels/x.h", "asm(\"nop\");"},
        {"src/engines/cpu/x.cpp", "#include \"engines/reference/reference.h\""},
        {"src/engines/cuda/tile/x.h", "#include \"engines/cuda/attention/call.h\""},
        {"src/engines/cuda/delta_rule/x.cu", "#include \"engines/cuda/attention/call.h\""},
        {"src/api/x.cpp", "#include \"io/call.h\""},
        {"src/io/x.cpp", "#include \"judge/verify.h\""},
        {"src/core/x.h", "#include <omp.h>"},
        {"src/judge/x.cpp", "#include \"engines/reference/reference.h\""},
        {"src/cli/x.cpp", "#include \"api/check.h\""},
        {"src/cli/x.cpp", "#include HEADER"},
        {"src/attic/x.cpp", "#include <vector>"},
    };
    for (const Intruder& intruder : intruders)
        EXPECT_EQ(add(intruder.path, intruder.line).size(), 1u) << intruder.path << ": " << intruder.line;
}

TEST_F(IncludeGate, LetsAllowedIncludesPass) {
    EXPECT_TRUE(add("src/core/x.h", "#include \"core/tensor.h\"").empty());
    EXPECT_TRUE(add("src/engines/stages/x.cpp", "#include <Eigen/Core>").empty());
    EXPECT_TRUE(add("src/engines/cpu/kernels/simd/simd.h", "#include <xsimd/xsimd.hpp>").empty());
    EXPECT_TRUE(add("src/engines/cpu/kernels/simd/x.h", "const F y = _mm256_add_ps(x, x);").empty());
    EXPECT_TRUE(add("src/judge/x.cpp", "#include \"core/dtype.h\"").empty());
}

}  // namespace
