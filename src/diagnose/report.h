// A diagnosis as text, for people.
#pragma once

#include <cstddef>
#include <string>

#include "diagnose/diagnose.h"

namespace softdelta::diagnose {

struct ReportOptions {
    std::size_t top = 5;  // mistakes to list
    bool coloured = false;
};

// Lines; the first has the title, the verdict and the seconds that the diagnosis took.
std::string report(const std::string& title, const io::Call& call, const Diagnosis& diagnosis, double seconds,
                   const ReportOptions& options);

}  // namespace softdelta::diagnose
