#include "support/guarded_results.h"

#include <cstring>
#include <stdexcept>

#include "support/offsets.h"

namespace softdelta::test {

namespace {

// To a row-major tensor of the same type.
void copy_elements(const Tensor& from, const Tensor& to) {
    with_element(from, [&](auto element) {
        constexpr std::int64_t size = sizeof element;
        const auto* first = static_cast<const std::byte*>(from.data());
        auto* next = static_cast<std::byte*>(to.data());
        for_each_offset(from, [&](std::int64_t i) {
            std::memcpy(next, first + size * i, size);
            next += size;
        });
    });
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
        copy_elements(result.view(), copy.view());
        copies.emplace(name, copy);
    }
    return copies;
}

}  // namespace softdelta::test
