#include "io/file/text.h"

#include <array>
#include <utility>

namespace softdelta::io {
namespace {

// Characters that show nothing, or steer what is shown: controls, directions of writing, separators of lines, and what
// is no character. Ascending.
constexpr std::array<std::pair<std::uint32_t, std::uint32_t>, 16> hidden{{
    {0x0000, 0x001f},
    {0x007f, 0x009f},
    {0x00ad, 0x00ad},
    {0x034f, 0x034f},
    {0x061c, 0x061c},
    {0x115f, 0x1160},
    {0x17b4, 0x17b5},
    {0x180b, 0x180f},
    {0x200b, 0x200f},
    {0x2028, 0x202f},
    {0x205f, 0x206f},
    {0x3164, 0x3164},
    {0xd800, 0xf8ff},  // surrogates, private use
    {0xfe00, 0xfe0f},
    {0xfeff, 0xfeff},
    {0xfff0, 0xfffb},
}};

bool is_hidden(std::uint32_t code) {
    for (const auto& [first, last] : hidden)
        if (first <= code && code <= last) return true;
    return code >= 0xe0000;
}

// Bytes of the character that begins there, and its number; 1 byte and a hidden number of what is no UTF-8.
std::pair<std::size_t, std::uint32_t> character(std::string_view s) {
    const auto byte = [s](std::size_t i) { return static_cast<std::uint32_t>(static_cast<unsigned char>(s[i])); };
    const std::uint32_t first = byte(0);
    if (first < 0x80) return {1, first};
    const std::size_t n = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4 || s.size() < n) return {1, 0};
    std::uint32_t code = first & (0x7fu >> n);
    for (std::size_t i = 1; i < n; ++i) {
        if ((byte(i) & 0xc0) != 0x80) return {1, 0};
        code = code << 6 | (byte(i) & 0x3f);
    }
    constexpr std::uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (code < least[n]) return {1, 0};
    return {n, code};
}

std::string hexadecimal(unsigned char byte) {
    constexpr char digits[] = "0123456789abcdef";
    return {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
}

}  // namespace

std::string printable(std::string_view s) {
    std::string text;
    while (!s.empty()) {
        const auto [bytes, code] = character(s);
        const std::string_view c = s.substr(0, bytes);
        if (is_hidden(code))
            for (const char b : c) text += hexadecimal(static_cast<unsigned char>(b));
        else
            text += c;
        s.remove_prefix(bytes);
    }
    return text;
}

std::string quote(std::string_view s) {
    constexpr std::size_t longest = 60;
    std::string text = "\"";
    for (const char c : s.substr(0, longest)) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte < 0x20 || byte >= 0x7f)
            text += hexadecimal(byte);
        else if (c == '"' || c == '\\')
            text += {'\\', c};
        else
            text += c;
    }
    return text + (s.size() > longest ? "\"..." : "\"");
}

std::string shape_text(std::span<const std::int64_t> shape) {
    std::string text = "[";
    for (const std::int64_t size : shape) {
        if (text.size() > 1) text += ", ";
        text += std::to_string(size);
    }
    return text + "]";
}

void fail(const std::string& fault) {
    throw CaseError(fault);
}

void fail(const std::string& file, const std::string& fault) {
    throw CaseError(file.empty() ? fault : printable(file) + ": " + fault);
}

}  // namespace softdelta::io
