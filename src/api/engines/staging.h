// Calls on tensors of the host by an engine of another device, which the caller has named: operands are copied to the
// device, results back, and the call returns when they are there.
//
//   host     q ──┐                      ┌──▶ o
//   device       └─▶ q'  engine.run  o' ─┘
#pragma once

#include <cstdint>
#include <vector>

#include "core/operands.h"
#include "core/tensor.h"
#include "engines/engine.h"

namespace softdelta::api {

// Whether tensors of this device reach the engine as copies.
inline bool is_staged(const engines::Engine& engine, core::Device device) {
    return device.is_cpu() && engine.memory != nullptr;
}

// Copies of the operands of one call. Operands that share memory share it in the copy, too: a state that is updated in
// place has one. What lies between the rows of a result keeps its bytes.
class Staging {
  public:
    explicit Staging(const engines::Engine& engine) : memory_(*engine.memory), device_{engine.device, 0} {}
    ~Staging();
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    // First all operands, then the copy to the device, then each operand's view there. Lengths stay on the host, tables
    // do not.
    template <class Struct>
    void add(const Struct& tensors) {
        core::for_each_given(tensors, [&](const core::Operand<Struct>& operand, const core::Tensor& t) {
            if (is_copied(operand.kind, t)) add(t, operand.written);
        });
    }
    void to_device();
    template <class Struct>
    Struct on_device(Struct tensors) const {
        for (const core::Operand<Struct>& operand : core::operands_of<Struct>)
            if (is_copied(operand.kind, tensors.*operand.tensor)) move(tensors.*operand.tensor);
        return tensors;
    }
    void to_host() const;

  private:
    struct Block {
        std::uintptr_t first, end;  // bytes of the host
        bool written;
        void* device = nullptr;
    };

    static bool is_copied(core::Kind kind, const core::Tensor& t) { return kind != core::Kind::integer || t.rank > 1; }
    void add(const core::Tensor& t, bool written);
    void move(core::Tensor& t) const;

    const engines::DeviceMemory& memory_;
    core::Device device_;
    std::vector<Block> blocks_;  // apart, and in order once they are on the device
};

template <class Call>
void run_staged(const engines::Engine& engine, const Call& call, void (*run)(const Call& call)) {
    Staging staging(engine);
    staging.add(call.in);
    staging.add(call.out);
    staging.to_device();
    const auto in = staging.on_device(call.in);
    const auto out = staging.on_device(call.out);
    core::Execution execution = call.execution;
    execution.workspace = nullptr;  // memory of the host
    execution.workspace_size = 0;
    run({in, call.options, execution, out});
    staging.to_host();
}

}  // namespace softdelta::api
