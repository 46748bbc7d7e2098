// The delta rules as data, and how gates and β may be given.
#pragma once

#include <array>
#include <string_view>

namespace softdelta::core {

enum class Gate { none, scalar, channel };
enum class Erase { from_decayed_state, from_previous_state, nothing };

struct Rule {
    std::string_view name;
    Gate gate;
    Erase erase;
    bool own_p;          // erases along p instead of k
    bool gate_optional;  // may be called without g

    constexpr bool erases() const { return erase != Erase::nothing; }
    constexpr bool has_channel_gate() const { return gate == Gate::channel; }
    // Whether tokens do nothing to the state that enters them but multiply it by a number.
    constexpr bool maps_by_number() const { return !erases() && !has_channel_gate(); }
};

inline constexpr std::array<Rule, 9> rules{{
    {"delta_rule", Gate::none, Erase::from_decayed_state, false, true},
    {"gated_delta_rule", Gate::scalar, Erase::from_decayed_state, false, false},
    {"kda", Gate::channel, Erase::from_decayed_state, false, false},
    {"comba", Gate::scalar, Erase::from_previous_state, true, false},
    {"simple_gla", Gate::scalar, Erase::nothing, false, true},
    {"gla", Gate::channel, Erase::nothing, false, false},
    {"gdn2", Gate::channel, Erase::from_decayed_state, true, false},
    {"gated_delta_product", Gate::scalar, Erase::from_decayed_state, false, true},
    {"dplr", Gate::channel, Erase::from_previous_state, true, false},
}};

enum class RawGate {
    none,
    softplus,
    lower_bound
};  // g = −e^A_log·softplus(x + gate bias); g = b·σ(e^A_log·(x + gate bias))
enum class RawBeta { none, logits, doubled_logits };  // β = σ(x); β = 2σ(x)

}  // namespace softdelta::core
