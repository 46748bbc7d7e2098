#include "io/file/case_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <new>
#include <system_error>

#include "io/file/header.h"
#include "io/file/stored_type.h"
#include "io/file/text.h"

namespace softdelta::io {
namespace {

// Copies n bytes of the file, from `offset` on.
using ReadBytes = std::function<void(std::uint64_t offset, void* to, std::size_t n)>;

constexpr std::uint64_t length_bytes = 8;

std::uint64_t read_header_length(std::uint64_t file_bytes, const ReadBytes& read) {
    if (file_bytes < length_bytes) fail("not a safetensors file: " + std::to_string(file_bytes) + " bytes are too few");
    unsigned char little_endian[length_bytes];
    read(0, little_endian, length_bytes);
    std::uint64_t length = 0;
    for (std::size_t i = length_bytes; i-- > 0;) length = length << 8 | little_endian[i];
    const std::uint64_t most = std::min(file_bytes - length_bytes, max_header_bytes);
    if (length > most)
        fail("not a safetensors file: a header of " + std::to_string(length) + " bytes, at most " +
             std::to_string(most) + " are possible");
    return length;
}

void check_bool(const OwnedTensor& tensor, const std::string& name) {
    const auto* bytes = static_cast<const unsigned char*>(tensor.data());
    const auto* end = bytes + tensor.bytes();
    const auto* bad = std::find_if(bytes, end, [](unsigned char byte) { return byte > 1; });
    if (bad != end)
        fail("tensor " + quote(name) + ": element " + std::to_string(bad - bytes) + " is " + std::to_string(*bad) +
             ", expected 0 or 1");
}

CaseFile read_checked(std::uint64_t file_bytes, const ReadBytes& read) {
    std::string json(read_header_length(file_bytes, read), '\0');
    read(length_bytes, json.data(), json.size());
    const std::uint64_t data_begin = length_bytes + json.size();
    Header header = parse_header(json, file_bytes - data_begin);

    CaseFile file;
    file.metadata = std::move(header.metadata);
    for (const TensorEntry& entry : header.tensors) {
        OwnedTensor tensor(entry.dtype, entry.shape);
        read(data_begin + entry.begin, tensor.data(), tensor.bytes());
        if (entry.dtype == DType::boolean) check_bool(tensor, entry.name);
        file.tensors.emplace(entry.name, std::move(tensor));
    }
    return file;
}

}  // namespace

OwnedTensor::OwnedTensor(DType dtype, std::vector<std::int64_t> shape) : dtype_(dtype), shape_(std::move(shape)) {
    constexpr std::size_t alignment = 64;
    const std::optional<std::size_t> size = dense_bytes(dtype_, shape_);
    if (!size || *size > PTRDIFF_MAX - alignment)
        throw CaseError("a tensor of shape " + shape_text(shape_) + " is too large");
    const std::size_t rounded = std::max(alignment, (*size + alignment - 1) / alignment * alignment);
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, rounded)), std::free);
    if (!data_) throw std::bad_alloc();
    std::memset(data_.get(), 0, *size);
}

Tensor OwnedTensor::view() const {
    return shape_.empty() ? Tensor{} : Tensor(data_.get(), dtype_, shape_);
}

std::int64_t OwnedTensor::count() const {
    return static_cast<std::int64_t>(bytes() / stored_type(dtype_).bytes);
}

std::size_t OwnedTensor::bytes() const {
    return shape_.empty() ? 0 : dense_bytes(dtype_, shape_).value();
}

Tensor CaseFile::view(std::string_view tensor) const {
    const auto found = tensors.find(std::string(tensor));
    return found == tensors.end() ? Tensor{} : found->second.view();
}

CaseFile read_case(const std::string& path) try {
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    if (!std::filesystem::exists(status)) fail("cannot be read: " + error.message());
    if (!std::filesystem::is_regular_file(status)) fail("not a regular file");
    std::ifstream stream(path, std::ios::binary);
    if (!stream) fail("cannot be read: " + std::generic_category().message(errno));
    const ReadBytes read = [&](std::uint64_t offset, void* to, std::size_t n) {
        stream.seekg(static_cast<std::streamoff>(offset));
        if (!stream.read(static_cast<char*>(to), static_cast<std::streamsize>(n))) fail("cannot be read to its end");
    };
    CaseFile file = read_checked(std::filesystem::file_size(path), read);
    file.name = path;
    return file;
} catch (const CaseError& error) {
    fail(path, error.what());
} catch (const std::bad_alloc&) {
    fail(path, "does not fit into memory");
}

CaseFile parse_case(const std::byte* data, std::size_t size, const std::string& name) try {
    const ReadBytes read = [data](std::uint64_t offset, void* to, std::size_t n) {
        if (n > 0) std::memcpy(to, data + offset, n);
    };
    CaseFile file = read_checked(size, read);
    file.name = name;
    return file;
} catch (const CaseError& error) {
    fail(name, error.what());
}

}  // namespace softdelta::io
