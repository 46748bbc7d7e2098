// Keys and values of 8 or 4 bits and their scales: the shapes that core/quantised.h lists, checked and made into one.
#pragma once

#include "core/attention.h"

namespace softdelta::api {

// Before anything else is read of k and v: blocks become a property of the last dimension.
void take_blocks(core::AttentionInputs& in);
void take_blocks(const char* name, core::Tensor& t);

// When k and v have their sizes: scales are there where they belong, and get the sizes of k and v.
void take_scales(core::AttentionInputs& in);
void take_scale(const char* name, core::Tensor& scale, const char* of, const core::Tensor& t);

}  // namespace softdelta::api
