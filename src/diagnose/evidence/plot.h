// Error maps as a picture: rows × heads of every wrong result.
#pragma once

#include <string>
#include <vector>

#include "diagnose/evidence/error_map.h"

namespace softdelta::diagnose {

// An SVG document.
std::string plot_errors(const std::string& title, const std::vector<ErrorMap>& maps);

}  // namespace softdelta::diagnose
