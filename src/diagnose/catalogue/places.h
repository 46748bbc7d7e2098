// The places of the pipelines and what may go wrong at each: mistakes that nobody listed.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "diagnose/catalogue/catalogue.h"

namespace softdelta::diagnose {

// Every change at every place of a family's pipeline.
std::span<const Entry> delta_points();
std::span<const Entry> attention_points();

inline std::span<const Entry> points_of(const io::Call& call) {
    return call.is_attention ? attention_points() : delta_points();
}

// Tables of places and of changes, in Markdown.
std::string places_page();

}  // namespace softdelta::diagnose
