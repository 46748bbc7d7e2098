// The plugin's door and the engine's row.
#include <cuda_runtime_api.h>

#include <cstring>
#include <initializer_list>

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

// The first reason that there is.
std::string first_of(std::initializer_list<std::string> reasons) {
    for (const std::string& reason : reasons)
        if (!reason.empty()) return reason;
    return "";
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

constexpr core::Index most_heads = 65535;  // a grid's second dimension
std::string refuse_more(const char* name, const core::Tensor& t, std::size_t dimension, core::Index most) {
    if (t.shape[dimension] <= most) return "";
    return std::string(name) + ": dimension " + std::to_string(dimension) + " is " +
           std::to_string(t.shape[dimension]) + ", expected at most " + std::to_string(most) + " on a GPU";
}

template <class Call>
std::string refuse_delta(const Call& call) {
    constexpr core::Index most_channels = 256;
    return first_of({refuse_card(call.in.q), refuse_f64(call.in), refuse_f64(call.out), refuse_pools(call.in),
                     refuse_more("v", call.in.v, 2, most_heads), refuse_more("q", call.in.q, 3, most_channels)});
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
        chunk_forward(c, {c.handover.ready, has_few ? nullptr : c.handover.done}, many);
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
    return chunks && takes_chunks(c.in, c.options, c.out) ? chunk_forward_workspace(c) : 0;
}

std::size_t backward_workspace(const DeltaBackward& c) {
    if (takes_chunk_gradients(c.in, c.options, c.out)) return chunk_backward_workspace(c);
    return tokens_backward_workspace(c.in, c.options, c.out);
}
void run_backward(const DeltaBackward& c) {
    if (takes_chunk_gradients(c.in, c.options, c.out)) return chunk_backward(c);
    const OnDevice device(c.in.q.device);
    wait_for(c.handover.ready, stream_of(c.execution));
    tokens_backward(c.in, c.options, c.execution, c.out);
    record(c.handover.done, stream_of(c.execution));
}

std::string refuse_caches(const core::AttentionInputs& in) {
    if (in.k_scale || in.v_scale)
        return std::string(in.k_scale ? "k" : "v") + " has a scale: the CUDA engine expands no small numbers yet";
    if (in.block_table && in.block_table.device.is_cpu() && !in.q.device.is_cpu())
        return "block_table lies on the host, expected on the device of q";
    return "";
}
template <class Call>
std::string refuse_scores(const Call& call, core::Index most_channels) {
    return first_of({refuse_card(call.in.q), refuse_f64(call.in), refuse_f64(call.out),
                     refuse_more("q", call.in.q, 2, most_heads), refuse_more("q", call.in.q, 3, most_channels),
                     refuse_more("v", call.in.v, 3, most_channels), refuse_caches(call.in)});
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

std::string refuse_sizes(const core::ConvolutionInputs& in) {
    return refuse_more("weight", in.weight, 1, most_convolution_width);
}
std::string refuse_sizes(const core::NormInputs& in) {
    return refuse_norm(in);
}
template <class Call>
std::string refuse_layer(const Call& c) {
    return first_of({refuse_card(c.in.x), refuse_f64(c.in), refuse_f64(c.out), refuse_pools(c.in), refuse_sizes(c.in)});
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
    .attention_forward = {attention_forward, attention_forward_workspace, refuse_forward},
    .attention_backward = {attention_backward, attention_backward_workspace, refuse_gradients},
    .delta_forward = {run_delta, forward_workspace, refuse_forward},
    .delta_backward = {run_backward, backward_workspace, refuse_kept<DeltaBackward>},
    .delta_kept_size = delta_kept_size,
    .convolution_forward = {convolution_forward, nullptr, refuse_layer<ConvolutionForward>},
    .convolution_backward = {convolution_backward, convolution_backward_workspace, refuse_layer<ConvolutionBackward>},
    .norm_forward = {norm_forward, nullptr, refuse_layer<NormForward>},
    .norm_backward = {norm_backward, norm_backward_workspace, refuse_layer<NormBackward>},
};

}  // namespace

}  // namespace softdelta::cuda

extern "C" __attribute__((visibility("default"))) const softdelta::engines::Engine* softdelta_plugin_engine_v1(
    const char* build_id) {
    return std::strcmp(build_id, softdelta::engines::build_id) == 0 ? &softdelta::cuda::engine : nullptr;
}
