// libFuzzer: every engine computes any small case, or refuses it with one line, as io::check said before. Build and
// seeds as for case_file_fuzz.
#include <stdexcept>

#include "fuzz/small_call.h"
#include "io/call/operands.h"

namespace {

using namespace softdelta;
using Results = std::map<std::string, Tensor>;

// The line with which a call is refused; empty when it is not.
template <class Function>
std::string refusal_of(Function&& function) {
    try {
        function();
    } catch (const std::invalid_argument& e) {
        return e.what();
    } catch (const Unsupported& e) {
        return e.what();
    }
    return "";
}

template <class Call>
void run(const test::Small<Call>& small, const std::string& engine) {
    const Call& call = small.call;
    Results results;
    std::vector<io::OwnedTensor> memory;
    for (const std::string& name : io::output_names(call)) {
        memory.emplace_back(io::output_dtype(call, name), io::output_shape(call, name));
        results[name] = memory.back().view();
    }
    Execution execution;
    execution.engine = engine;
    execution.threads = 1;
    std::vector<io::OwnedTensor> stages;
    if constexpr (requires { call.intermediates; }) {
        if (engine == "stages_f64" || engine == "stages_f32") {
            execution.stages.chunk_size = call.chunk_size;
            for (const std::string& name : call.intermediates) {
                const io::OwnedTensor& like = small.file.tensors.at(name);
                stages.emplace_back(like.dtype(), like.shape());
                execution.stages.wanted.push_back({name, stages.back().view()});
            }
        }
    }
    const std::string refused = refusal_of([&] { io::check(call, results, execution); });
    const std::string failed = refusal_of([&] { io::execute(call, results, execution); });
    test::require(refused.empty() || refused == failed);
    if (!failed.empty()) test::require_line(failed);
}

template <class Call>
void run_on_all(const std::optional<test::Small<Call>>& small) {
    if (!small) return;
    for (const std::string engine : {"fast", "reference", "stages_f64", "stages_f32"}) run(*small, engine);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const auto file = test::read_small_file(data, size);
    if (!file) return 0;
    const auto op = file->metadata.find("op");
    if (op != file->metadata.end() && io::is_layer(op->second))
        run_on_all(test::small_call(*file, io::call_of_layer));
    else
        run_on_all(test::small_call(*file, io::call_of));
    return 0;
}
