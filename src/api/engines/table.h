// The table of engines, and which of them computes a call.
#pragma once

#include <span>
#include <string>
#include <type_traits>

#include "api/engines/staging.h"
#include "api/overlap.h"
#include "core/error.h"
#include "engines/engine.h"
#include "softdelta/softdelta.h"

namespace softdelta::api {

// Those that compute tensors of this device, and all; from the fastest on: what a caller leaves open is decided in
// this order. Engines of other devices than the CPU are plugins, which are looked for when they are asked for.
std::span<const engines::Engine* const> engines_for(core::Device device);
std::span<const engines::Engine* const> all_engines();

// What execution.engine asks for.
struct WantedEngine {
    const engines::Engine* named = nullptr;  // null: any, in the order of the table
    bool fast = false;                       // … of those made for speed

    bool includes(const engines::Engine& engine) const {
        if (named != nullptr) return &engine == named;
        return fast ? engine.choice == engines::Choice::fast : engine.choice != engines::Choice::by_name;
    }
};

WantedEngine wanted_engine(const char* given);

// Why no engine at all computes tensors on this device, where the operand `first` lies.
std::string no_engine(const char* first, core::Device device);

// Why an engine does not compute tensors on this device; "": it does.
std::string refuse_device(const engines::Engine& engine, const char* first, core::Device device);

// Where the call's tensors lie: where its first operand does, which every call has.
template <class Inputs>
core::Device device_of(const Inputs& in) {
    return (in.*core::operands_of<Inputs>.front().tensor).device;
}

// Whether a call is one of f64: its main operands are. The reference computes such a call though nobody named it.
template <class Inputs>
bool is_f64(const Inputs& in) {
    const auto f64 = [](const core::Tensor& t) { return t.dtype == core::DType::f64; };
    if constexpr (requires { in.x; })
        return f64(in.x);
    else
        return f64(in.q) && f64(in.k) && f64(in.v);
}

// The engine that computes this call. Where a fast engine is there, a call that it refuses for one operand is
// refused: the reference takes ten times as long, and the caller would not see why. Throws core::Unsupported with the
// reason when none of those wanted does.
template <class Call>
const engines::Engine& engine_for(const WantedEngine& wanted, const Call& call,
                                  engines::Pass<Call> engines::Engine::*pass) {
    using Inputs = std::remove_cvref_t<decltype(call.in)>;
    constexpr const auto& operand = core::operands_of<Inputs>.front();  // required
    const core::Device device = device_of(call.in);
    std::string first;
    const auto candidates = wanted.named != nullptr ? std::span(&wanted.named, 1) : engines_for(device);
    for (const engines::Engine* engine : candidates) {
        if (!wanted.includes(*engine)) continue;
        const auto refusal = (engine->*pass).refusal;
        std::string reason = refuse_device(*engine, operand.name, device);
        if (wanted.named == nullptr && !reason.empty()) continue;
        if (reason.empty() && (engine->*pass).run == nullptr)
            reason = std::string("engine ") + engine->name + " has no " + engines::operation_of<Inputs>;
        if (reason.empty() && refusal != nullptr) reason = refusal(call);
        if (reason.empty()) return *engine;
        if (first.empty()) first = std::move(reason);
        const bool there = engine->available == nullptr || engine->available();
        if (wanted.named == nullptr && engine->choice == engines::Choice::fast && there && !is_f64(call.in)) break;
    }
    throw core::Unsupported(first.empty() ? no_engine(operand.name, device) : first);
}

// States, and what a layer has before and after it, may be computed where they are.
inline constexpr Operands::InPlace in_place[] = {{"final_state", "initial_state"}, {"y", "x"}, {"y", "z"}};

template <class Call>
bool is_layer_in_place(const Call& call) {
    if constexpr (requires { call.out.y; }) {
        if constexpr (requires { call.in.z; })
            if (call.out.y.data == call.in.z.data) return true;
        return call.out.y && call.out.y.data == call.in.x.data;
    }
    return false;
}

// No result shares memory with another operand.
template <class Call>
void expect_results_apart(const Call& call) {
    Operands operands;
    operands.add(call.in);
    operands.add(call.out);
    operands.writes(call.execution);
    operands.expect_apart(in_place);
}

template <class Call>
void run_pass(const WantedEngine& wanted, const Call& call, engines::Pass<Call> engines::Engine::*pass) {
    expect_results_apart(call);
    const engines::Engine& engine = engine_for(wanted, call, pass);
    if (engine.device != core::DeviceType::cpu && is_layer_in_place(call))
        throw core::Unsupported(std::string("y is x or z itself: engine ") + engine.name +
                                " needs memory of its own for it");
    const core::UseThreads threads(call.execution.parallel_for);
    if (is_staged(engine, device_of(call.in))) return run_staged(engine, call, (engine.*pass).run);
    (engine.*pass).run(call);
}

// Bytes of execution.workspace that the call needs.
template <class Call>
std::size_t workspace_of(const WantedEngine& wanted, const Call& call, engines::Pass<Call> engines::Engine::*pass) {
    const engines::Engine& engine = engine_for(wanted, call, pass);
    const auto& found = engine.*pass;
    return found.workspace == nullptr || is_staged(engine, device_of(call.in)) ? 0 : found.workspace(call);
}

// Bytes of execution.workspace that are enough for all calls within limits.
template <class Call>
std::size_t workspace_bound_of(const WantedEngine& wanted, const Call& call, engines::Pass<Call> engines::Engine::*pass,
                               const core::Limits& limits) {
    const engines::Engine& engine = engine_for(wanted, call, pass);
    const auto& found = engine.*pass;
    if (found.workspace == nullptr || is_staged(engine, device_of(call.in))) return 0;
    if (found.workspace_bound == nullptr)
        throw core::Unsupported(std::string("engine ") + engine.name + " has no bound of its workspace");
    return found.workspace_bound(call, limits);
}

// What an entry point does with a checked call, which it hands over with its engine and pass.
inline constexpr auto compute = [](const WantedEngine& wanted, const auto& call, auto pass) {
    run_pass(wanted, call, pass);
};
inline constexpr auto measure = [](const WantedEngine& wanted, const auto& call, auto pass) {
    return workspace_of(wanted, call, pass);
};

}  // namespace softdelta::api
