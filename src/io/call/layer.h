// A case file of a layer around the delta rules, the causal convolution or the gated norm, as a call of the library.
#pragma once

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "io/call/call.h"
#include "softdelta/softdelta.hpp"

namespace softdelta::io {

// Views into a CaseFile, which must outlive it.
struct LayerCall {
    std::string op;
    bool is_convolution = false;
    ConvolutionInputs convolution;
    ConvolutionOptions convolution_options;
    NormInputs norm;
    NormOptions norm_options;
    Tensor dy, dfinal_state;            // gradients given
    std::int64_t state_tokens = 0;      // S of a convolution's states
    std::vector<std::string> outputs;   // results the file holds, in the order of output_names
    std::vector<std::string> warnings;  // unknown metadata keys and tensors, each a sentence
};

// The call of a file of any operation. Throws CaseError as call_of does.
std::variant<Call, LayerCall> any_call_of(const CaseFile& file);

// These are what call.h has of other operations.

LayerCall call_of_layer(const CaseFile& file);
std::vector<std::string> output_names(const LayerCall& call);
std::vector<std::int64_t> output_shape(const LayerCall& call, const std::string& name);
DType output_dtype(const LayerCall& call, const std::string& name);
std::size_t check(const LayerCall& call, const std::map<std::string, Tensor>& results,
                  const Execution& execution = {.engine = "reference"});
void execute(const LayerCall& call, const std::map<std::string, Tensor>& results, const Execution& execution);

}  // namespace softdelta::io
