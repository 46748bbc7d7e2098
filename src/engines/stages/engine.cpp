#include "engines/stages/stages.h"

namespace softdelta::stages {

namespace {

using namespace engines;

std::string refuse_forward(const DeltaForward& c) {
    return c.out.u ? "u: the stages engines return it as the intermediate v_new" : "";
}

template <class T>
constexpr Engine make_engine(const char* name, const char* description, bool rounds) {
    return {.name = name,
            .description = description,
            .device = core::DeviceType::cpu,
            .choice = Choice::by_name,
            .rounds = rounds,
            .check_attention_stages = check_attention_intermediates,
            .check_delta_stages = check_delta_intermediates,
            .attention_forward = {apply<AttentionForward, attention_forward<T>>},
            .attention_backward = {apply<AttentionBackward, attention_backward<T>>},
            .delta_forward = {apply<DeltaForward, delta_forward<T>>, nullptr, refuse_forward},
            .delta_backward = {apply<DeltaBackward, delta_backward<T>>}};
}

}  // namespace

const Engine engine_f64 = make_engine<double>("stages_f64", "chunk form and blocked softmax in f64", false);
const Engine engine_f32 = make_engine<float>("stages_f32", "the same in f32", true);

}  // namespace softdelta::stages
