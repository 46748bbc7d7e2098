// The plugin's door and the engine's row.
#include <cuda_runtime_api.h>

#include <cstring>

#include "engines/cuda/attention/passes.h"
#include "engines/cuda/delta_rule/passes.h"
#include "engines/cuda/device/card.h"
#include "engines/cuda/layer/passes.h"
#include "engines/plugin.h"
#include "engines/refuse_f64.h"

namespace softdelta::cuda {

namespace {

using namespace engines;

bool has_device() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) return true;
    cudaGetLastError();
    return false;
}

// Of GPUs that no kernel is made for; tensors of the host go to GPU 0.
std::string refuse_card(const core::Tensor& t) {
    const int has = card_of(t.device.is_cpu() ? core::Device() : t.device).capability;
    if (has >= least_capability) return "";
    const auto text = [](int capability) {
        return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
    };
    return "the GPU has compute capability " + text(has) + ", expected " + text(least_capability) + " or more";
}

// Of pools of states the kernels know state_indices alone.
template <class Inputs>
std::string refuse_pools(const Inputs& in) {
    std::string reason;
    core::for_each_given(in, [&](const auto& operand, const core::Tensor&) {
        const std::string name = operand.name;
        if (core::is_of_pools(name) && name != "state_indices")
            reason = name + ": the CUDA engine knows state_indices alone";
    });
    return reason;
}

// Heads are a grid's second dimension.
std::string refuse_heads(const char* name, const core::Tensor& t) {
    constexpr core::Index most = 65535;
    if (t.shape[2] <= most) return "";
    return std::string(name) + ": dimension 2 is " + std::to_string(t.shape[2]) + ", expected at most " +
           std::to_string(most) + " on a GPU";
}

template <class Call>
std::string refuse_delta(const Call& call) {
    constexpr core::Index most = 256;
    std::string reason = refuse_card(call.in.q);
    if (reason.empty()) reason = refuse_f64(call.in);
    if (reason.empty()) reason = refuse_f64(call.out);
    if (reason.empty()) reason = refuse_pools(call.in);
    if (reason.empty()) reason = refuse_heads("v", call.in.v);
    if (reason.empty() && call.in.q.shape[3] > most)
        reason = "q: dimension 3 is " + std::to_string(call.in.q.shape[3]) + ", expected at most 256 on a GPU";
    return reason;
}

// Where both passes go by chunks.
std::size_t delta_kept_size(const core::DeltaInputs& in, const core::DeltaOptions& options) {
    const bool keeps = takes_chunks(in, options, {}) && takes_chunk_gradients(in, options, {});
    return keeps ? chunk_kept_size(in, options) : 0;
}

template <class Call>
std::string refuse_kept(const Call& c) {
    std::string reason = refuse_delta(c);
    if (reason.empty() && c.execution.kept != nullptr && delta_kept_size(c.in, c.options) == 0)
        reason = "execution.kept: nothing is kept of this call";
    return reason;
}

std::string refuse_forward(const DeltaForward& c) {
    if (c.out.u) return "u: the CUDA engine does not keep it";
    if (c.execution.kept != nullptr && !takes_chunks(c.in, c.options, c.out))
        return "execution.kept: nothing is kept of a call with such results";
    return refuse_kept(c);
}

// Of each sequence its own length decides which kernels take it. Only those of chunks know what they need of the
// states: the others come between both events.
void run_delta(const DeltaForward& c) {
    const OnDevice device(c.in.q.device);
    cudaStream_t stream = stream_of(c.execution);
    const core::Index few = few_tokens(c.in);
    const TokenRange lengths = lengths_of(c.in);
    TokenRange many{few + 1, lengths.longest};
    bool has_few = lengths.shortest <= few;
    const bool has_many = lengths.longest > few;
    if (c.execution.kept !=
        nullptr) {  // of every chunk; what few tokens are then comes anew, unless their state is gone
        many = lengths;
        const bool in_place = c.in.initial_state && c.in.initial_state.data == c.out.final_state.data;
        has_few = has_few && !in_place;
    }
    if (c.execution.kept != nullptr || (has_many && takes_chunks(c.in, c.options, c.out))) {
        chunk_forward(c.in, c.options, c.execution, c.out, {c.handover.ready, has_few ? nullptr : c.handover.done},
                      many);
        if (!has_few) return;
    } else {
        wait_for(c.handover.ready, stream);
        if (has_many) tokens_forward(c.in, c.options, c.execution, c.out, many);
    }
    if (has_few) step_forward(c.in, c.options, c.execution, c.out, {0, few});
    record(c.handover.done, stream);
}

