// The table of operands as case files see it: which tensors each operation takes and yields, and docs/case-file.md.
#include "io/call/operands.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/layer/convolution.h"
#include "core/layer/norm.h"
#include "io/call/layer.h"

namespace softdelta::io {
namespace {

void add(std::string& list, std::string_view name) {
    list.append(list.empty() ? "" : " ").append(name);
}

// A row of the first table: an operation, its inputs, its results.
template <class Inputs, class Outputs, class Gradients>
std::string row_of(const Operation& op) {
    std::string required, optional, results;
    for (const auto& input : core::operands_of<Inputs>) {
        const core::Use use = use_of(op, file_name(input.name));
        if (use != core::Use::none) add(use == core::Use::required ? required : optional, file_name(input.name));
    }
    for (const auto& output : core::operands_of<Outputs>)
        if (in_files(output.name)) add(results, output.name);
    for (const auto& gradient : core::operands_of<Gradients>) {
        const std::string_view name = file_name(gradient.name);
        if (is_gradient(op, name)) add(results, name);
        if (!gradient.written && takes(op, name)) add(optional, name);
    }
    return "| " + std::string(op.name) + " | " + required + " | " + optional + " | " + results + " |\n";
}

std::string operations_table() {
    std::string table = "| operation | required inputs | optional inputs | results |\n|---|---|---|---|\n";
    for (const Operation& op : std::span(operations).first(1 + core::rules.size()))
        table += op.is_attention() ? row_of<core::AttentionInputs, core::AttentionOutputs, core::AttentionGradients>(op)
                                   : row_of<core::DeltaInputs, core::DeltaOutputs, core::DeltaGradients>(op);
    return table;
}

// Tensors of one shape and type share a row.
template <class Struct>
void add_shapes(std::vector<std::pair<std::string, std::string>>& rows) {
    for (const auto& operand : core::operands_of<Struct>) {
        const std::string_view name = file_name(operand.name);
        if (!in_files(name) || operand.shape.rank == 0 || (!operand.written && (name == "o" || name == "lse")))
            continue;
        std::string shape = core::text_of(operand.shape);
        if (operand.channel_shape.rank > 0) shape += "; channel gate " + core::text_of(operand.channel_shape);
        if (operand.v_first_shape.rank > 0) shape += "; state_v_first " + core::text_of(operand.v_first_shape);
        for (std::size_t bar = shape.find('|'); bar != shape.npos; bar = shape.find('|', bar + 4))
            shape.replace(bar, 1, " or ");
        shape += operand.kind == core::Kind::floating  ? " | number"
                 : operand.kind == core::Kind::boolean ? " | bool"
                                                       : " | integer";
        const auto same = std::ranges::find(rows, shape, &std::pair<std::string, std::string>::second);
        if (same == rows.end())
            rows.emplace_back(name, shape);
        else
            add(same->first, name);
    }
}

template <class... Structs>
std::string shapes_of(std::string_view title) {
    std::vector<std::pair<std::string, std::string>> rows;
    (add_shapes<Structs>(rows), ...);
    std::string table = "| " + std::string(title) + " | shape | type |\n|---|---|---|\n";
    for (const auto& [names, shape] : rows) table += "| " + names + " | " + shape + " |\n";
    return table;
}

std::string shapes_table() {
    return shapes_of<core::AttentionInputs, core::AttentionOutputs, core::AttentionGradients>("tensors of attention") +
           "\n" + shapes_of<core::DeltaInputs, core::DeltaOutputs, core::DeltaGradients>("tensors of a delta rule");
}

// The layers around the delta rules.
template <class Inputs, class Outputs, class Gradients>
std::string row_of_layer(std::string_view op) {
    std::string required, optional, results;
    for (const auto& input : core::operands_of<Inputs>)
        if (in_files(input.name)) add(input.need == core::needs::required ? required : optional, input.name);
    for (const auto& output : core::operands_of<Outputs>) add(results, output.name);
    for (const auto& gradient : core::operands_of<Gradients>) add(gradient.written ? results : optional, gradient.name);
    return "| " + std::string(op) + " | " + required + " | " + optional + " | " + results + " |\n";
}

std::string layers_table() {
    return "| layer | required inputs | optional inputs | results |\n|---|---|---|---|\n" +
           row_of_layer<core::ConvolutionInputs, core::ConvolutionOutputs, core::ConvolutionGradients>(
               convolution_name) +
           row_of_layer<core::NormInputs, core::NormOutputs, core::NormGradients>(norm_name) + "\n" +
           shapes_of<core::ConvolutionInputs, core::ConvolutionOutputs, core::ConvolutionGradients>(
               "tensors of a convolution") +
           "\n" + shapes_of<core::NormInputs, core::NormOutputs, core::NormGradients>("tensors of a gated norm");
}

TEST(Operands, StandInThePage) {
    std::ifstream file(SOFTDELTA_PAGE);
    const std::string page((std::stringstream() << file.rdbuf()).str());
    for (const std::string& table : {operations_table(), shapes_table(), layers_table()})
        EXPECT_NE(page.find(table), page.npos) << "docs/case-file.md lacks\n" << table;
}

TEST(Operands, OfAnOperation) {
    const Operation &attention = operations.front(), &delta = operations[1], &kda = operations[3],
                    &comba = operations[4], &gla = operations[5];
    ASSERT_EQ(delta.name, "delta_rule");
    ASSERT_EQ(kda.name, "kda");
    ASSERT_EQ(comba.name, "comba");
    ASSERT_EQ(gla.name, "simple_gla");
    EXPECT_EQ(use_of(kda, "g"), core::Use::required);
    EXPECT_EQ(use_of(gla, "g"), core::Use::optional);
    EXPECT_EQ(use_of(delta, "g"), core::Use::none);
    EXPECT_EQ(use_of(comba, "p"), core::Use::required);
    EXPECT_EQ(use_of(kda, "p"), core::Use::none);
    EXPECT_EQ(use_of(gla, "beta"), core::Use::none);
    EXPECT_EQ(use_of(kda, "g_gamma"), core::Use::none);
    EXPECT_TRUE(takes(attention, "do") && takes(attention, "dlse") && takes(kda, "dfinal_state"));
    EXPECT_FALSE(takes(attention, "dfinal_state") || takes(kda, "dlse") || takes(kda, "d_o") || takes(kda, "dq"));
    EXPECT_FALSE(takes(attention, "o") || takes(attention, "lse")) << "results, though a backward pass reads them";
    EXPECT_TRUE(is_output(kda, "o") && is_output(kda, "final_state") && is_output(attention, "lse"));
    EXPECT_FALSE(is_output(kda, "states") || takes(kda, "state_indices"));
    EXPECT_TRUE(is_gradient(comba, "dp") && is_gradient(kda, "dinitial_state") && is_gradient(attention, "dbias"));
    EXPECT_FALSE(is_gradient(kda, "dp") || is_gradient(kda, "do") || is_gradient(attention, "dmask"));
    EXPECT_TRUE(is_gate_parameter("A_log") && is_gate_parameter("dt_bias") && is_gate_parameter("g_gamma"));
    EXPECT_FALSE(is_gate_parameter("beta") || is_gate_parameter("cu_seqlens") || is_gate_parameter("sink"));
}

}  // namespace
}  // namespace softdelta::io
