// Scratch memory that is kept between calls (workspace.cpp).
#pragma once

namespace softdelta::cpu {

// It goes back to the system.
void release_kept_memory();

}  // namespace softdelta::cpu
