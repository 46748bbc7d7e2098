// Cases from Python objects: a call's metadata and tensors, the results to judge, and findings as dicts.
#pragma once

#include <nanobind/nanobind.h>

#include <map>
#include <string>
#include <vector>

#include "io/call/call.h"
#include "io/file/case_file.h"
#include "judge/verify.h"

namespace softdelta::python {

namespace nb = nanobind;

using Metadata = std::map<std::string, std::string>;

// A path as Python's os.fsencode gives it.
inline std::string path_of(const nb::bytes& encoded) {
    return {encoded.c_str(), encoded.size()};
}

// Copies of arrays of any strides; bf16: uint16 arrays hold bf16.
io::CaseFile case_of(const Metadata& metadata, const nb::dict& tensors, bool bf16);

// Results to judge, and copies of those that come from Python.
struct ResultsToJudge {
    std::map<std::string, Tensor> views;
    std::vector<io::OwnedTensor> memory;

    void allocate(const io::Call& call, const std::string& name);
};

// Those in `actual` or, when there are none, the file's. Throws nb::value_error for a name or shape that the call
// cannot have.
ResultsToJudge results_of(const io::Call& call, const io::CaseFile& file, const nb::dict& actual, bool bf16);

// Refuses a case that holds nothing to judge.
void expect_results(const ResultsToJudge& results, const io::CaseFile& file);

// {"op", "producer", "results": [dict], "notes": [str]}
nb::dict verdict_of(const io::CaseFile& file, const io::Call& call, const std::vector<judge::Finding>& findings);

}  // namespace softdelta::python
