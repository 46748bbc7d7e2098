#include "log.h"

#include <cstdio>

#include "operations/operations.h"

namespace softdelta_ggml {

void Log::add(const ggml_tensor* node, bool taken, Clock::time_point start) {
    if (level == LogLevel::off) return;
    Row& row = rows[ggml_op_desc(node)];
    ++row.calls;
    row.taken += taken ? 1 : 0;
    row.seconds += std::chrono::duration<double>(Clock::now() - start).count();
}

void Log::count(const ggml_tensor* node) {
    if (level != LogLevel::off && operation_of(node) != nullptr) ++rows[ggml_op_desc(node)].calls;
}

void Log::print() const {
    for (const auto& [name, row] : rows)
        std::fprintf(stderr, "softdelta: %s: %lld of %lld calls, %.6f s\n", name.c_str(),
                     static_cast<long long>(row.taken), static_cast<long long>(row.calls), row.seconds);
}

}  // namespace softdelta_ggml
