// Intermediates that a dump carries under their kernels' names (docs/stages.md): the first wrong one in data flow tells
// the stage.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "io/call/call.h"

namespace softdelta::diagnose {

struct StageFinding {
    std::string name;
    double ratio = 0, limit = 0;  // RMSE / RMS of the truth, of the block of 64 rows that is nearest to its limit
    bool wrong = false;
    std::string note;  // why it could not be judged
};

// In the order of data flow.
std::vector<StageFinding> check_stages(const io::Call& call, const std::map<std::string, Tensor>& intermediates,
                                       int threads);

// Takes out those that are no intermediate of this call, by name, shape or type, and returns what is wrong with them:
// nothing may read them.
std::vector<StageFinding> take_out_misshapen(const io::Call& call, std::map<std::string, Tensor>& intermediates);

// A sentence about the first wrong one; empty without any.
std::string describe_stages(const std::vector<StageFinding>& findings);

}  // namespace softdelta::diagnose
