// Included by a program's test, it gives short calls a team of threads too, before the first call asks for the limit.
#pragma once

#include <cstdlib>

namespace softdelta::test {

inline const int short_calls_have_teams = setenv("SOFTDELTA_SHORT_CALL_BYTES", "0", 1);

}  // namespace softdelta::test
