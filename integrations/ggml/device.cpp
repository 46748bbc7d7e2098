// softdelta as a device of ggml: an accelerator on host buffers, in the manner of ggml's BLAS backend. ggml's scheduler
// gives it the operations that it says it supports. It is there for ggml's tests of operations (graph.h).
#include <cstring>
#include <memory>

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "graph.h"
#include "guard.h"
#include "operations/operations.h"

namespace {

using namespace softdelta_ggml;

const char* name(ggml_backend_t) {
    return "softdelta";
}

void free_backend(ggml_backend_t backend) {
    delete static_cast<Resources*>(backend->context);
    delete backend;
}

ggml_status compute_nodes(ggml_backend_t backend, ggml_cgraph* graph) {
    Resources& resources = *static_cast<Resources*>(backend->context);
    for (int i = 0; i < graph->n_nodes; ++i) {
        const ggml_tensor* op = graph->nodes[i];
        if (moves_no_data(op->op) || (op->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) continue;
        const Operation* operation = operation_of(op);
        const std::string error = operation != nullptr ? operation->compute(op, resources) : "operation not taken";
        if (!error.empty()) {
            GGML_LOG_ERROR("softdelta: %s: %s\n", ggml_op_desc(op), error.c_str());
            return GGML_STATUS_FAILED;
        }
    }
    return GGML_STATUS_SUCCESS;
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph* graph) noexcept {
    return guarded_status("a graph", [&] { return compute_nodes(backend, graph); });
}

ggml_guid_t guid() {
    static ggml_guid value = {'s', 'o', 'f', 't', 'd', 'e', 'l', 't', 'a', ' ', 'g', 'g', 'm', 'l', 0, 1};
    return &value;
}

void set_threads(ggml_backend_t backend, int threads) {
    static_cast<Resources*>(backend->context)->threads = allowed_threads(threads);
}

// The device: none of its own, its tensors lie in host memory.

ggml_backend_t init_backend(ggml_backend_dev_t device, const char*) noexcept {
    ggml_backend_i interface = {};
    interface.get_name = name;
    interface.free = free_backend;
    interface.graph_compute = compute;
    return guarded("a backend", ggml_backend_t{}, [&] {
        auto resources = std::make_unique<Resources>();
        auto* backend = new ggml_backend{guid(), interface, device, resources.get()};
        resources.release();
        return backend;
    });
}

bool supports(ggml_backend_dev_t, const ggml_tensor* op) noexcept {
    return moves_no_data(op->op) || guarded("an operation", false, [op] { return is_taken(op); });
}

void memory(ggml_backend_dev_t, size_t* free, size_t* total) {
    *free = *total = 0;
}

void properties(ggml_backend_dev_t device, ggml_backend_dev_props* props) {
    *props = {};
    props->name = ggml_backend_dev_name(device);
    props->description = ggml_backend_dev_description(device);
    props->type = GGML_BACKEND_DEVICE_TYPE_ACCEL;
    props->caps.buffer_from_host_ptr = true;
    props->caps.mmap_support = true;
}

ggml_backend_device_i device_interface() {
    ggml_backend_device_i i = {};
    i.get_name = [](ggml_backend_dev_t) { return "softdelta"; };
    i.get_description = [](ggml_backend_dev_t) { return "delta rules and attention on this CPU"; };
    i.get_memory = memory;
    i.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; };
    i.get_props = properties;
    i.init_backend = init_backend;
    i.get_buffer_type = [](ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); };
    i.buffer_from_host_ptr = [](ggml_backend_dev_t, void* data, size_t size, size_t) {
        return ggml_backend_cpu_buffer_from_ptr(data, size);
    };
    i.supports_op = supports;
    i.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
        return ggml_backend_buft_is_host(type);
    };
    return i;
}

ggml_backend_reg_i registry_interface() {
    ggml_backend_reg_i i = {};
    i.get_name = [](ggml_backend_reg_t) { return "softdelta"; };
    i.get_device_count = [](ggml_backend_reg_t) { return size_t{1}; };
    i.get_device = [](ggml_backend_reg_t registry, size_t) {
        static ggml_backend_device device = {device_interface(), registry, nullptr};
        return &device;
    };
    i.get_proc_address = [](ggml_backend_reg_t, const char* wanted) {
        return std::strcmp(wanted, "ggml_backend_set_n_threads") == 0 ? reinterpret_cast<void*>(set_threads) : nullptr;
    };
    return i;
}

}  // namespace

ggml_backend_reg_t softdelta_ggml::device_registry() {
    static ggml_backend_reg value = {GGML_BACKEND_API_VERSION, registry_interface(), nullptr};
    return &value;
}
