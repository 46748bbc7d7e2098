// Rules by their facts, and every rule by its number and by its name.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/rule.h"

namespace softdelta::core {

// Every combination of facts is a rule, too: a caller gives them himself. Its number is not that of a row, but says
// them: 256 + gate + 4·erase + 16·own_p. Its name is "rule:", the gate, what it erases from, and along what.
inline constexpr std::array<Rule, 15> rules_of_facts{{
    {"rule:none:nothing", Gate::none, Erase::nothing, false, true},
    {"rule:none:decayed:k", Gate::none, Erase::from_decayed_state, false, true},
    {"rule:none:decayed:p", Gate::none, Erase::from_decayed_state, true, true},
    {"rule:none:previous:k", Gate::none, Erase::from_previous_state, false, true},
    {"rule:none:previous:p", Gate::none, Erase::from_previous_state, true, true},
    {"rule:head:nothing", Gate::scalar, Erase::nothing, false, true},
    {"rule:head:decayed:k", Gate::scalar, Erase::from_decayed_state, false, false},
    {"rule:head:decayed:p", Gate::scalar, Erase::from_decayed_state, true, false},
    {"rule:head:previous:k", Gate::scalar, Erase::from_previous_state, false, false},
    {"rule:head:previous:p", Gate::scalar, Erase::from_previous_state, true, false},
    {"rule:channel:nothing", Gate::channel, Erase::nothing, false, false},
    {"rule:channel:decayed:k", Gate::channel, Erase::from_decayed_state, false, false},
    {"rule:channel:decayed:p", Gate::channel, Erase::from_decayed_state, true, false},
    {"rule:channel:previous:k", Gate::channel, Erase::from_previous_state, false, false},
    {"rule:channel:previous:p", Gate::channel, Erase::from_previous_state, true, false},
}};

constexpr std::int32_t number_of_facts(Gate gate, Erase erase, bool own_p) {
    return 256 + static_cast<int>(gate) + 4 * static_cast<int>(erase) + 16 * static_cast<int>(own_p);
}

// What visit(rule, number) is true of first, of the table's rows and then of facts; null when of none.
template <class Visit>
constexpr const Rule* find_rule_if(const Visit& visit) {
    for (std::size_t i = 0; i < rules.size(); ++i)
        if (visit(rules[i], static_cast<std::int32_t>(i))) return &rules[i];
    for (const Rule& rule : rules_of_facts)
        if (visit(rule, number_of_facts(rule.gate, rule.erase, rule.own_p))) return &rule;
    return nullptr;
}
constexpr const Rule* find_rule(std::int32_t number) {
    return find_rule_if([=](const Rule&, std::int32_t of) { return of == number; });
}
constexpr const Rule* find_rule(std::string_view name) {
    return find_rule_if([=](const Rule& rule, std::int32_t) { return rule.name == name; });
}
constexpr std::int32_t number_of(const Rule& rule) {
    std::int32_t number = -1;
    find_rule_if([&](const Rule& other, std::int32_t of) {
        const bool found = other.name == rule.name;
        if (found) number = of;
        return found;
    });
    return number;
}

}  // namespace softdelta::core
