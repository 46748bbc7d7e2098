// softdelta run: a case file's inputs through an engine, results into a new case file.
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <variant>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "io/call/layer.h"
#include "io/file/output.h"
#include "io/file/text.h"
#include "judge/memory.h"

namespace softdelta::cli {

namespace {

struct RunRequest {
    std::string input, output;
    std::string engine = "reference";
    int threads = 0;
    std::uint64_t memory = 0;
};

template <class Call>
void run_call(const Call& call, const io::CaseFile& file, const RunRequest& request) {
    io::expect_output(request.output);
    for (const std::string& warning : call.warnings) complain(request.input + ": " + warning);
    double needed = judge::memory_to_compute(call, request.engine, request.threads);
    judge::expect_memory(request.input, needed, static_cast<double>(request.memory));
    std::map<std::string, Tensor> results;
    std::map<std::string, io::OwnedTensor> memory;
    for (const std::string& name : io::output_names(call)) {
        memory[name] = io::OwnedTensor(io::output_dtype(call, name), io::output_shape(call, name));
        results[name] = memory[name].view();
    }
    Execution execution;
    execution.engine = request.engine;
    execution.threads = request.threads;
    try {
        needed += static_cast<double>(io::check(call, results, execution));
        judge::expect_memory(request.input, needed, static_cast<double>(request.memory));
        ProgressLine progress(request.input);
        progress.show(0, ("computing in " + judge::memory_text(needed)).c_str());
        io::execute(call, results, execution);
    } catch (const std::invalid_argument& e) {
        throw io::CaseError(request.input + ": " + e.what());
    } catch (const Unsupported& e) {
        throw io::CaseError(request.input + ": " + e.what());
    }
    // `call` views the inputs: they stay; results that the input held are replaced, its intermediates dropped
    io::CaseFile result = file;
    if constexpr (requires { call.intermediates; })
        for (const std::string& name : call.intermediates) result.tensors.erase(name);
    for (auto& [name, tensor] : memory) result.tensors.insert_or_assign(name, tensor);
    result.metadata["producer"] = std::string("softdelta ") + softdelta_version() + " run";
    io::write_case(request.output, result);
    std::printf("%s: %zu results of %s\n", io::printable(request.output).c_str(), memory.size(), call.op.c_str());
}

void run(const RunRequest& request) {
    const io::CaseFile file = io::read_case(request.input);
    std::visit([&](const auto& call) { run_call(call, file, request); }, io::any_call_of(file));
}

}  // namespace

void add_run(CLI::App& app, int& status) {
    auto request = std::make_shared<RunRequest>();
    CLI::App* command = app.add_subcommand("run", "Compute a case file's results and write them as a case file");
    command->add_option("IN", request->input, "Case file (safetensors) with the inputs")->required();
    command->add_option("-o,--output", request->output, "Case file to write")->required();
    add_engine(*command, request->engine, "What computes; default: reference, the truth");
    add_threads(*command, request->threads);
    add_memory(*command, request->memory);
    command->callback([request, &status] {
        run(*request);
        status = right;
    });
}

}  // namespace softdelta::cli
