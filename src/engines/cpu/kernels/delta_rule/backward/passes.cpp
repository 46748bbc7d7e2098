// Both backward passes as one source: most of their code is the same, and compiled once. Forward it is not so: each
// pass is a little faster where it alone has that code, and the compiler sees that.
// NOLINTBEGIN(bugprone-suspicious-include)
#include "engines/cpu/kernels/delta_rule/backward/backward.cpp"
#include "engines/cpu/kernels/delta_rule/backward/split.cpp"
// NOLINTEND(bugprone-suspicious-include)
