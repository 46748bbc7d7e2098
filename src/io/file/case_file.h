// A case file: one call of one operation, its inputs and whatever outputs some kernel produced, as safetensors.
// Reading trusts nothing: sizes, offsets and types are checked before anything is allocated for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "softdelta/softdelta.hpp"

namespace softdelta::io {

// One line that names the file (when there is one) and the fault.
struct CaseError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A dense row-major tensor with its own memory, 64-byte aligned. Copies share the memory.
class OwnedTensor {
  public:
    OwnedTensor() = default;
    OwnedTensor(DType dtype, std::vector<std::int64_t> shape);  // zeros
    Tensor view() const;
    DType dtype() const { return dtype_; }
    const std::vector<std::int64_t>& shape() const { return shape_; }
    std::int64_t count() const;
    std::size_t bytes() const;
    void* data() const { return data_.get(); }

  private:
    DType dtype_ = DType::f64;
    std::vector<std::int64_t> shape_;
    std::shared_ptr<std::byte> data_;
};

struct CaseFile {
    std::string name;  // stands for the file in messages; empty: in none
    std::map<std::string, std::string> metadata;
    std::map<std::string, OwnedTensor> tensors;

    // An absent tensor when the file has none of this name.
    Tensor view(std::string_view tensor) const;
};

// Throw CaseError, which begins with the name.
CaseFile read_case(const std::string& path);
CaseFile parse_case(const std::byte* data, std::size_t size, const std::string& name);
// As write_file of output.h: a file is whole or not there.
void write_case(const std::string& path, const CaseFile& file);

}  // namespace softdelta::io
