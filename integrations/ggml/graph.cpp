#include "graph.h"

#include <memory>
#include <mutex>
#include <unordered_map>

#include "ggml-impl.h"
#include "guard.h"
#include "log.h"
#include "operations/operations.h"

namespace softdelta_ggml {

namespace {

// Of one backend. ggml computes one graph of a backend at a time; other threads have backends of their own.
struct Graphs {
    ggml_backend_i cpu = {};  // the backend's functions as they were
    Resources resources;
    Log log;
};

std::mutex mutex;
std::unordered_map<ggml_backend_t, std::unique_ptr<Graphs>>& all_graphs() {
    static auto* value =
        new std::unordered_map<ggml_backend_t, std::unique_ptr<Graphs>>;  // backends may outlive statics
    return *value;
}

Graphs& graphs_of(ggml_backend_t backend) {
    const std::lock_guard lock(mutex);
    return *all_graphs().at(backend);
}

// The number of threads, which the context of ggml's CPU backend begins with. Programs set it by a function of the
// registry or by ggml_backend_cpu_set_n_threads; nothing returns it.
int first_of_context(ggml_backend_t backend) {
    return *static_cast<const int*>(backend->context);
}

bool is_computed(const ggml_tensor* node) {
    return !moves_no_data(node->op) && (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
}

// Nodes [begin, end) by ggml.
ggml_status compute_by_ggml(Graphs& graphs, ggml_backend_t backend, ggml_cgraph* graph, int begin, int end) {
    bool any = false;
    for (int i = begin; i < end && !any; ++i) any = is_computed(graph->nodes[i]);
    if (!any) return GGML_STATUS_SUCCESS;
    ggml_cgraph part = ggml_graph_view(graph, begin, end);
    return graphs.cpu.graph_compute(backend, &part);
}

// What the library refuses, or has no memory for, ggml computes.
bool compute_by_softdelta(Graphs& graphs, const ggml_tensor* node) {
    const auto start = graphs.log.start();
    std::string error;
    try {
        error = operation_of(node)->compute(node, graphs.resources);
    } catch (const std::bad_alloc&) {
        error = "out of memory";
    }
    if (error.empty()) {
        graphs.log.add(node, true, start);
        return true;
    }
    static std::once_flag said;
    std::call_once(said,
                   [&] { GGML_LOG_WARN("softdelta: %s stays with ggml: %s\n", ggml_op_desc(node), error.c_str()); });
    return false;
}

ggml_status compute_by_both(Graphs& graphs, ggml_backend_t backend, ggml_cgraph* graph) {
    int begin = 0;  // nodes from here on are not computed yet
    for (int i = 0; i < graph->n_nodes; ++i) {
        const ggml_tensor* node = graph->nodes[i];
        if (!is_computed(node)) continue;
        const bool taken = is_taken(node);
        if (!taken && !graphs.log.times_nodes()) {
            graphs.log.count(node);
            continue;
        }
        if (const ggml_status status = compute_by_ggml(graphs, backend, graph, begin, i); status != GGML_STATUS_SUCCESS)
            return status;
        begin = i;
        if (taken && compute_by_softdelta(graphs, node)) {
            begin = i + 1;
        } else if (graphs.log.times_nodes()) {
            const auto start = graphs.log.start();
            const ggml_status status = compute_by_ggml(graphs, backend, graph, i, i + 1);
            if (status != GGML_STATUS_SUCCESS) return status;
            graphs.log.add(node, false, start);
            begin = i + 1;
        } else {
            graphs.log.count(node);
        }
    }
    return compute_by_ggml(graphs, backend, graph, begin, graph->n_nodes);
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph* graph) noexcept {
    return guarded_status("a graph", [&] {
        Graphs& graphs = graphs_of(backend);
        graphs.resources.threads = allowed_threads(first_of_context(backend));
        return compute_by_both(graphs, backend, graph);
    });
}

void free_backend(ggml_backend_t backend) noexcept {
    std::unique_ptr<Graphs> graphs;
    {
        const std::lock_guard lock(mutex);
        auto& all = all_graphs();
        graphs = std::move(all.at(backend));
        all.erase(backend);
    }
    graphs->log.print();
    graphs->cpu.free(backend);
}

}  // namespace

bool take_over(ggml_backend_t backend, ggml_backend_set_n_threads_t set_threads) {
    if (set_threads == nullptr) return false;
    const int before = first_of_context(backend);
    for (const int threads : {GGML_DEFAULT_N_THREADS + 1, GGML_DEFAULT_N_THREADS}) {
        set_threads(backend, threads);
        if (first_of_context(backend) == threads) continue;
        set_threads(backend, GGML_DEFAULT_N_THREADS);
        return false;
    }
    set_threads(backend, before);
    auto graphs = std::make_unique<Graphs>();
    graphs->cpu = backend->iface;
    const std::lock_guard lock(mutex);
    all_graphs()[backend] = std::move(graphs);
    backend->iface.graph_compute = compute;
    backend->iface.free = free_backend;
    return true;
}

}  // namespace softdelta_ggml
