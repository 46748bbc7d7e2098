// One entry of a file's metadata, and its strict readings: the whole text, without blanks.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "io/file/text.h"

namespace softdelta::io {

struct Entry {
    const std::string& key;
    const std::string& text;

    [[noreturn]] void refuse(const std::string& expected) const {
        fail("metadata " + key + ": expected " + expected + ", found " + quote(text));
    }

    template <class Choice>
    Choice choice(const std::string& expected,
                  std::initializer_list<std::pair<std::string_view, Choice>> choices) const {
        for (const auto& [word, value] : choices)
            if (text == word) return value;
        refuse(expected);
    }

    bool truth() const { return choice<bool>("true or false", {{"true", true}, {"false", false}}); }

    template <class Number>
    bool parse(Number& value) const {
        const char* end = text.data() + text.size();
        const auto [stop, error] = std::from_chars(text.data(), end, value);
        return error == std::errc() && stop == end;
    }

    double number() const {
        double value = 0;
        if (!parse(value) || !std::isfinite(value)) refuse("a finite number");
        return value;
    }

    std::int64_t integer(std::int64_t least) const {
        std::int64_t value = 0;
        if (!parse(value) || value < least) refuse("a whole number from " + std::to_string(least));
        return value;
    }
};

}  // namespace softdelta::io
