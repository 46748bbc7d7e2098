// What the inside throws. The C interface turns it into a status code and a message, C++ into std::invalid_argument.
#pragma once

#include <stdexcept>
#include <string>

namespace softdelta::core {

// An argument is wrong: the message names it, what was expected and what was given.
struct InvalidArgument : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// The call is legal but this engine, build or machine cannot do it.
struct Unsupported : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace softdelta::core
