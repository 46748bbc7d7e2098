// A part of a call: some of its sequences, and some groups of heads, a key head with the heads that read it. Sequences
// do not know each other, nor do groups, so what is computed of the part is what the whole holds for it.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "io/call/call.h"

namespace softdelta::diagnose {

// Ascending numbers of sequences (batch rows when nothing is packed) and of key heads.
struct Selection {
    std::vector<std::int64_t> sequences, groups;
};

std::int64_t sequence_count(const io::Call& call);
std::int64_t group_count(const io::Call& call);
Selection select_all(const io::Call& call);

// One tensor of a call by name: an operand, a result or an intermediate. For each dimension the indices that belong
// to a selection; `partial` when its numbers are sums over more than the selection holds.
struct TensorPart {
    std::vector<std::vector<std::int64_t>> indices;
    std::vector<std::int64_t> sequences, heads;  // where these are dimensions of the tensor
    bool partial = false;

    // Calls visit(first element, count) for each run of elements that lie side by side, in order.
    template <class Visit>
    void for_each_run(std::span<const std::int64_t> shape, Visit&& visit) const;
};
TensorPart part_of(const io::Call& call, const Selection& selection, const std::string& name, const Tensor& tensor);

// The same of a result, which may be a parameter's gradient of any shape.
TensorPart part_of_result(const io::Call& call, const Selection& selection, const std::string& name,
                          const Tensor& result);

class Sample {
  public:
    Sample(const io::Call& whole, const std::map<std::string, Tensor>& results,
           const std::map<std::string, Tensor>& intermediates, const Selection& selection);
    Sample(const Sample&) = delete;
    Sample& operator=(const Sample&) = delete;

    io::Call call;
    std::map<std::string, Tensor> results, intermediates;
    std::vector<std::string> left_out;  // results that sum over what is not selected

  private:
    Tensor take(const std::string& name, const Tensor& tensor);
    void take_bounds(io::Bounds& bounds, Tensor& cumulative);

    const io::Call& whole_;
    const Selection& selection_;
    std::vector<io::OwnedTensor> memory_;
};

template <class Visit>
void TensorPart::for_each_run(std::span<const std::int64_t> shape, Visit&& visit) const {
    std::size_t dims = indices.size();
    std::int64_t run = 1, runs = 1;
    while (dims > 0 && static_cast<std::int64_t>(indices[dims - 1].size()) == shape[dims - 1]) run *= shape[--dims];
    for (std::size_t i = 0; i < dims; ++i) runs *= static_cast<std::int64_t>(indices[i].size());
    std::vector<std::size_t> at(dims);
    for (std::int64_t r = 0; r < runs; ++r) {
        std::int64_t flat = 0;
        for (std::size_t i = 0; i < dims; ++i) flat = flat * shape[i] + indices[i][at[i]];
        visit(flat * run, run);
        for (std::size_t i = dims; i-- > 0;) {
            if (++at[i] < indices[i].size()) break;
            at[i] = 0;
        }
    }
}

}  // namespace softdelta::diagnose
