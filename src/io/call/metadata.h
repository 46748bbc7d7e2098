// Metadata of a case file: strings that become options.
#pragma once

#include "io/call/call.h"

namespace softdelta::io {

// Fills the options of a call whose operation is known. Throws CaseError; unknown keys become warnings.
void read_options(const CaseFile& file, Call& call);

}  // namespace softdelta::io
