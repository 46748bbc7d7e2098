// Names that kernels give to what has another name in a case file.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace softdelta::io {

// ": its name here is …", of the first name that the call knows; or nothing.
template <class Knows>
std::string hint_of_name(std::string_view name, const Knows& knows) {
    constexpr std::pair<std::string_view, std::string_view> others[] = {{"h0", "initial_state"},
                                                                        {"dh0", "dinitial_state"},
                                                                        {"ht", "final_state"},
                                                                        {"dht", "dfinal_state"},
                                                                        {"b", "beta"},
                                                                        {"b", "bias"},
                                                                        {"db", "dbeta"},
                                                                        {"db", "dbias"},
                                                                        {"out", "o"},
                                                                        {"dout", "do"},
                                                                        {"softmax_lse", "lse"}};
    for (const auto& [other, ours] : others)
        if (other == name && knows(ours)) return ": its name here is " + std::string(ours);
    return "";
}

}  // namespace softdelta::io
