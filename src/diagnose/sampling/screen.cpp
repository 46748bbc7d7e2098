#include "diagnose/sampling/screen.h"

#include <cmath>

#include "core/parallel.h"
#include "core/tensor.h"
#include "diagnose/words.h"
#include "io/file/core_view.h"

namespace softdelta::diagnose {

namespace {

double ratio_of(const TensorPart& part, const Tensor& result, const Tensor& fast) {
    const core::Tensor x = io::core_view(result), y = io::core_view(fast);
    double error = 0, square = 0;
    std::int64_t count = 0;
    part.for_each_run(result.shape(), [&](std::int64_t first, std::int64_t n) {
        count += n;
        for (std::int64_t i = first; i < first + n; ++i) {
            const double a = core::load(x, i), b = core::load(y, i);
            if (a == b) continue;  // infinities of lse too
            error += (a - b) * (a - b);
            square += b * b;
        }
    });
    if (count == 0) return std::nan("");
    return error == 0 ? 0 : std::isnan(error) ? HUGE_VAL : std::sqrt(error / square);
}

// The part of one sequence and group.
Selection unit(std::int64_t i, std::int64_t groups) {
    return {{i / groups}, {i % groups}};
}

std::set<std::int64_t> as_set(const std::vector<std::int64_t>& numbers) {
    return {numbers.begin(), numbers.end()};
}

std::string of_all(const std::vector<std::int64_t>& chosen, std::int64_t all) {
    return list(as_set(chosen)) + " of 0-" + std::to_string(all - 1);
}

}  // namespace

Screen compare_with_fast(const io::Call& call, const std::map<std::string, Tensor>& results, int threads) {
    Screen screen;
    screen.groups = group_count(call);
    const std::int64_t units = sequence_count(call) * screen.groups;
    std::map<std::string, io::OwnedTensor> memory;
    std::map<std::string, Tensor> fast;
    for (const auto& [name, tensor] : results) {
        if (part_of_result(call, unit(0, screen.groups), name, tensor).partial) continue;
        memory.emplace(name, io::OwnedTensor(tensor.dtype(), {tensor.shape().begin(), tensor.shape().end()}));
        fast[name] = memory.at(name).view();
    }
    Execution execution;
    execution.engine = "fast";
    execution.threads = threads;
    try {
        io::execute(call, fast, execution);
    } catch (const std::exception&) {
        return screen;
    }
    for (const auto& [name, tensor] : fast) {
        std::vector<double>& ratios = screen.ratios[name];
        ratios.resize(static_cast<std::size_t>(units));
        core::parallel_units(threads, units, [&, &result = results.at(name), &name = name, &tensor = tensor] {
            return [&](std::int64_t i) {
                ratios[static_cast<std::size_t>(i)] =
                    ratio_of(part_of(call, unit(i, screen.groups), name, result), result, tensor);
            };
        });
    }
    return screen;
}

std::vector<std::string> describe_selection(const io::Call& call, const Selection& selection, const Screen& screen,
                                            const std::map<std::string, double>& limits,
                                            const std::vector<std::string>& left_out) {
    const std::int64_t sequences = sequence_count(call), groups = screen.groups;
    const bool packed =
        call.is_attention ? static_cast<bool>(call.attention.cu_seqlens_q) : static_cast<bool>(call.delta.cu_seqlens);
    const std::int64_t heads = (call.is_attention ? call.attention.q : call.delta.v).shape(2);
    std::vector<std::string> sentences;
    std::string text = heads == groups
                           ? "heads " + of_all(selection.groups, groups)
                           : "key heads " + of_all(selection.groups, groups) + ", with all heads of their groups";
    if (sequences > 1)
        text += (packed ? ", of packed sequences " : ", of batch rows ") + of_all(selection.sequences, sequences);
    if (!screen.ratios.empty())
        text += selection.groups.size() * selection.sequences.size() > 1
                    ? ": those that differ most from this library's fast path, and least"
                    : ": those that differ most from this library's fast path";
    sentences.push_back(text);

    const std::set<std::int64_t> own_sequences = as_set(selection.sequences), own_groups = as_set(selection.groups);
    for (const auto& [name, ratios] : screen.ratios) {
        const auto limit = limits.find(name);
        std::set<std::int64_t> far;
        for (std::int64_t i = 0; i < static_cast<std::int64_t>(ratios.size()); ++i) {
            const bool examined = own_sequences.count(i / groups) != 0 && own_groups.count(i % groups) != 0;
            constexpr double both = 2;  // the fast path has an error too
            if (!examined && limit != limits.end() && ratios[static_cast<std::size_t>(i)] > both * limit->second)
                far.insert(i % groups);
        }
        if (!far.empty())
            sentences.push_back("elsewhere, only compared with the fast path: " + name + " differs in " +
                                (heads == groups ? "heads " : "key heads ") + list(far));
    }
    for (const std::string& name : left_out)
        sentences.push_back(name + " is not examined: it is a sum over more than these");
    return sentences;
}

}  // namespace softdelta::diagnose
