// libFuzzer: any bytes are a case, or are refused with one line. Built with the sanitizers; make_seeds.py writes files
// to start from:
//
//     cmake --preset asan -B build-fuzz -DSOFTDELTA_BUILD_FUZZERS=ON -DBUILD_SHARED_LIBS=OFF
//     -DSOFTDELTA_ISA_LEVELS=avx2 cmake --build build-fuzz --target case_file_fuzz run_fuzz diagnose_fuzz
//     tests/fuzz/make_seeds.py corpus && build-fuzz/bin/case_file_fuzz -max_len=4096 corpus
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <variant>

#include "io/call/call.h"
#include "io/call/layer.h"

namespace {

using namespace softdelta;

void require(bool holds) {
    if (!holds) std::abort();
}

// What call_of promises about the results that it found.
template <class Call>
void check_results(const io::CaseFile& file, const Call& call) {
    for (const std::string& name : call.outputs) require(io::output_shape(call, name) == file.tensors.at(name).shape());
    for (const std::string& name : io::output_names(call)) {
        for (const std::int64_t size : io::output_shape(call, name)) require(size >= 0);
        require(io::output_dtype(call, name) <= DType::f16);
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    try {
        const io::CaseFile file = io::parse_case(reinterpret_cast<const std::byte*>(data), size, "case");
        std::visit([&](const auto& call) { check_results(file, call); }, io::any_call_of(file));
    } catch (const io::CaseError& error) {
        require(std::strncmp(error.what(), "case: ", 6) == 0 && std::strchr(error.what(), '\n') == nullptr);
    }
    return 0;
}
