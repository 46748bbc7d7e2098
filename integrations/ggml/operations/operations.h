// The operations that the backend computes: whether it takes one, and its computation. Results are errors' texts: "" is
// success.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "ggml.h"
#include "settings.h"

namespace softdelta_ggml {

// Whether the library can compute this operation at all, and whether it is the faster one (thresholds.h).
struct Support {
    bool possible = false;
    bool faster = false;
};

// ggml's number of threads as its CPU backend understands it.
inline int allowed_threads(int threads) {
    return threads > 0 ? std::min(threads, GGML_MAX_N_THREADS) : GGML_DEFAULT_N_THREADS;
}

// What a backend keeps from operation to operation.
struct Resources {
    int threads = GGML_DEFAULT_N_THREADS;
    std::vector<float> keys, values;  // expanded to f32, up to expanded_numbers (thresholds.h)
    std::vector<float> slopes;        // of ALiBi
    std::vector<float> gates;         // of a scan
};

Support gated_delta_net_support(const ggml_tensor* op);
std::string compute_gated_delta_net(const ggml_tensor* op, Resources& resources);

Support flash_attention_support(const ggml_tensor* op);
std::string compute_flash_attention(const ggml_tensor* op, Resources& resources);

Support l2_norm_support(const ggml_tensor* op);
std::string compute_l2_norm(const ggml_tensor* op, Resources& resources);

Support ssm_conv_support(const ggml_tensor* op);
std::string compute_ssm_conv(const ggml_tensor* op, Resources& resources);

Support ssm_scan_support(const ggml_tensor* op);
std::string compute_ssm_scan(const ggml_tensor* op, Resources& resources);

Support concat_support(const ggml_tensor* op);
std::string compute_concat(const ggml_tensor* op, Resources& resources);

struct Operation {
    ggml_op op;
    Support (*support)(const ggml_tensor* op);
    std::string (*compute)(const ggml_tensor* op, Resources& resources);
};
inline constexpr Operation operations[] = {
    {GGML_OP_GATED_DELTA_NET, gated_delta_net_support, compute_gated_delta_net},
    {GGML_OP_FLASH_ATTN_EXT, flash_attention_support, compute_flash_attention},
    {GGML_OP_SSM_CONV, ssm_conv_support, compute_ssm_conv},
    {GGML_OP_SSM_SCAN, ssm_scan_support, compute_ssm_scan},
    {GGML_OP_CONCAT, concat_support, compute_concat},
    {GGML_OP_L2_NORM, l2_norm_support, compute_l2_norm},
};

// The operation of a node, or null.
inline const Operation* operation_of(const ggml_tensor* node) {
    for (const Operation& operation : operations)
        if (operation.op == node->op) return &operation;
    return nullptr;
}

inline bool moves_no_data(ggml_op op) {
    return op == GGML_OP_NONE || op == GGML_OP_RESHAPE || op == GGML_OP_VIEW || op == GGML_OP_PERMUTE ||
           op == GGML_OP_TRANSPOSE;
}

inline bool is_taken(const ggml_tensor* node) {
    const Operation* operation = operation_of(node);
    const Take take = settings().take;
    if (operation == nullptr || take == Take::none) return false;
    const Support support = operation->support(node);
    return support.possible && (support.faster || take == Take::all);
}

}  // namespace softdelta_ggml
