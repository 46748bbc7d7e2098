#include "support/guarded_results.h"

#include <stdexcept>

#include "io/file/core_view.h"

namespace softdelta::test {

namespace {

void copy_elements(const core::Tensor& from, const core::Tensor& to) {
    for (Index element = 0; element < from.count(); ++element) {
        Index source = 0, rest = element;
        for (auto dim = static_cast<std::size_t>(from.rank); dim-- > 0; rest /= from.shape[dim])
            source += rest % from.shape[dim] * from.stride[dim];
        core::store(to, element, core::load(from, source));
    }
}

}  // namespace

std::map<std::string, Guarded> make_results(const io::Call& call, const Names& names, std::uint64_t seed, Side side) {
    Random layout(seed);
    std::map<std::string, Guarded> results;
    for (const std::string& name : names) {
        const DType dtype = io::output_dtype(call, name);
        const Shape shape = io::output_shape(call, name);
        const Array like = layout() % 2 == 0 ? Array(dtype, shape, layout) : Array(dtype, shape);
        results.emplace(name, Guarded::result(like.view(), side));
    }
    return results;
}

DenseResults dense(const io::Call& call, const std::map<std::string, Guarded>& results) {
    DenseResults copies;
    for (const auto& [name, result] : results) {
        if (!result.view()) continue;
        if (!result.gaps_are_intact()) throw std::runtime_error(name + ": memory outside of the tensor was written");
        io::OwnedTensor copy(result.view().dtype(), io::output_shape(call, name));
        copy_elements(io::core_view(result.view()), io::core_view(copy.view()));
        copies.emplace(name, copy);
    }
    return copies;
}

}  // namespace softdelta::test
