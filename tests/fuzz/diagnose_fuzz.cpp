// libFuzzer: any small case is diagnosed, whole or in part, or refused with one line. Build and seeds as for
// case_file_fuzz.
#include <exception>
#include <sstream>

#include "diagnose/diagnose.h"
#include "diagnose/evidence/plot.h"
#include "diagnose/report.h"
#include "fuzz/small_call.h"

namespace {

using namespace softdelta;

void diagnose_with(const test::SmallCall& small, double work) {
    diagnose::Options options;
    options.threads = 1;
    options.work = work;
    try {
        const io::Call& call = small.call;
        const diagnose::Diagnosis diagnosis = diagnose::diagnose(call, test::views_of(small, call.outputs),
                                                                 test::views_of(small, call.intermediates), options);
        std::istringstream lines(diagnose::report("case", call, diagnosis, 0, {5, false}));
        for (std::string line; std::getline(lines, line);) test::require(io::printable(line) == line);
        test::require(!diagnose::plot_errors("case", diagnosis.maps).empty());
    } catch (const std::exception& e) {
        test::require_line(e.what());
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const auto file = test::read_small_file(data, size);
    if (!file) return 0;
    const auto small = test::small_call(*file, io::call_of);
    if (!small || small->call.outputs.empty()) return 0;
    constexpr double little = 1, enough = 1e6;  // the least part of the call; all of it, and a few pairs of mistakes
    diagnose_with(*small, little);
    diagnose_with(*small, enough);
    return 0;
}
