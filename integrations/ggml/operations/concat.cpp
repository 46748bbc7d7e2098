// GGML_OP_CONCAT along the fastest dimension, where the second tensor is transposed: so models put the tokens of a
// chunk, whose channels lie side by side, behind the last tokens of the state before they call SSM_CONV.
//
//     a [A, C], b [T, C] with its channels innermost → [A + T, C] with its tokens innermost
#include <algorithm>

#include "operations/operations.h"
#include "operations/thresholds.h"
#include "operations/view.h"

namespace softdelta_ggml {

namespace {

constexpr std::int64_t block = 16;  // channels of a cache line

const float* element(const ggml_tensor* t, std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) {
    return reinterpret_cast<const float*>(row(t, i1, i2, i3) + static_cast<std::size_t>(i0) * t->nb[0]);
}

// Channels [begin, begin + count) of one sequence: a cache line of each token is read, and written as numbers of 16
// rows.
void join_channels(const ggml_tensor* op, std::int64_t begin, std::int64_t count, std::int64_t i2, std::int64_t i3) {
    const ggml_tensor *a = op->src[0], *b = op->src[1];
    float* to = reinterpret_cast<float*>(row(op, begin, i2, i3));
    const std::int64_t to_row = stride(op, 1), token = stride(b, 0);
    for (std::int64_t c = 0; c < count; ++c)
        for (std::int64_t t = 0; t < a->ne[0]; ++t) to[c * to_row + t] = *element(a, t, begin + c, i2, i3);
    to += a->ne[0];
    const float* from = element(b, 0, begin, i2, i3);
    for (std::int64_t t = 0; t < b->ne[0]; t += block) {
        const std::int64_t tokens = std::min(block, b->ne[0] - t);
        float square[block][block];
        for (std::int64_t i = 0; i < tokens; ++i)
            for (std::int64_t c = 0; c < count; ++c) square[c][i] = from[(t + i) * token + c];
        for (std::int64_t c = 0; c < count; ++c) std::copy_n(square[c], tokens, to + c * to_row + t);
    }
}

}  // namespace

Support concat_support(const ggml_tensor* op) {
    const ggml_tensor *a = op->src[0], *b = op->src[1];
    for (const ggml_tensor* t : {a, b, op})
        if (t->type != GGML_TYPE_F32) return {};
    if (ggml_get_op_params_i32(op, 0) != 0 || op->nb[0] != sizeof(float) || b->nb[1] != sizeof(float)) return {};
    return {true, b->ne[0] >= convolution_tokens && b->ne[1] >= block};
}

std::string compute_concat(const ggml_tensor* op, Resources& resources) {
    const std::int64_t channels = op->ne[1], blocks = (channels + block - 1) / block;
    const std::int64_t all = blocks * op->ne[2] * op->ne[3];
#pragma omp parallel for num_threads(resources.threads) schedule(static)
    for (std::int64_t i = 0; i < all; ++i) {
        const std::int64_t begin = i % blocks * block;
        join_channels(op, begin, std::min(block, channels - begin), i / blocks % op->ne[2], i / blocks / op->ne[2]);
    }
    return "";
}

}  // namespace softdelta_ggml
