#include "api/engines/table.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "api/check.h"
#include "api/engines/plugin.h"
#include "api/error.h"
#include "core/once.h"
#include "engines/cpu/engine.h"
#include "engines/reference/reference.h"
#include "engines/stages/stages.h"

namespace softdelta::api {

namespace {

constexpr std::array<const engines::Engine*, 4> built_in = {&cpu::engine, &reference::engine, &stages::engine_f64,
                                                            &stages::engine_f32};

struct Table {
    std::array<const engines::Engine*, built_in.size() + 1> rows{};
    std::size_t count = built_in.size();

    Table() {
        std::copy(built_in.begin(), built_in.end(), rows.begin());
        if (const engines::Engine* cuda = cuda_plugin().engine) rows[count++] = cuda;
    }
};

}  // namespace

std::span<const engines::Engine* const> all_engines() {
    static constinit core::Once<Table> once;
    const Table& table = once.get([] { return Table(); });
    return {table.rows.data(), table.count};
}

std::span<const engines::Engine* const> engines_for(core::Device device) {
    return device.is_cpu() ? std::span<const engines::Engine* const>(built_in) : all_engines();
}

std::string no_engine(const char* first, core::Device device) {
    return std::string(first) + " lies on " + device_text(device) +
           "; the CUDA engine is not here: " + cuda_plugin().reason;
}

WantedEngine wanted_engine(const char* given) {
    const std::string_view name = given != nullptr ? given : "automatic";
    if (name == "automatic") return {};
    if (name == "fast") return {.fast = true};
    for (const engines::Engine* engine : built_in)
        if (name == engine->name) return {.named = engine};
    std::string names = "automatic, fast";
    for (const engines::Engine* engine : all_engines()) {
        if (name == engine->name) return {.named = engine};
        names.append(", ").append(engine->name);
    }
    refuse("execution.engine", "'" + core::printable(name) + "'", "one of " + names);
}

std::string refuse_device(const engines::Engine& engine, const char* first, core::Device device) {
    if (engine.device == device.type || is_staged(engine, device)) return "";
    return std::string(first) + " lies on " + device_text(device) + "; engine " + engine.name +
           " computes tensors on " + device_text({engine.device, 0});
}

}  // namespace softdelta::api

std::int32_t softdelta_engine_count(void) {
    using namespace softdelta;
    std::int32_t count = 0;
    api::guard([&] { count = static_cast<std::int32_t>(api::all_engines().size()); });
    return count;
}

softdelta_status softdelta_get_engine(std::int32_t index, softdelta_engine_info* info) {
    using namespace softdelta;
    return api::guard([&] {
        const auto all = api::all_engines();
        const auto count = static_cast<std::int32_t>(all.size());
        if (index < 0 || index >= count)
            api::refuse("index", std::to_string(index), "0 to " + std::to_string(count - 1));
        const engines::Engine& engine = *all[static_cast<std::size_t>(index)];
        api::write_struct(
            "info", info,
            {sizeof *info, engine.name, engine.description, static_cast<std::int32_t>(engine.device),
             engine.choice == engines::Choice::fast, engine.available == nullptr || engine.available(), 0});
    });
}
