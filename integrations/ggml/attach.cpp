// How ggml's CPU backend gets softdelta. The table of ggml's CPU device has a function that makes backends; this file
// replaces it, and the backends that it makes compute graphs by graph.h. The device, its buffers and its answers to
// llama.cpp stay ggml's own. So llama.cpp plans as if ggml computed everything. (As an accelerator softdelta would be a
// device of its own, and llama.cpp's `-fa auto` turns flash attention off where devices differ.)
//
// ggml gets here in two ways. It finds libggml-cpu-*.so beside its own libraries and loads the one with the highest
// score as its CPU backend: then the best of the others is loaded and handed on. Or GGML_BACKEND_PATH, or a call of
// ggml_backend_load, names this file: then there is a CPU backend already.
#include <dlfcn.h>
#include <softdelta/softdelta.h>

#include <filesystem>
#include <string_view>

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "graph.h"
#include "guard.h"
#include "settings.h"

// Not constant, so that the compiler reads it: scripts/llama changes it in the file, to play another version.
extern "C" {
GGML_BACKEND_API char softdelta_ggml_version[];
}
char softdelta_ggml_version[] = "built for ggml " SOFTDELTA_GGML_VERSION;

namespace {

using namespace softdelta_ggml;
namespace fs = std::filesystem;

std::string_view built_version() {
    return std::string_view(softdelta_ggml_version).substr(std::string_view("built for ggml ").size());
}

// Why this ggml is not the one whose structures this file was compiled with; "" if it is.
std::string mismatch() {
    if (built_version() != ggml_version()) return softdelta_ggml_version + std::string(", found ") + ggml_version();
    const bool same = std::string_view(ggml_op_name(GGML_OP_GATED_DELTA_NET)) == "GATED_DELTA_NET" &&
                      std::string_view(ggml_op_name(GGML_OP_FLASH_ATTN_EXT)) == "FLASH_ATTN_EXT" &&
                      std::string_view(ggml_type_name(GGML_TYPE_Q4_0)) == "q4_0" &&
                      ggml_tensor_overhead() - sizeof(ggml_tensor) < sizeof(ggml_tensor);
    return same ? "" : std::string("built for another commit of ggml ") + ggml_version();
}

// Why no kernels run here: another CPU, or a SOFTDELTA_ISA that there is not; "" if some do.
std::string why_no_kernels() {
    for (int i = 0; i < softdelta_isa_level_count(); ++i) {
        softdelta_isa_level level = softdelta_isa_level_default();
        if (softdelta_get_isa_level(i, &level) != SOFTDELTA_OK) return softdelta_last_error();
        if (level.selected != 0) return "";
    }
    return "no kernels for this CPU";
}

// Functions of ggml's CPU backend as they were.
ggml_backend_t (*make_backend)(ggml_backend_dev_t, const char*) = nullptr;
ggml_backend_set_n_threads_t set_threads = nullptr;

ggml_backend_t init_backend(ggml_backend_dev_t device, const char* params) noexcept {
    ggml_backend_t backend = guarded("a backend", ggml_backend_t{}, [&] { return make_backend(device, params); });
    if (backend == nullptr) return nullptr;
    return guarded("a backend", backend, [backend] {  // which computes without this file if it throws
        if (!take_over(backend, set_threads))
            GGML_LOG_WARN("softdelta: left out: built for another commit of ggml %s\n", ggml_version());
        return backend;
    });
}

void attach(ggml_backend_dev_t device) {
    if (make_backend != nullptr) return;
    set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(device->reg, "ggml_backend_set_n_threads"));
    make_backend = device->iface.init_backend;
    device->iface.init_backend = init_backend;
}

template <class Function>
Function symbol(void* library, const char* name) {
    return reinterpret_cast<Function>(dlsym(library, name));
}

// The file that ggml would have loaded as its CPU backend: of the files libggml-cpu-*.so the one with the best score,
// else libggml-cpu.so; beside this file, or beside the program. Empty: there is none.
fs::path cpu_backend_in(const fs::path& folder) {
    std::error_code error;
    fs::path best;
    int best_score = 0;
    for (const auto& entry : fs::directory_iterator(folder, error)) {
        const fs::path& path = entry.path();
        if (path.filename().string().rfind("libggml-cpu-", 0) != 0 || path.extension() != ".so") continue;
        void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) continue;
        const auto score = symbol<ggml_backend_score_t>(library, "ggml_backend_score");
        const bool another_of_these = dlsym(library, "softdelta_ggml_version") != nullptr;
        if (score != nullptr && !another_of_these && score() > best_score) {
            best_score = score();
            best = path;
        }
        dlclose(library);
    }
    if (best.empty() && fs::exists(folder / "libggml-cpu.so", error)) best = folder / "libggml-cpu.so";
    return best;
}

fs::path cpu_backend() {
    Dl_info self;
    std::error_code error;
    fs::path found;
    if (dladdr(softdelta_ggml_version, &self) != 0)
        found = cpu_backend_in(fs::canonical(self.dli_fname, error).parent_path());
    return found.empty() ? cpu_backend_in(fs::canonical("/proc/self/exe", error).parent_path()) : found;
}

ggml_backend_reg_t load_cpu_backend() {
    void* library = dlopen(cpu_backend().c_str(), RTLD_NOW | RTLD_LOCAL);
    const auto init = library != nullptr ? symbol<ggml_backend_init_t>(library, "ggml_backend_init") : nullptr;
    return init != nullptr ? init() : nullptr;
}

ggml_backend_reg_t nothing_of_its_own() {
    static ggml_backend_reg value = [] {
        ggml_backend_reg_i i = {};
        i.get_name = [](ggml_backend_reg_t) { return "softdelta"; };
        i.get_device_count = [](ggml_backend_reg_t) { return size_t{0}; };
        i.get_device = [](ggml_backend_reg_t, size_t) -> ggml_backend_dev_t { return nullptr; };
        return ggml_backend_reg{GGML_BACKEND_API_VERSION, i, nullptr};
    }();
    return &value;
}

ggml_backend_reg_t find_registry() {
    if (settings().own_device) return device_registry();
    if (ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); device != nullptr) {
        attach(device);
        return nothing_of_its_own();
    }
    ggml_backend_reg_t cpu = load_cpu_backend();
    if (cpu != nullptr && cpu->api_version == GGML_BACKEND_API_VERSION) attach(ggml_backend_reg_dev_get(cpu, 0));
    return cpu;
}

ggml_backend_reg_t registry() noexcept {
    return guarded("loading", ggml_backend_reg_t{}, find_registry);
}

std::string why_not() {
    if (std::string wrong = mismatch(); !wrong.empty()) return wrong;
    if (std::string none = why_no_kernels(); !none.empty()) return none;
    if (ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) == nullptr && cpu_backend().empty())
        return "no libggml-cpu*.so beside it or the program";
    return "";
}

// 0, and one line, where this file must stay out; ggml then goes on without it.
int score() noexcept {
    return guarded("loading", 0, [] {
        static const std::string reason = why_not();
        static bool said = reason.empty();
        if (!said) GGML_LOG_WARN("softdelta: left out: %s\n", reason.c_str());
        said = true;
        return reason.empty() ? 1 << 20 : 0;  // above any variant of ggml's own
    });
}

}  // namespace

GGML_BACKEND_DL_IMPL(registry)
GGML_BACKEND_DL_SCORE_IMPL(score)
