// The border of the C interface: exceptions stop here and become a status and this thread's message.
#pragma once

#include <exception>
#include <new>

#include "core/error.h"
#include "core/floating_point.h"
#include "softdelta/softdelta.h"

namespace softdelta::api {

softdelta_status fail(softdelta_status status, const char* message) noexcept;
void clear_error() noexcept;

template <class Call>
softdelta_status guard(Call&& call) noexcept {
    try {
        clear_error();
        const core::DefaultFloatingPoint floating_point;
        call();
        return SOFTDELTA_OK;
    } catch (const core::InvalidArgument& e) {
        return fail(SOFTDELTA_INVALID_ARGUMENT, e.what());
    } catch (const core::Unsupported& e) {
        return fail(SOFTDELTA_UNSUPPORTED, e.what());
    } catch (const std::bad_alloc&) {
        return fail(SOFTDELTA_OUT_OF_MEMORY, "out of memory");
    } catch (const std::exception& e) {
        return fail(SOFTDELTA_INTERNAL, e.what());
    } catch (...) {
        return fail(SOFTDELTA_INTERNAL, "unknown error");
    }
}

}  // namespace softdelta::api
