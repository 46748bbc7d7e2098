// Without a mistake, what the catalogue's entries change is the truth itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/parallel.h"
#include "diagnose/replay/mistaken.h"
#include "judge/draw_case.h"

namespace softdelta::test {

namespace {

using diagnose::Dense;

std::map<std::string, Dense> truth_of(const io::Call& call) {
    std::map<std::string, io::OwnedTensor> truth;
    std::map<std::string, Tensor> views;
    for (const std::string& name : io::output_names(call)) {
        truth.emplace(name, io::OwnedTensor(DType::f64, io::output_shape(call, name)));
        views.emplace(name, truth.at(name).view());
    }
    Execution execution;
    execution.engine = "reference";
    execution.threads = 1;
    io::execute(call, views, execution);
    std::map<std::string, Dense> dense;
    for (const auto& [name, tensor] : truth) dense.emplace(name, Dense(tensor.view()));
    return dense;
}

// RMSE over RMS; what is not finite must be the same.
double ratio(const Dense& a, const Dense& b) {
    double error = 0, square = 0;
    for (diagnose::Index i = 0; i < a.count(); ++i) {
        const double x = a[i], y = b[i];
        if (x == y || (std::isnan(x) && std::isnan(y))) continue;
        error += (x - y) * (x - y);
        square += y * y;
    }
    return error == 0 ? 0 : std::sqrt(error / std::max(square, 1e-300));
}

std::string print(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1e", x);
    return text;
}

// The gate's gradient is a difference of larger terms, as kernels form it. Beside a huge mask a score keeps the digits
// that f64 has left for it: two ways of adding differ by 2⁻⁵² of the mask.
double limit_of(const std::string& result, const io::MakeOptions& options) {
    const bool cancels = result == "dg" || result == "dg_gamma" || result == "dA_log" || result == "ddt_bias";
    const double lost = options.bias == "padding" ? std::min(std::abs(options.mask_value) * 0x1p-52, 1e-5) : 0;
    return (cancels ? 1e-6 : 1e-10) + lost;
}

TEST(Unmistaken, IsTheTruth) {
    constexpr std::int64_t count = 150;
    std::vector<std::string> wrong(count);
    core::parallel_units(0, count, [&] {
        return [&](std::int64_t i) {
            Draw draw(static_cast<std::uint64_t>(i));
            io::MakeOptions options = draw_case(draw);
            if (options.op != "attention" && i % 3 == 0) options.steps = draw.between(2, 3);
            const io::CaseFile file = io::make_case(options);
            const io::Call call = io::call_of(file);
            const diagnose::Results results = diagnose::MistakenCall(call, 1).run({});
            for (const auto& [name, truth] : truth_of(call))
                if (const double r = ratio(results.at(name), truth); !(r < limit_of(name, options)))
                    wrong[static_cast<std::size_t>(i)] += options.op + " " + options.gate + ", case " +
                                                          std::to_string(i) + ": " + name + " is off by " + print(r) +
                                                          "\n";
        };
    });
    for (const std::string& text : wrong)
        if (!text.empty()) ADD_FAILURE() << text;
}

}  // namespace

}  // namespace softdelta::test
