// Keys and values of new tokens written to a cache, and made numbers of 8 or 4 bits where it has these.
#pragma once

#include "core/cache.h"

namespace softdelta::cache {

// Whether each row of keys, of values, has scales of its own: they are written, and the largest number of a row or
// block becomes 127 of i8, −8 of 4 bits, 448 of f8. Others are read, and numbers beyond them become the largest that
// there is.
struct OwnScales {
    bool k = false, v = false;
};

void append(const core::CacheAppendInputs& in, const OwnScales& own, int threads, const core::CacheAppendOutputs& out);

}  // namespace softdelta::cache