std::size_t forward_workspace(const DeltaForward& c) {
    const bool chunks = c.execution.kept != nullptr || lengths_of(c.in).longest > few_tokens(c.in);
    return chunks && takes_chunks(c.in, c.options, c.out) ? chunk_forward_workspace(c.in, c.options, c.execution) : 0;
}

std::size_t backward_workspace(const DeltaBackward& c) {
    if (takes_chunk_gradients(c.in, c.options, c.out))
        return chunk_backward_workspace(c.in, c.options, c.out, c.execution);
    return tokens_backward_workspace(c.in, c.options, c.out);
}
void run_backward(const DeltaBackward& c) {
    if (takes_chunk_gradients(c.in, c.options, c.out))
        return chunk_backward(c.in, c.options, c.execution, c.out, c.handover);
    const OnDevice device(c.in.q.device);
    wait_for(c.handover.ready, stream_of(c.execution));
    tokens_backward(c.in, c.options, c.execution, c.out);
    record(c.handover.done, stream_of(c.execution));
}

template <class Call>
std::string refuse_scores(const Call& call, core::Index most_channels) {
    std::string reason = refuse_card(call.in.q);
    if (reason.empty()) reason = refuse_f64(call.in);
    if (reason.empty()) reason = refuse_f64(call.out);
    if (reason.empty()) reason = refuse_heads("q", call.in.q);
    if (reason.empty()) reason = refuse_attention(call.in, most_channels);
    return reason;
}
std::string refuse_forward(const AttentionForward& c) {
    return refuse_scores(c, most_forward_channels);
}
std::string refuse_gradients(const AttentionBackward& c) {
    std::string reason = refuse_scores(c, most_backward_channels);
    const core::Index most = sequences_at_once(c.in);
    if (!reason.empty() || core::sequence_count(c.in) <= most) return reason;
    if (c.out.dbias && (c.out.dbias.shape[0] == 1 || c.in.cu_seqlens_q))
        reason = "dbias: more than " + std::to_string(most) + " sequences have it";
    else if (c.in.cu_seqlens_q && !c.in.cu_seqlens_k)
        reason = "cu_seqlens_q: more than " + std::to_string(most) + " sequences with caches of their own";
    return reason;
}
std::size_t scores_workspace(const AttentionForward& c) {
    return attention_forward_workspace(c.in, c.options);
}
std::size_t gradients_workspace(const AttentionBackward& c) {
    return attention_backward_workspace(c.in, c.options, c.out);
}

template <auto refuse, class Call>
std::string refuse_layer(const Call& c) {
    std::string reason = refuse_card(c.in.x);
    if (reason.empty()) reason = refuse_f64(c.in);
    if (reason.empty()) reason = refuse_f64(c.out);
    if (reason.empty()) reason = refuse_pools(c.in);
    return reason.empty() ? refuse(c.in) : reason;
}

constexpr DeviceMemory memory = {
    .allocate =
        [](std::size_t bytes) {
            void* data = nullptr;
            check(cudaMalloc(&data, bytes), "memory for tensors of the host");
            return data;
        },
    .release = [](void* data) { cudaFree(data); },
    .to_device =
        [](void* device, const void* host, std::size_t bytes) {
            check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "a copy to the GPU");
        },
    .to_host =
        [](void* host, const void* device, std::size_t bytes) {
            check(cudaDeviceSynchronize(), "the call");
            check(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "a copy from the GPU");
        },
};

const Engine engine = {
    .name = "cuda",
    .description = "kernels for NVIDIA GPUs",
    .device = core::DeviceType::cuda,
    .choice = Choice::fast,
    .available = has_device,
    .memory = &memory,
    .attention_forward = {apply<AttentionForward, attention_forward>, scores_workspace, refuse_forward},
    .attention_backward = {apply<AttentionBackward, attention_backward>, gradients_workspace, refuse_gradients},
    .delta_forward = {run_delta, forward_workspace, refuse_forward},
    .delta_backward = {run_backward, backward_workspace, refuse_kept<DeltaBackward>},
    .delta_kept_size = delta_kept_size,
    .convolution_forward = {convolution_forward, nullptr, refuse_layer<refuse_convolution, ConvolutionForward>},
    .convolution_backward = {convolution_backward, convolution_backward_workspace,
                             refuse_layer<refuse_convolution, ConvolutionBackward>},
    .norm_forward = {norm_forward, nullptr, refuse_layer<refuse_norm, NormForward>},
    .norm_backward = {norm_backward, norm_backward_workspace, refuse_layer<refuse_norm, NormBackward>},
};

}  // namespace

}  // namespace softdelta::cuda

extern "C" __attribute__((visibility("default"))) const softdelta::engines::Engine* softdelta_plugin_engine_v1(
    const char* build_id) {
    return std::strcmp(build_id, softdelta::engines::build_id) == 0 ? &softdelta::cuda::engine : nullptr;
}
