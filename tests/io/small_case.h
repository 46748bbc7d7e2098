// The smallest sensible case of every operation, to be varied.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "io/call/operands.h"
#include "io/file/case_file.h"
#include "support/takes.h"

namespace softdelta::io {

using Shape = std::vector<std::int64_t>;

// Sizes that cannot be mistaken for each other.
inline constexpr std::int64_t B = 2, T = 5, Lq = 5, Lk = 7, H = 2, HV = 4, Hk = 1, K = 3, D = 3, V = 6;

inline OwnedTensor zeros(Shape shape, DType dtype = DType::bf16) {
    return OwnedTensor(dtype, std::move(shape));
}

inline OwnedTensor numbers(const std::vector<std::int32_t>& values) {
    OwnedTensor tensor(DType::i32, {static_cast<std::int64_t>(values.size())});
    std::copy(values.begin(), values.end(), static_cast<std::int32_t*>(tensor.data()));
    return tensor;
}

inline CaseFile attention_case() {
    CaseFile file;
    file.metadata["op"] = "attention";
    file.tensors["q"] = zeros({B, Lq, H, D});
    file.tensors["k"] = zeros({B, Lk, Hk, D});
    file.tensors["v"] = zeros({B, Lk, Hk, V}, DType::f16);
    return file;
}

inline CaseFile delta_case(const std::string& op) {
    CaseFile file;
    file.metadata["op"] = op;
    file.tensors["q"] = zeros({B, T, H, K});
    file.tensors["k"] = zeros({B, T, H, K});
    file.tensors["v"] = zeros({B, T, HV, V}, DType::f16);
    const core::Rule& rule = *find_operation(op)->rule;
    if (!rule.gate_optional)
        file.tensors["g"] = zeros(rule.has_channel_gate() ? Shape{B, T, HV, K} : Shape{B, T, HV}, DType::f32);
    if (test::takes(rule, "p")) file.tensors["p"] = zeros({B, T, H, K});
    return file;
}

}  // namespace softdelta::io
