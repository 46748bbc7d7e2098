// A case file as a call of the library: names become operands, metadata options; and the way back.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/file/case_file.h"
#include "softdelta/softdelta.hpp"

namespace softdelta::io {

// Where packed sequences begin and end: 0 = first ≤ … ≤ last; empty: nothing is packed.
using Bounds = std::vector<std::int64_t>;

struct Packing {
    Bounds tokens{}, steps{}, queries{}, keys{};  // steps: n times as many as tokens
};

// Views into a CaseFile, which must outlive it.
struct Call {
    std::string op;  // attention, or the name of a rule
    bool is_attention = false;
    AttentionInputs attention;
    AttentionOptions attention_options;
    DeltaInputs delta;
    DeltaOptions delta_options;
    Packing packing;  // what cu_seqlens says, checked
    // Of parameters of the gate as the file has them, and their gradients; the call's own are vectors.
    std::map<std::string, std::vector<std::int64_t>> parameter_shapes;
    std::int64_t chunk_size = 64;            // of the kernel that made the dump, where it says
    Tensor d_o, dlse, dfinal_state;          // gradients given
    std::vector<std::string> outputs;        // results the file holds, in the order of output_names
    std::vector<std::string> intermediates;  // tensors named like a stage
    std::vector<std::string> warnings;       // unknown metadata keys and tensors, each a sentence

    const Tensor& gate_bias() const { return delta.dt_bias; }  // of raw gates
};

// Throws CaseError when the file contradicts itself or asks for what does not exist.
Call call_of(const CaseFile& file);

// Whether keys or values have 8 or 4 bits and scales: then there are no gradients, and o is as q.
bool has_quantised_numbers(const Call& call);

// Every result this call can have, in the order tables show: o, lse | final_state, then gradients of the inputs given
// (gradients only if d_o or dfinal_state is; dinitial_state also without an initial_state).
std::vector<std::string> output_names(const Call& call);

// Shape of a result, and the storage type a kernel would give it: its input's; o as v, lse and states f32.
std::vector<std::int64_t> output_shape(const Call& call, const std::string& name);
DType output_dtype(const Call& call, const std::string& name);

// Throws what `execute` would throw before it computes: every operand, option, named result and intermediate is as the
// library wants it. A call that was not checked must not be read as if it held together. Returns the bytes of workspace
// that the engine will take. The reference takes every call that is legal.
std::size_t check(const Call& call, const std::map<std::string, Tensor>& results,
                  const Execution& execution = {.engine = "reference"});

// Computes the named results into the given tensors: forward and backward call, as far as asked for.
void execute(const Call& call, const std::map<std::string, Tensor>& results, const Execution& execution);

}  // namespace softdelta::io
