// This machine: instruction sets, memory that is kept, and what it can do at most.
#include "api/check.h"
#include "api/error.h"
#include "engines/cpu/machine/isa.h"
#include "engines/cpu/machine/kept_memory.h"
#include "engines/cpu/machine/measure.h"
#include "softdelta/judge.h"

namespace softdelta::api {

namespace {

void check_threads(std::int32_t threads) {
    if (threads < 0) refuse("threads", std::to_string(threads), "0 or more");
}

}  // namespace

}  // namespace softdelta::api

std::int32_t softdelta_isa_level_count(void) {
    using namespace softdelta;
    std::int32_t count = 0;
    api::guard([&] { count = static_cast<std::int32_t>(cpu::isa_levels().size()); });
    return count;
}

softdelta_status softdelta_select_isa_level(const char* name) {
    using namespace softdelta;
    return api::guard([&] { cpu::select_level(name); });
}

softdelta_status softdelta_get_isa_level(std::int32_t index, softdelta_isa_level* level) {
    using namespace softdelta;
    return api::guard([&] {
        const auto levels = cpu::isa_levels();
        const auto count = static_cast<std::int32_t>(levels.size());
        if (index < 0 || index >= count)
            api::refuse("index", std::to_string(index), "0 to " + std::to_string(count - 1));
        const cpu::Level& found = levels[static_cast<std::size_t>(index)];
        const cpu::Level* selected = cpu::selected_level();
        api::write_struct("level", level,
                          {sizeof *level, found.name, found.table != nullptr, found.available(), selected == &found,
                           found.table != nullptr && cpu::use_bf16_products({}, *found.table)});
    });
}

softdelta_status softdelta_release_memory(void) {
    using namespace softdelta;
    return api::guard([] { cpu::release_kept_memory(); });
}

softdelta_status softdelta_measure_ceiling(std::int32_t ceiling, std::int32_t threads, double* flops_per_second) {
    using namespace softdelta;
    return api::guard([&] {
        if (ceiling != SOFTDELTA_CEILING_F32 && ceiling != SOFTDELTA_CEILING_BF16)
            api::refuse("ceiling", std::to_string(ceiling), "a softdelta_ceiling");
        api::check_threads(threads);
        if (flops_per_second == nullptr) api::refuse("flops_per_second", "null", "a number to write");
        const kernels::Table& table = cpu::selected_kernels();
        const kernels::Ceiling& loop =
            ceiling == SOFTDELTA_CEILING_F32 ? table.multiply_add_f32 : table.multiply_add_bf16;
        if (loop.run == nullptr)
            throw core::Unsupported(std::string("ceiling: ") + table.name + " has no products of bf16");
        *flops_per_second = cpu::measure_flops(loop, threads);
    });
}

softdelta_status softdelta_measure_bandwidth(std::int32_t threads, double* bytes_per_second) {
    using namespace softdelta;
    return api::guard([&] {
        api::check_threads(threads);
        if (bytes_per_second == nullptr) api::refuse("bytes_per_second", "null", "a number to write");
        *bytes_per_second = cpu::measure_bandwidth(cpu::selected_kernels(), threads);
    });
}
