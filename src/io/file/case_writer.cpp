// Writes case files: tensors with wide elements first, so that all data are aligned.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "io/file/case_file.h"
#include "io/file/header.h"
#include "io/file/output.h"
#include "io/file/stored_type.h"
#include "io/file/text.h"

namespace softdelta::io {
namespace {

using NamedTensor = std::pair<const std::string, OwnedTensor>;

std::vector<const NamedTensor*> order_by_alignment(const CaseFile& file) {
    std::vector<const NamedTensor*> order;
    for (const NamedTensor& tensor : file.tensors) order.push_back(&tensor);
    std::stable_sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
        return stored_type(a->second.dtype()).bytes > stored_type(b->second.dtype()).bytes;
    });
    return order;
}

// JSON, padded with blanks to a multiple of 8 bytes.
std::string header_text(const CaseFile& file, const std::vector<const NamedTensor*>& order, const std::string& path) {
    nlohmann::ordered_json header = nlohmann::ordered_json::object();
    if (!file.metadata.empty()) header[std::string(metadata_key)] = file.metadata;
    std::size_t end = 0;
    for (const NamedTensor* named : order) {
        const auto& [name, tensor] = *named;
        if (name == metadata_key || !tensor.view())
            fail(path, "tensor " + quote(name) + " cannot be stored: it has no dimensions or a reserved name");
        const std::size_t begin = end;
        end += tensor.bytes();
        header[name] = {
            {"dtype", stored_type(tensor.dtype()).name}, {"shape", tensor.shape()}, {"data_offsets", {begin, end}}};
    }
    std::string text;
    try {
        text = header.dump();
    } catch (const nlohmann::json::type_error&) {
        fail(path, "names and metadata to be stored must be UTF-8");
    }
    text.resize((text.size() + 7) / 8 * 8, ' ');
    return text;
}

}  // namespace

void write_case(const std::string& path, const CaseFile& file) {
    const std::vector<const NamedTensor*> order = order_by_alignment(file);
    const std::string header = header_text(file, order, path);
    write_file(path, [&](const WriteBytes& write) {
        unsigned char little_endian[8];
        for (std::size_t i = 0; i < 8; ++i) little_endian[i] = static_cast<unsigned char>(header.size() >> (8 * i));
        write(little_endian, sizeof little_endian);
        write(header.data(), header.size());
        for (const NamedTensor* named : order) write(named->second.data(), named->second.bytes());
    });
}

}  // namespace softdelta::io
