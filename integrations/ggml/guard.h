// What ggml calls must not throw: ggml knows no exceptions, and nobody above it expects one.
#pragma once

#include <exception>
#include <new>

#include "ggml-impl.h"

namespace softdelta_ggml {

// What f returns. If it throws: `failed`, and a line that says who threw what.
template <class Result, class F>
Result guarded(const char* who, Result failed, const F& f) noexcept {
    try {
        return f();
    } catch (const std::exception& e) {
        GGML_LOG_ERROR("softdelta: %s: %s\n", who, e.what());
    } catch (...) {
        GGML_LOG_ERROR("softdelta: %s: an unknown exception\n", who);
    }
    return failed;
}

// The same for what computes.
template <class F>
ggml_status guarded_status(const char* who, const F& f) noexcept {
    return guarded(who, GGML_STATUS_FAILED, [&] {
        try {
            return f();
        } catch (const std::bad_alloc&) {
            GGML_LOG_ERROR("softdelta: %s: out of memory\n", who);
            return GGML_STATUS_ALLOC_FAILED;
        }
    });
}

}  // namespace softdelta_ggml
