#include "io/file/header.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "io/file/stored_type.h"
#include "io/file/text.h"

namespace softdelta::io {
namespace {

using nlohmann::json;

// U8 is how bool is stored by libraries without a bool type; in a mask it is one. Numbers of 8 bits or fewer are keys
// and values.
std::optional<DType> dtype_of(std::string_view stored, std::string_view tensor) {
    if (stored == "U8" && tensor == "mask") return DType::boolean;
    const bool small = tensor == "k" || tensor == "v";
    for (const StoredType& type : stored_types)
        if (type.name == stored && (small || type.dtype < DType::i8)) return type.dtype;
    return std::nullopt;
}

// Receives the events of nlohmann's parser. A document tree would merge duplicate names and nest without limit; here
// the parser is always in one of few places, and whatever does not belong there ends the reading.
class HeaderReader {
  public:
    Header take() { return std::move(header_); }

    bool null() { return refuse("null"); }
    bool boolean(bool) { return refuse("a boolean"); }
    bool number_integer(json::number_integer_t) { return refuse("a negative number"); }
    bool number_float(json::number_float_t, const std::string&) { return refuse("a fraction or too large a number"); }
    bool binary(json::binary_t&) { return refuse("binary data"); }

    bool number_unsigned(json::number_unsigned_t number) {
        if (place_ != Place::numbers) return refuse("a number");
        numbers_.push_back(number);
        const std::size_t most = key_ == "shape" ? Tensor::max_rank : 2;
        if (numbers_.size() > most) fault(key_ + ": more than " + std::to_string(most) + " numbers");
        return true;
    }

    bool string(std::string& value) {
        if (place_ == Place::metadata)
            header_.metadata[key_] = value;
        else if (place_ == Place::tensor && key_ == "dtype")
            dtype_ = value;
        else
            return refuse("a string");
        return true;
    }

    bool start_object(std::size_t) {
        if (place_ == Place::outside)
            place_ = Place::names;
        else if (place_ == Place::names)
            place_ = name_ == metadata_key ? Place::metadata : Place::tensor;
        else
            return refuse("an object");
        keys_.clear();
        return true;
    }

    bool key(std::string& key) {
        if (place_ == Place::names) {
            name_ = key;
            if (!names_.insert(key).second) fault("appears twice");
            return true;
        }
        key_ = key;
        if (!keys_.insert(key).second) fault(quote(key) + " appears twice");
        if (place_ == Place::tensor && key != "dtype" && key != "shape" && key != "data_offsets")
            fault("unknown key " + quote(key));
        return true;
    }

    bool end_object() {
        if (place_ == Place::tensor) finish_tensor();
        place_ = place_ == Place::names ? Place::outside : Place::names;
        return true;
    }

    bool start_array(std::size_t) {
        if (place_ != Place::tensor || key_ == "dtype") return refuse("an array");
        place_ = Place::numbers;
        numbers_.clear();
        return true;
    }

    bool end_array() {
        (key_ == "shape" ? shape_ : offsets_) = numbers_;
        place_ = Place::tensor;
        return true;
    }

    bool parse_error(std::size_t position, const std::string&, const json::exception&) {
        fail("the header is not valid JSON at its byte " + std::to_string(position));
    }

  private:
    enum class Place { outside, names, metadata, tensor, numbers };

    [[noreturn]] void fault(const std::string& text) const {
        fail((name_ == metadata_key ? name_ : "tensor " + quote(name_)) + ": " + text);
    }

    bool refuse(const std::string& found) const {
        if (place_ == Place::outside) fail("the header is not a JSON object but " + found);
        if (place_ == Place::names) fault("expected an object, found " + found);
        if (place_ == Place::metadata) fault(quote(key_) + ": expected a string, found " + found);
        if (place_ == Place::numbers) fault(key_ + ": expected whole numbers from 0, found " + found);
        fault(key_ + ": expected " + (key_ == "dtype" ? "a string" : "an array") + ", found " + found);
    }

    void finish_tensor() {
        for (const char* needed : {"dtype", "shape", "data_offsets"})
            if (keys_.count(needed) == 0) fault(std::string(needed) + " is missing");
        const std::optional<DType> dtype = dtype_of(dtype_, name_);
        if (!dtype)
            fault("type " + quote(dtype_) + " is not supported; expected F64, F32, BF16, F16, BOOL, I32 or I64");
        if (shape_.empty()) fault("no dimensions, expected 1 to " + std::to_string(Tensor::max_rank));
        if (offsets_.size() != 2) fault("data_offsets: expected 2 numbers");
        TensorEntry entry{name_, *dtype, {shape_.begin(), shape_.end()}, offsets_[0], offsets_[1]};
        const std::optional<std::size_t> bytes = dense_bytes(entry.dtype, entry.shape);
        if (!bytes) fault("the shape is too large");
        if (entry.end < entry.begin) fault("data_offsets: the end lies before the begin");
        if (entry.end - entry.begin != *bytes)
            fault("data_offsets span " + std::to_string(entry.end - entry.begin) + " bytes, but type and shape " +
                  shape_text(entry.shape) + " need " + std::to_string(*bytes));
        header_.tensors.push_back(std::move(entry));
    }

    Header header_;
    Place place_ = Place::outside;
    std::set<std::string> names_;  // of tensors, and __metadata__
    std::set<std::string> keys_;   // of the innermost object
    std::string name_, key_, dtype_;
    std::vector<std::uint64_t> shape_, offsets_, numbers_;
};

// The data must be covered once and without a gap, as the format demands.
void check_layout(const Header& header, std::uint64_t data_bytes) {
    std::uint64_t end = 0;
    for (const TensorEntry& t : header.tensors) {
        if (t.end > data_bytes)
            fail("tensor " + quote(t.name) + ": data end at byte " + std::to_string(t.end) + ", but the file holds " +
                 std::to_string(data_bytes));
        if (t.begin < end) fail("tensor " + quote(t.name) + ": data overlap those of another tensor");
        if (t.begin > end)
            fail("tensor " + quote(t.name) + ": " + std::to_string(t.begin - end) +
                 " bytes before its data belong to no tensor");
        end = t.end;
    }
    if (end != data_bytes) fail(std::to_string(data_bytes - end) + " bytes at the end belong to no tensor");
}

}  // namespace

Header parse_header(std::string_view text, std::uint64_t data_bytes) {
    HeaderReader reader;
    json::sax_parse(text.begin(), text.end(), &reader);
    Header header = reader.take();
    const auto before = [](const TensorEntry& a, const TensorEntry& b) {
        return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
    };
    std::sort(header.tensors.begin(), header.tensors.end(), before);
    check_layout(header, data_bytes);
    return header;
}

}  // namespace softdelta::io
