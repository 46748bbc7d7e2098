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
        if (ceiling < SOFTDELTA_CEILING_F32 || ceiling > SOFTDELTA_CEILING_BF16_REGISTERS)
            api::refuse("ceiling", std::to_string(ceiling), "a softdelta_ceiling");
        api::check_threads(threads);
        if (flops_per_second == nullptr) api::refuse("flops_per_second", "null", "a number to write");
        const kernels::Table& table = cpu::selected_kernels();
        using Products = kernels::Loop::Products;
        if (ceiling != SOFTDELTA_CEILING_F32 && table.multiply_add_bf16.run == nullptr)
            throw core::Unsupported(std::string("ceiling: ") + table.name + " has no products of bf16");
        *flops_per_second =
            ceiling == SOFTDELTA_CEILING_F32
                ? cpu::measure_flops(table.multiply_add_f32, threads)
                : cpu::measure_bf16(table, ceiling == SOFTDELTA_CEILING_BF16 ? Products::cached : Products::registers,
                                    threads);
    });
}

std::int32_t softdelta_loop_count(void) {
    using namespace softdelta;
    std::int32_t count = 0;
    api::guard([&] { count = static_cast<std::int32_t>(cpu::selected_kernels().loop_count); });
    return count;
}

softdelta_status softdelta_measure_loop(std::int32_t index, std::int32_t threads, softdelta_loop* loop) {
    using namespace softdelta;
    return api::guard([&] {
        const kernels::Table& table = cpu::selected_kernels();
        if (index < 0 || index >= table.loop_count)
            api::refuse("index", std::to_string(index), "0 to " + std::to_string(table.loop_count - 1));
        api::check_threads(threads);
        if (loop == nullptr) api::refuse("loop", "null", "a structure to write");
        const kernels::Loop& found = table.loops[index];
        const bool multiplies = found.products != kernels::Loop::Products::none;
        api::write_struct("loop", loop,
                          {sizeof *loop, found.name, cpu::measure_loop(found, threads),
                           multiplies ? static_cast<double>(table.product_flops) : 0});
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
