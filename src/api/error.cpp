#include "api/error.h"

#include <cstring>

namespace {

constexpr std::size_t capacity = 1024;
thread_local char message[capacity];  // fixed, so that reporting an error cannot itself run out of memory

}  // namespace

namespace softdelta::api {

softdelta_status fail(softdelta_status status, const char* text) noexcept {
    std::strncpy(message, text, capacity - 1);
    return status;
}

void clear_error() noexcept {
    message[0] = '\0';
}

}  // namespace softdelta::api

const char* softdelta_last_error(void) {
    return message;
}

const char* softdelta_version(void) {
    return SOFTDELTA_VERSION;
}
